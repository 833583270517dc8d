"""Runs: what the loader moves. A run is one ranged read and where its bytes go. Values only.

Every kind of source (plain files, a repo's chunks) and every slice is turned into runs over the same output files;
the loader knows nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.transfer.tasks import Place
from kvctl.weights.strided import copy_rows


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` rows of `row_bytes` each: from `source` in the run's bytes, `source_stride` apart, to `dest` in the
    data section of output file `output`, `dest_stride` apart. Bytes. One row: a plain copy.
    """

    output: int
    source: int
    dest: int
    row_bytes: int
    rows: int = 1
    source_stride: int = 0
    dest_stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.rows


@dataclass(frozen=True, slots=True)
class Leaves:
    """How to verify a run: the leaf table (u64 LE per leaf) of the thing it is a part of, and the run's offset
    there, a multiple of the leaf size. `digest`: BLAKE3-256 of the run's bytes where it is a whole chunk.
    """

    table: memoryview
    start: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Read `length` bytes at `offset` of an object of `object_size` bytes, from any of `places`.

    `dest` set: the bytes are the data section of output file `output` at `dest`, in place. Else `pieces` say where
    they go (to several ranks' files, where those share a read).
    `needed`: bytes of it that the load asked for (the rest is leaf rounding or strided over-fetch).
    """

    places: tuple[Place, ...]
    object_size: int
    offset: int
    length: int
    needed: int
    output: int = 0
    dest: int | None = None
    pieces: tuple[Piece, ...] = ()
    leaves: Leaves | None = None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the result: its header (prefix included) and the size of its data section, bytes. `congruent_to`:
    the source's offset of the first data byte, so that memory can agree with it modulo 4 KiB; 0 where there is none.
    """

    name: str
    header: bytes
    data_size: int
    congruent_to: int = 0


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A tensor of the result: bytes [start, end) of the data section of output file `output`. `shape` is the
    slice's, for a tensor-parallel rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    output: int
    start: int
    end: int
    rank: int = 0


def scatter(run_bytes: memoryview, pieces: Sequence[Piece], outputs: Sequence[memoryview]) -> None:
    """Copy each piece to its place in the data sections `outputs`."""
    for p in pieces:
        copy_rows(run_bytes, p.source, p.source_stride, outputs[p.output], p.dest, p.dest_stride, p.rows, p.row_bytes)


def gather(outputs: Sequence[memoryview], pieces: Sequence[Piece], run_bytes: memoryview) -> None:
    """The inverse of `scatter`: fill the run's bytes from the data sections `outputs`."""
    for p in pieces:
        copy_rows(outputs[p.output], p.dest, p.dest_stride, run_bytes, p.source, p.source_stride, p.rows, p.row_bytes)


def interleave(queues: Sequence[Sequence[Run]]) -> list[Run]:
    """Round-robin over the queues (files, members), so that all of them stay busy from the first request on."""
    order: list[Run] = []
    longest = max((len(queue) for queue in queues), default=0)
    for position in range(longest):
        order.extend(queue[position] for queue in queues if position < len(queue))
    return order
