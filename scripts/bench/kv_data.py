"""The KV that the bench moves: sessions of a Llama-3-8B's geometry, each kept as one safetensors file, so that every
rival moves the same bytes: a tensor per layer for keys and one for values, [heads, tokens, dim].
"""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.seams import LayerKv, Layout, MemorySource
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.models import Spec
from kvctl.weights.safetensors import header_size, parse_header
from scripts.bench import model
from scripts.bench.rival import ModelFile, Setup, UnavailableError

LAYERS: Final = 32
HEADS: Final = 8
DIM: Final = 128
GROUP: Final = Group("full", tuple(range(LAYERS)), HEADS, DIM, DIM)
DESCRIPTOR: Final = Descriptor("aa" * 32, "bb" * 32, "cc" * 32, "BF16", (GROUP,))
PART_ROW: Final = HEADS * DIM * 2  # bytes of one token's keys in one layer, bf16; values take as many
TOKEN_BYTES: Final = LAYERS * 2 * PART_ROW
TENANT: Final = "bench"


def sessions(work: str, nbytes: int, count: int = 1) -> tuple[str, tuple[ModelFile, ...]]:
    """`count` sessions of whole tokens, about `nbytes` each, random bytes; made once and kept in `work`."""
    tokens = max(1, nbytes // TOKEN_BYTES)
    folder = os.path.join(work, f"kv-{count}x{tokens}")
    if not os.path.exists(f"{folder}.json"):
        os.makedirs(folder, exist_ok=True)
        names = [f"kv-{number:03}.safetensors" for number in range(count)]
        for name in names:
            model.write_file(os.path.join(folder, name), _tensors(name, tokens))
        model.describe(folder, names)
    return folder, model.read_description(f"{folder}.json")


def _tensors(name: str, tokens: int) -> list[Spec]:
    return [
        (tensor_name(name, layer, part), "BF16", (HEADS, tokens, DIM)) for layer in range(LAYERS) for part in ("k", "v")
    ]


def tensor_name(file: str, layer: int, part: str) -> str:
    """Different in every file: the bench knows tensors by name."""
    return f"{file.partition('.')[0]}/layer.{layer:02}.{part}"


def tokens_of(file: ModelFile) -> int:
    return (file.size - file.data_start) // TOKEN_BYTES


def transcript(tokens: int, seed: int) -> array[int]:
    """Token ids. Sessions of different seeds share no block."""
    return array("I", random.Random(seed).randbytes(4 * tokens))


def address(file: ModelFile) -> str:
    return f"{TENANT}/{file.name.partition('.')[0]}"


def members(setup: Setup) -> tuple[StoreConfig, ...]:
    if not setup.repo:
        raise UnavailableError("no repo could be made")
    return (parse_store(setup.repo, endpoints=(setup.endpoint,) if setup.endpoint else ()),)


def read_file(folder: str, file: ModelFile) -> tuple[HostBuffer, Mapping[str, memoryview]]:
    """The file in memory of this process, and its tensors by name."""
    buffer = HostBuffer(file.size)
    with open(os.path.join(folder, file.name), "rb", buffering=0) as source:
        done = 0
        while done < file.size:
            done += source.readinto(buffer.view[done:])
    where = buffer.view
    start = header_size(bytes(where[:8]), file.size, file.name)
    header = parse_header(bytes(where[:start]), file.size, file.name)
    return buffer, {tensor.name: where[start + tensor.start : start + tensor.end] for tensor in header.tensors}


def source_of(file: ModelFile, tensors: Mapping[str, memoryview], seed: int) -> MemorySource:
    layers = {
        (0, layer): LayerKv(tensors[tensor_name(file.name, layer, "k")], tensors[tensor_name(file.name, layer, "v")])
        for layer in range(LAYERS)
    }
    return MemorySource(DESCRIPTOR, transcript(tokens_of(file), seed), layers, producer={"engine": "bench"})


class TouchedSink:
    """Memory that was touched before, filled again by each pull."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = HostBuffer(nbytes)
        self._buffer.prefault()
        self.views: list[LayerKv] = []
        self.usable = 0

    def prepare(self, descriptor: Descriptor, layout: Layout) -> Sequence[LayerKv]:
        del descriptor
        self.views, at = [], 0
        for slot in layout.slots:
            middle, end = at + slot.k_bytes, at + slot.k_bytes + slot.v_bytes
            self.views.append(LayerKv(self._buffer.view[at:middle], self._buffer.view[middle:end], slot.start))
            at = end
        return self.views

    def layer_ready(self, layer: int) -> None:
        del layer

    def invalid(self, from_token: int) -> None:
        self.usable = min(self.usable, from_token)

    def done(self, tokens: int) -> None:
        self.usable = tokens
