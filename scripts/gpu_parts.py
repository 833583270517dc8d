"""What the CUDA suite is made of: a model to load, and a device that takes its time and counts."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvctl.memory.buffers import Buffer
from kvctl.memory.cuda import CudaDevice, require
from kvctl.memory.devices import Device, Event, HostDevice, Span
from kvctl.memory.shareable import Mapped
from kvctl.testing.models import raw_header

SHARDS: Final = 3
SLOWER_SECONDS: Final = 0.05
SLOWER_CYCLES: Final = 50_000_000  # of a GPU's clock: some 30 ms
WIDTH: Final = 4096  # bytes of a row of the model's tensors, two to a bf16 value


def write_model(folder: str, size: int) -> None:
    """Bf16 matrices of random bytes in three shards, `size` bytes together. Not in memory as a whole."""
    os.makedirs(folder, exist_ok=True)
    rows = max(2, size // SHARDS // 4 // WIDTH // 2 * 2)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        document: dict[str, object] = {}
        names = [f"model.layers.{shard}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        names.append(f"model.layers.{shard}.self_attn.o_proj.weight")
        for number, tensor in enumerate(names):
            start = number * rows * WIDTH
            document[tensor] = {
                "dtype": "BF16", "shape": [rows, WIDTH // 2], "data_offsets": [start, start + rows * WIDTH],
            }  # fmt: skip
            weight_map[tensor] = name
        with open(os.path.join(folder, name), "wb") as file:
            file.write(raw_header(document))
            left = len(names) * rows * WIDTH
            while left:
                left -= file.write(os.urandom(min(left, 16 << 20)))
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    Path(folder, "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 32}))


class Watched:
    """A device that takes longer for each copy, and counts the copies that were begun while another ran."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.name, self.memory_kind, self.staging_kind = inner.name, inner.memory_kind, inner.staging_kind
        self.begun = self.together = self.running = 0
        self.lock = threading.Lock()

    def allocate(self, nbytes: int) -> Buffer:
        return self.inner.allocate(nbytes)

    def over(self, mapped: Mapped) -> Buffer:
        return self.inner.over(mapped)

    def staging(self, nbytes: int) -> Buffer:
        return self.inner.staging(nbytes)

    def copy_async(self, source: Buffer, target: Buffer, span: Span) -> Event:
        with self.lock:
            self.begun += 1
            self.together += self.running > 0
            self.running += 1
        if isinstance(self.inner, CudaDevice):
            lib = require(self.name)
            with lib.cuda.stream(self.inner._stream):
                lib.cuda._sleep(SLOWER_CYCLES)
        return WatchedEvent(self, self.inner.copy_async(source, target, span))

    def read_back(self, source: Buffer, offset: int, view: memoryview) -> None:
        self.inner.read_back(source, offset, view)

    def finish(self) -> None:
        self.inner.finish()

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class WatchedEvent:
    device: Watched
    inner: Event

    def wait(self) -> None:
        self.inner.wait()
        with self.device.lock:
            self.device.running -= 1


class SlowHostDevice(HostDevice):
    def copy(self, source: Buffer, target: Buffer, span: Span) -> None:
        time.sleep(SLOWER_SECONDS)
        super().copy(source, target, span)
