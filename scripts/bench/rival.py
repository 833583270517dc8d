"""What a rival is: something that loads one model, again and again, in a process of its own. And what it is told.

`Setup` travels as JSON from the bench to the worker process. Imports nothing of the rivals themselves.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Self

import xxhash

from kvctl.memory.buffers import HostBuffer


class UnavailableError(Exception):
    """This rival cannot run here; the text says why. Shown in the table, not hidden."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One safetensors file: size in bytes, where its data section starts, and XXH3-64 of the whole file and of
    each tensor, by which the bench proves once per rival that the right bytes arrived.
    """

    name: str
    size: int
    data_start: int
    digest: str
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and where it is. `direct`: O_DIRECT by those who can, a cold page cache for the rest."""

    folder: str
    files: tuple[ModelFile, ...]
    direct: bool = False
    endpoint: str = ""
    bucket: str = ""
    prefix: str = ""
    repo: str = ""
    scratch: str = ""

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def paths(self) -> list[str]:
        return [os.path.join(self.folder, file.name) for file in self.files]

    def key(self, file: ModelFile) -> str:
        return f"{self.prefix}/{file.name}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        files = tuple(ModelFile(**file) for file in fields.pop("files"))
        return cls(files=files, **fields)


@dataclass(frozen=True, slots=True)
class Piece:
    """One ranged read of a file and where it lands in the destination."""

    file: int
    offset: int
    length: int
    dest: int


def pieces(setup: Setup, starts: Sequence[int], size: int) -> list[Piece]:
    """Every file in ranges of `size`, round-robin over the files."""
    queues = [
        [Piece(number, at, min(size, file.size - at), start + at) for at in range(0, file.size, size)]
        for number, (file, start) in enumerate(zip(setup.files, starts, strict=True))
    ]
    longest = max(len(queue) for queue in queues)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


class Rival(ABC):
    """`load` is the timed part. `release` drops what a load allocated, outside of it. `digests` gives XXH3-64 by
    file name or tensor name of what the last load brought; called once, in the warm-up round.

    `takes_destination`: the memory was touched before the timed part; else the loader allocates its own inside.
    `cached_only`: cannot do O_DIRECT, so the direct scenario drops the page cache before it instead.
    """

    takes_destination: ClassVar[bool] = True
    cached_only: ClassVar[bool] = False
    note: ClassVar[str] = ""
    # environment that must be there before the peer's library is imported
    environment: ClassVar[Mapping[str, str]] = {}

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def variants(self) -> Sequence[str]:
        """Settings that the warm-up tries; the fastest one is measured. Empty: there is one."""
        return ("",)

    @abstractmethod
    def load(self, variant: str) -> None: ...

    def release(self) -> None:
        return

    @abstractmethod
    def digests(self) -> Mapping[str, str]: ...

    def facts(self) -> Mapping[str, object]:
        """More about the last load that its sample should keep, as JSON values."""
        return {}


@dataclass
class Destination:
    """Memory for all files, each at a page boundary, touched once here and reused by every load."""

    buffer: HostBuffer
    starts: list[int] = field(default_factory=list)

    @classmethod
    def make(cls, setup: Setup) -> Self:
        starts: list[int] = []
        end = 0
        for file in setup.files:
            starts.append(end)
            end += (file.size + 4095) // 4096 * 4096
        buffer = HostBuffer(end)
        buffer.prefault()
        return cls(buffer, starts)

    def view(self, setup: Setup, number: int) -> memoryview:
        start = self.starts[number]
        return self.buffer.view[start : start + setup.files[number].size]

    def digests(self, setup: Setup) -> dict[str, str]:
        return {
            file.name: xxhash.xxh3_64_hexdigest(self.view(setup, number)) for number, file in enumerate(setup.files)
        }


def wrong(expected: Setup, got: Mapping[str, str]) -> list[str]:
    """The names whose bytes are not the model's; a rival that brought fewer is wrong about the missing ones."""
    by_name = {file.name: file.digest for file in expected.files}
    if not set(by_name) & set(got):
        by_name = {name: digest for file in expected.files for name, digest in file.tensors.items()}
    return [name for name, digest in by_name.items() if got.get(name) != digest]


def drop_cache(paths: Iterable[str]) -> None:
    """Evict the files' pages. They are clean: the bench synced them when it wrote them."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
