"""From what objects hold and what a load wants to the runs it takes. Pure: byte geometry in, runs out.

A plain file and a repo's chunk are the same here: an object that holds parts of a data section at its offsets. So are
a whole load and a rank's slices: wants that name parts and where they go. Every wanted byte is delivered once to each
want; what is fetched beyond that (leaf rounding, the gaps of strided slices) is `Run.length - Run.needed`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from kvctl.core.units import KIB, MIB
from kvctl.transfer.tasks import Place
from kvctl.weights.runs import Leaves, Piece, Run, interleave
from kvctl.weights.strided import Strided, intersect, range_in_rows, span

MAX_RUN: Final = 16 * MIB
IN_PLACE: Final = 64 * KIB  # below it a copy costs less than what landing in place asks for
OWN_RUN: Final = 2 * MIB  # a block that touches others shares their request below it
ROWS_APART: Final = 1 * MIB  # strided rows farther apart are read one by one, nearer ones with what lies between
_ALIGN: Final = 4096


@dataclass(frozen=True, slots=True)
class SourceObject:
    """`held`: (offset in the object, part of the data section of file `file`), ascending. `table`: its leaf table,
    `digest`: its BLAKE3-256, for chunks.
    """

    file: int
    places: tuple[Place, ...]
    size: int
    held: tuple[tuple[int, Strided], ...]
    table: memoryview | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Want:
    """Bring `part` of the data section of file `file`, packed row by row, to `dest` in the data section of `output`."""

    file: int
    part: Strided
    output: int
    dest: int


@dataclass(slots=True)
class _Block:
    """Wanted bytes of an object: rows at `at`, `stride` apart, that go to `dest`, `dest_stride` apart. Not frozen: a
    plan makes hundreds of thousands, and freezing triples what one costs.
    """

    at: int
    stride: int
    rows: int
    width: int
    output: int
    dest: int
    dest_stride: int

    @property
    def end(self) -> int:
        return self.at + (self.rows - 1) * self.stride + self.width


def plan_runs(
    objects: Sequence[SourceObject], wants: Iterable[Want], *, max_run: int = MAX_RUN, leaf: int = 1
) -> list[Run]:
    """Runs for all wants, at most `max_run` bytes each, round-robin over files and first places. `leaf`: runs begin
    and end at multiples of it in their object (or at its end); `max_run` is rounded down to one.
    """
    max_run = max(leaf, max_run // leaf * leaf)
    by_file: dict[int, list[Want]] = {}
    for want in merge_wants(wants):
        by_file.setdefault(want.file, []).append(want)
    indexes = {file: _Lookup(found) for file, found in by_file.items()}
    queues: dict[tuple[int, int], list[Run]] = {}
    for item in objects:
        lookup = indexes.get(item.file)
        if lookup is None:
            continue
        blocks = _blocks(item, lookup)
        if blocks:
            # chunks spread over members whatever file they are of; plain files are queues of their own
            key = (item.places[0].member, -1 if item.table is not None else item.file)
            queues.setdefault(key, []).extend(_object_runs(item, blocks, max_run, leaf))
    return interleave([queues[key] for key in sorted(queues)])


def merge_wants(wants: Iterable[Want]) -> list[Want]:
    """Ranges that touch in the source and in the destination become one."""
    merged: list[Want] = []
    for want in sorted(wants, key=lambda item: (item.file, item.output, item.part.start, item.dest)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.file == want.file
            and last.output == want.output
            and last.part.contiguous
            and want.part.contiguous
            and last.part.end == want.part.start
            and last.dest + last.part.nbytes == want.dest
        ):
            merged[-1] = replace(last, part=span(last.part.start, last.part.nbytes + want.part.nbytes))
        else:
            merged.append(want)
    return merged


class _Lookup:
    """Wants of one file by where they lie; wants of one tensor overlap, those of different tensors do not."""

    def __init__(self, wants: list[Want]) -> None:
        self.wants = sorted(wants, key=lambda want: want.part.start)
        self.starts = [want.part.start for want in self.wants]
        self.ends = list(accumulate((want.part.end for want in self.wants), max))

    def meeting(self, part: Strided) -> Iterable[Want]:
        first = bisect_right(self.ends, part.start)
        for number in range(first, len(self.wants)):
            if self.starts[number] >= part.end:
                return
            yield self.wants[number]


def _blocks(item: SourceObject, lookup: _Lookup) -> list[_Block]:
    blocks = [
        _Block(
            at + shared.b,
            shared.b_stride,
            shared.rows,
            shared.width,
            want.output,
            want.dest + shared.a,
            shared.a_stride,
        )
        for at, part in item.held
        for want in lookup.meeting(part)
        for shared in intersect(want.part, part)
    ]
    flat = [
        replace(block, rows=1, width=block.rows * block.width)
        if block.rows > 1 and block.stride == block.dest_stride == block.width
        else block
        for block in blocks
    ]
    flat.sort(key=lambda block: (block.output, block.at, block.dest))
    joined: list[_Block] = []
    for block in flat:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.rows == block.rows == 1
            and last.output == block.output
            and last.at + last.width == block.at
            and last.dest + last.width == block.dest
        ):
            joined[-1] = replace(last, width=last.width + block.width)
        else:
            joined.append(block)
    return sorted(joined, key=lambda block: (block.at, block.output, block.dest))


def _object_runs(item: SourceObject, blocks: list[_Block], max_run: int, leaf: int) -> list[Run]:
    """In-place runs for blocks that are large, alone and leaf-aligned; the rest staged, neighbours together."""
    runs: list[Run] = []
    staged: list[_Block] = []
    reach = -1
    for number, block in enumerate(blocks):
        end = block.end
        before, after = reach, blocks[number + 1].at if number + 1 < len(blocks) else item.size + 1
        alone = before <= block.at and end <= after
        touches = block.at == before or end == after
        reach = max(reach, end)
        aligned = block.at % leaf == 0 and (end % leaf == 0 or end == item.size)
        large = block.width >= (OWN_RUN if touches else IN_PLACE) or block.width == item.size
        if block.rows == 1 and alone and aligned and large:
            runs += [
                Run(
                    item.places,
                    item.size,
                    lo,
                    hi - lo,
                    hi - lo,
                    output=block.output,
                    dest=block.dest + lo - block.at,
                    leaves=_leaves(item, lo, hi),
                )
                for lo, hi in _split(block.at, end, max_run)
            ]
        else:
            staged.append(block)
    runs += _staged_runs(item, staged, max_run, leaf)
    return sorted(runs, key=lambda run: run.offset)


def _staged_runs(item: SourceObject, blocks: list[_Block], max_run: int, leaf: int) -> list[Run]:
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        if block.rows > 1 and block.stride - block.width >= ROWS_APART:
            ranges += [
                (block.at + row * block.stride, block.at + row * block.stride + block.width)
                for row in range(block.rows)
            ]
        else:
            ranges.append((block.at, block.end))
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted((lo // leaf * leaf, min(-(-hi // leaf) * leaf, item.size)) for lo, hi in ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    runs: list[Run] = []
    first = 0
    ordered = sorted(blocks, key=lambda block: block.at)
    reaches = list(accumulate((block.end for block in ordered), max))
    for start, end in merged:
        for lo, hi in _split(start, end, max_run):
            while first < len(ordered) and reaches[first] <= lo:
                first += 1
            near: list[_Block] = []
            for number in range(first, len(ordered)):
                if ordered[number].at >= hi:
                    break
                near.append(ordered[number])
            pieces = [piece for block in near for piece in _clip(block, lo, hi)]
            if pieces:
                runs.append(
                    Run(
                        item.places,
                        item.size,
                        lo,
                        hi - lo,
                        min(hi - lo, _needed(pieces)),
                        pieces=tuple(pieces),
                        leaves=_leaves(item, lo, hi),
                    )
                )
    return runs


def _clip(block: _Block, lo: int, hi: int) -> list[Piece]:
    """The part of a block inside [lo, hi) of its object, as copies out of a run that begins at lo."""
    if lo <= block.at and block.end <= hi:
        stride, dest_stride = (block.stride, block.dest_stride) if block.rows > 1 else (block.width, block.width)
        return [Piece(block.output, block.at - lo, block.dest, block.width, block.rows, stride, dest_stride)]
    found: list[Piece] = []
    area = Strided(block.at, block.rows, block.stride, block.width)
    for shared in range_in_rows(span(lo, hi - lo), area):
        row, inside = divmod(shared.b, block.width)
        dest = block.dest + row * block.dest_stride + inside
        one = shared.rows == 1
        found.append(
            Piece(
                block.output,
                shared.a,
                dest,
                shared.width,
                shared.rows,
                shared.width if one else shared.a_stride,
                shared.width if one else block.dest_stride,
            )
        )
    return found


def _needed(pieces: Sequence[Piece]) -> int:
    """Wanted bytes of a run: what several wants share counts once."""
    distinct = {(piece.source, piece.source_stride, piece.rows, piece.row_bytes) for piece in pieces}
    return sum(rows * width for _, _, rows, width in distinct)


def _leaves(item: SourceObject, lo: int, hi: int) -> Leaves | None:
    if item.table is None:
        return None
    return Leaves(item.table, lo, item.digest if hi - lo == item.size else "")


def _split(lo: int, hi: int, max_run: int) -> list[tuple[int, int]]:
    """Runs of at most `max_run`, cut at multiples of 4 KiB of the object where the limit allows."""
    runs: list[tuple[int, int]] = []
    while lo < hi:
        step = max_run - (lo % _ALIGN if max_run > _ALIGN else 0)
        runs.append((lo, min(lo + step, hi)))
        lo += step
    return runs


def over_fetch(runs: Sequence[Run]) -> float:
    """Fetched / needed; 1.0 when nothing is needed."""
    needed = sum(run.needed for run in runs)
    return sum(run.length for run in runs) / needed if needed else 1.0


def misaligned_bytes(runs: Sequence[Run], starts: Sequence[int]) -> int:
    """Bytes of in-place runs whose place in memory and in their object differ modulo 4 KiB, so that O_DIRECT or RDMA
    cannot land them there. `starts`: the offset of each output's data section in its (page-aligned) buffer.
    """
    return sum(
        run.length for run in runs if run.dest is not None and (starts[run.output] + run.dest - run.offset) % _ALIGN
    )


def spread(runs: Sequence[Run]) -> Mapping[int, tuple[int, int]]:
    """Member -> (bytes, requests), by each run's first place."""
    found: dict[int, tuple[int, int]] = {}
    for run in runs:
        nbytes, requests = found.get(run.places[0].member, (0, 0))
        found[run.places[0].member] = nbytes + run.length, requests + 1
    return found
