"""Rivals on files: the preadv ceiling, kvctl, and the loaders that people use. One class each; a class imports its
library when it is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar, Final

import xxhash

from scripts.bench.rival import Destination, Piece, Rival, Setup, pieces

if TYPE_CHECKING:
    import torch

RANGE: Final = 16 << 20


class Preadv(Rival):
    """The ceiling: nothing but preadv of 16 MiB into touched memory, on a few threads."""

    note = "threads of preadv, 16 MiB each"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._memory = Destination.make(setup)
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if setup.direct else 0)
        self._fds = [os.open(path, flags) for path in setup.paths]
        self._plain = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in setup.paths]
        self._pieces = pieces(setup, self._memory.starts, RANGE)

    def variants(self) -> Sequence[str]:
        # a device wants more in flight than a page cache does
        return ("1", "2", "4", "8") if self.setup.direct else ("1", "2", "4")

    def load(self, variant: str) -> None:
        with ThreadPoolExecutor(int(variant)) as pool:
            for _ in pool.map(self._read, self._pieces):
                pass

    def _read(self, piece: Piece) -> None:
        view = self._memory.buffer.view
        # O_DIRECT takes whole blocks: the odd tail of a file goes through the page cache
        aligned = piece.length // 4096 * 4096 if self.setup.direct else piece.length
        done = 0
        while done < piece.length:
            fd, until = (self._fds, aligned) if done < aligned else (self._plain, piece.length)
            at = piece.dest + done
            done += os.preadv(fd[piece.file], [view[at : piece.dest + until]], piece.offset + done)

    def digests(self) -> Mapping[str, str]:
        return self._memory.digests(self.setup)


class Safetensors(Rival):
    """`safe_open` maps the file; `Tensor.copy_` into memory that was touched before is what an engine does."""

    cached_only = True
    note = "mmap, copy_ into touched tensors"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import safetensors

        self._open = safetensors.safe_open
        self._kept: dict[str, torch.Tensor] = {}
        for path in setup.paths:
            with self._open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    self._kept[name] = file.get_tensor(name).clone()

    def load(self, variant: str) -> None:
        for path in self.setup.paths:
            with self._open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    self._kept[name].copy_(file.get_tensor(name))

    def digests(self) -> Mapping[str, str]:
        return tensor_digests(self._kept)


class SafetensorsFresh(Safetensors):
    """The same into tensors of its own: `clone`, so that every byte is really read."""

    takes_destination = False
    note = "mmap, clone of each tensor"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.release()

    def load(self, variant: str) -> None:
        for path in self.setup.paths:
            with self._open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    self._kept[name] = file.get_tensor(name).clone()

    def release(self) -> None:
        self._kept.clear()


class FastSafetensors(Rival):
    takes_destination = False
    note = "nogds on the CPU"
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        os.environ["FASTSAFETENSORS_ODIRECT"] = "1" if setup.direct else "0"
        import fastsafetensors

        self._kind = fastsafetensors.SafeTensorsFileLoader
        self._held: dict[str, torch.Tensor] = {}

    def load(self, variant: str) -> None:
        loader = self._kind(None, "cpu", nogds=True, set_numa=False)
        loader.add_filenames({0: self.setup.paths})
        # tensors share ownership of the memory: closing keeps them
        memory = loader.copy_files_to_device()
        self._held = {name: memory.get_tensor(name) for name in loader.get_keys()}
        memory.close()
        loader.close()

    def release(self) -> None:
        self._held.clear()

    def digests(self) -> Mapping[str, str]:
        return tensor_digests(self._held)


class RunaiFile(Rival):
    takes_destination = False
    note = "its defaults"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        os.environ["RUNAI_STREAMER_LOG_LEVEL"] = "ERROR"
        direct, buffered = "io_uring_direct,libaio_direct", "io_uring_buffered,sync_buffered"
        os.environ["RUNAI_STREAMER_FS_STRATEGY"] = direct if setup.direct else buffered
        from runai_model_streamer import SafetensorsStreamer

        self._kind = SafetensorsStreamer
        self._held: dict[str, torch.Tensor] = {}

    @property
    def sources(self) -> list[str]:
        return self.setup.paths

    def load(self, variant: str) -> None:
        with self._kind() as streamer:
            streamer.stream_files(self.sources)
            self._held = dict(streamer.get_tensors())

    def release(self) -> None:
        self._held.clear()

    def digests(self) -> Mapping[str, str]:
        return tensor_digests(self._held)


class RunaiFileCopy(RunaiFile):
    """Through a ring of its own (memory limit 512 MB), each tensor copied into touched memory, as an engine does."""

    takes_destination = True
    note = "ring of 512 MB, copy_ into touched tensors"

    def __init__(self, setup: Setup) -> None:
        os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = "512000000"
        super().__init__(setup)
        with self._kind() as streamer:
            streamer.stream_files(self.sources)
            self._held = {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    def load(self, variant: str) -> None:
        with self._kind() as streamer:
            streamer.stream_files(self.sources, owned=False)
            for name, tensor in streamer.get_tensors():
                self._held[name].copy_(tensor)

    def release(self) -> None:
        return


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    import torch

    return {
        name: xxhash.xxh3_64_hexdigest(memoryview(tensor.contiguous().view(torch.uint8).reshape(-1).numpy()))
        for name, tensor in tensors.items()
    }
