"""How the data section of a safetensors file becomes chunks. Pure but for `gather` and `scatter`.

Aims: whole tensors share chunks across fine-tunes, longer headers and other shardings; a tensor-parallel rank reads
whole chunks. So the data section is cut at tensor boundaries, and

- tensors that are split among ranks are cut into lanes, one to a chunk: eighths along the split dimension, made of two
  sixteenths in tensors of a stripe and more. Ranks of 2, 4 or 8 read whole chunks, of 16 half chunks. Row-parallel
  tensors make column tiles, stored row by row;
- a lane of a big tensor is cut again every stripe (tiles: in bands of rows);
- neighbours smaller than a stripe share chunks (lane by lane), up to `GROUP` stripes in all, and never across a layer.
  Groups end where a hash of the module's name says so, not by position, so that another sharding finds the same groups
  again after the first such name;
- tensors of a few KiB (norms, biases, scales) are collected over the whole file in chunks of their own;
- the rest is cut every stripe inside a tensor.

Readers need none of this: the manifest records each chunk's parts (`kvctl.weights.manifest`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvctl.weights.rules import Axis, Rules
from kvctl.weights.safetensors import Header, TensorInfo
from kvctl.weights.slicing import Heads, dim_run, parts_of
from kvctl.weights.strided import Strided, copy_rows, intersect, span

LANES: Final = (16, 8, 4, 2)
GROUP: Final = 4  # stripes of neighbours that a pusher holds at once, and one changed tensor rewrites at most
_TINY: Final = 64  # a tensor below stripe / 64 is collected
_LANED: Final = 32  # a group below stripe / 32 is not worth eight objects
_UNITS: Final = 8  # one module in eight ends a group
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class ChunkCut:
    """A chunk: the parts of the data section that it holds, one after the other, each row by row."""

    parts: tuple[Strided, ...]

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def start(self) -> int:
        """First byte of the data section that it touches."""
        return min(part.start for part in self.parts)

    @property
    def end(self) -> int:
        return max(part.end for part in self.parts)

    def held(self) -> Iterator[tuple[int, Strided]]:
        """(offset in the chunk, part)."""
        at = 0
        for part in self.parts:
            yield at, part
            at += part.nbytes


def cut_file(header: Header, stripe: int, rules: Rules | None = None, heads: Heads | None = None) -> list[ChunkCut]:
    """The chunks of a file, by where they begin; every byte of the data section is in exactly one. `stripe` bytes is
    the largest chunk.
    """
    rules, heads = rules or Rules(), heads or Heads()
    tiny: list[TensorInfo] = []
    cuts: list[ChunkCut] = []
    group: list[_Laned] = []
    for tensor in header.tensors:
        if not tensor.nbytes:
            continue
        if tensor.nbytes < max(1, stripe // _TINY):
            tiny.append(tensor)
            continue
        item = _Laned(tensor, _lanes(tensor, rules.axis(tensor.name, tensor.shape), heads, stripe))
        if group and not _continues(group, item, stripe):
            cuts += _cut_group(group, stripe)
            group = []
        group.append(item)
    cuts += _cut_group(group, stripe)
    cuts += _cut_tiny(tiny, stripe)
    return sorted(cuts, key=lambda cut: (cut.start, cut.end))


def windows(cuts: Sequence[ChunkCut], largest: int) -> list[list[ChunkCut]]:
    """Neighbouring chunks whose bytes span at most `largest` together: read the span once, gather all of them. A
    chunk that alone spans more is by itself: read its parts.
    """
    found: list[list[ChunkCut]] = []
    begin = end = 0
    for cut in cuts:
        if found and max(end, cut.end) - begin <= largest:
            found[-1].append(cut)
            end = max(end, cut.end)
        else:
            found.append([cut])
            begin, end = cut.start, cut.end
    return found


def gather(cut: ChunkCut, section: memoryview, out: memoryview, base: int = 0) -> None:
    """Fill `out` with the chunk's bytes. `section` holds the data section from `base` on."""
    for at, part in cut.held():
        copy_rows(section, part.start - base, part.stride, out, at, part.width, part.rows, part.width)


def scatter(cut: ChunkCut, chunk: memoryview, section: memoryview, base: int = 0) -> None:
    """Put the chunk's bytes where they belong in `section`, which holds the data section from `base` on."""
    for at, part in cut.held():
        copy_rows(chunk, at, part.width, section, part.start - base, part.stride, part.rows, part.width)


def cover_fault(cuts: Iterable[ChunkCut], size: int) -> str:
    """Why the chunks do not hold each of `size` bytes exactly once; empty when they do."""
    parts = sorted((part for cut in cuts for part in cut.parts), key=lambda part: part.start)
    active: list[Strided] = []
    total = 0
    for part in parts:
        total += part.nbytes
        active = [other for other in active if other.end > part.start]
        if any(intersect(other, part) for other in active):
            return f"bytes from {part.start} on are held twice"
        active.append(part)
    if total != size or any(part.end > size for part in parts):
        return f"{total} bytes of {size} are held"
    return ""


@dataclass(frozen=True, slots=True)
class _Laned:
    """A tensor and its lanes: for each, the parts (absolute in the data section). One lane: not split."""

    tensor: TensorInfo
    lanes: tuple[tuple[Strided, ...], ...]

    @property
    def strided(self) -> bool:
        return any(not part.contiguous for part in self.lanes[0])


def _lanes(tensor: TensorInfo, axis: Axis, heads: Heads, stripe: int) -> tuple[tuple[Strided, ...], ...]:
    dim = axis.dim
    whole = ((span(tensor.start, tensor.nbytes),),)
    if dim is None or dim >= len(tensor.shape):
        return whole
    parts = parts_of(tensor.shape[dim], axis, heads)
    if dim > 0 and len(parts) > 1:
        return whole
    # A sixteenth of a small tensor is less than a leaf: recording it would gain nothing.
    for count in LANES if tensor.nbytes >= stripe else LANES[1:]:
        if any(length % count for length, _ in parts):
            continue
        lanes: list[tuple[Strided, ...]] = []
        for lane in range(count):
            runs: list[Strided] = []
            at = 0
            for length, _ in parts:
                step = length // count
                run = dim_run(tensor, dim, at + lane * step, at + (lane + 1) * step)
                if run is None:
                    break
                runs.append(run.shifted(tensor.start))
                at += length
            if len(runs) < len(parts):
                break
            lanes.append(tuple(runs))
        if len(lanes) == count:
            return tuple(lanes)
    return whole


def _continues(group: list[_Laned], item: _Laned, stripe: int) -> bool:
    """Whether `item` shares chunks with the group before it."""
    last = group[-1]
    if last.tensor.nbytes >= stripe or item.tensor.nbytes >= stripe or len(last.lanes) != len(item.lanes):
        return False
    if (
        sum(member.tensor.nbytes for member in group) + item.tensor.nbytes
        > (GROUP if len(item.lanes) > 1 else 1) * stripe
    ):
        return False
    before, here = _modules(last.tensor.name), _modules(item.tensor.name)
    if before[0] != here[0]:
        return False
    return before[1] == here[1] or zlib.crc32(here[1].encode()) % _UNITS != 0


def _modules(name: str) -> tuple[str, str]:
    """The layer and the innermost numbered module of a tensor: 'model.layers.3', 'model.layers.3.mlp.experts.17'."""
    numbers = list(_NUMBER.finditer(name))
    if not numbers:
        return "", ""
    return name[: numbers[0].end()], name[: numbers[-1].end()]


def _cut_group(group: list[_Laned], stripe: int) -> list[ChunkCut]:
    if not group:
        return []
    total = sum(item.tensor.nbytes for item in group)
    count = len(group[0].lanes)
    if count == 1 or total < stripe // _LANED:
        # neighbours in the data section need not touch: a tiny tensor between them is collected elsewhere
        return _pack([span(item.tensor.start, item.tensor.nbytes) for item in group], stripe)
    pair = max(1, count // 8)
    cuts: list[ChunkCut] = []
    for first in range(0, count, pair):
        for band in _bands(group, stripe):
            parts = [part for lane in range(first, first + pair) for part in _lane_parts(group, lane, band)]
            cuts += _pack(parts, stripe)
    return cuts


def _bands(group: list[_Laned], stripe: int) -> list[tuple[int, int] | None]:
    """Row bands of one big tiled tensor, so that a band of all its lanes spans at most GROUP stripes; else one None."""
    if len(group) > 1 or not group[0].strided:
        return [None]
    part = group[0].lanes[0][0]
    rows = max(1, GROUP * stripe // part.stride)
    # A tile is at most a stripe, and its two lanes stay together.
    rows = min(rows, max(1, stripe // (part.width * max(1, len(group[0].lanes) // 8))))
    bands = -(-part.rows // rows)
    step = -(-part.rows // bands)
    return [(first, min(first + step, part.rows)) for first in range(0, part.rows, step)]


def _lane_parts(group: list[_Laned], lane: int, band: tuple[int, int] | None) -> list[Strided]:
    parts = [part for item in group for part in item.lanes[lane]]
    if band is None:
        return parts
    first, last = band
    return [Strided(part.start + first * part.stride, last - first, part.stride, part.width) for part in parts]


def _cut_tiny(tiny: list[TensorInfo], stripe: int) -> list[ChunkCut]:
    """Collected in order; a layer whose name's hash says so begins a new chunk."""
    cuts: list[ChunkCut] = []
    group: list[Strided] = []
    layer = ""
    for tensor in tiny:
        here = _modules(tensor.name)[0]
        if group and here != layer and zlib.crc32(here.encode()) % _UNITS == 0:
            cuts += _pack(group, stripe)
            group = []
        layer = here
        group.append(span(tensor.start, tensor.nbytes))
    return cuts + _pack(group, stripe)


def _pack(parts: Iterable[Strided], stripe: int) -> list[ChunkCut]:
    """Chunks of at most `stripe` bytes from parts in order, touching ranges joined. A part larger than a stripe is
    cut every stripe from its own start; a smaller one is never cut.
    """
    cuts: list[ChunkCut] = []
    chunk: list[Strided] = []
    size = 0

    def flush() -> None:
        nonlocal chunk, size
        if chunk:
            cuts.append(ChunkCut(tuple(chunk)))
        chunk, size = [], 0

    for part in _joined(parts):
        if size + part.nbytes > stripe:
            flush()
        if part.nbytes <= stripe:
            chunk.append(part)
            size += part.nbytes
            continue
        cuts += [ChunkCut((piece,)) for piece in _split(part, stripe)]
    flush()
    return cuts


def _joined(parts: Iterable[Strided]) -> list[Strided]:
    joined: list[Strided] = []
    for part in parts:
        if part.rows > 1 and part.contiguous:
            part = span(part.start, part.nbytes)
        if joined and joined[-1].rows == part.rows == 1 and joined[-1].end == part.start:
            joined[-1] = span(joined[-1].start, joined[-1].nbytes + part.nbytes)
        else:
            joined.append(part)
    return joined


def _split(part: Strided, stripe: int) -> list[Strided]:
    """Pieces of at most `stripe` bytes: ranges cut every stripe, tiles in bands, rows wider than a stripe in ranges."""
    if part.rows == 1:
        return [span(part.start + at, min(stripe, part.width - at)) for at in range(0, part.width, stripe)]
    if part.width > stripe:
        return [
            piece
            for row in range(part.rows)
            for piece in _split(span(part.start + row * part.stride, part.width), stripe)
        ]
    rows = stripe // part.width
    return [
        Strided(part.start + first * part.stride, min(rows, part.rows - first), part.stride, part.width)
        for first in range(0, part.rows, rows)
    ]
