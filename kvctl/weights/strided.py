"""Byte geometry: equal rows at equal distances, how two such sets meet, and copying them. Pure but for the copies.

Slices, tiles and read plans are all made of `Strided`; a contiguous range is one row. Nothing here is
materialised per row: the arithmetic costs the same for 8 rows and for 8 million.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Strided:
    """Rows `start + i * stride .. + width`, i < rows, in bytes. Packed form: row i at `i * width`.
    Invariants: rows and width at least 1; stride >= width when rows > 1.
    """

    start: int
    rows: int
    stride: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + (self.rows - 1) * self.stride + self.width

    @property
    def contiguous(self) -> bool:
        return self.rows == 1 or self.stride == self.width

    def shifted(self, by: int) -> Strided:
        return Strided(self.start + by, self.rows, self.stride, self.width)


def span(start: int, length: int) -> Strided:
    """The contiguous range of `length` bytes at `start`."""
    return Strided(start, 1, length, length)


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes that two sets A and B have in common: `rows` x `width`, at `a + i * a_stride` in A's packed form and
    `b + i * b_stride` in B's.
    """

    rows: int
    width: int
    a: int
    a_stride: int
    b: int
    b_stride: int


def intersect(a: Strided, b: Strided) -> list[Shared]:
    """What A and B share, in order of A, every common byte once. At most 4 parts for equal strides or where one side
    is contiguous; for unequal strides up to 3 per row of the side with fewer rows.
    """
    if a.start >= b.end or b.start >= a.end:
        return []
    if a.contiguous and a.rows > 1:
        a = span(a.start, a.nbytes)
    if b.contiguous and b.rows > 1:
        b = span(b.start, b.nbytes)
    if a.rows == 1:
        return range_in_rows(a, b)
    if b.rows == 1:
        return [_swapped(part) for part in range_in_rows(b, a)]
    if a.stride == b.stride:
        return _same_stride(a, b)
    if a.rows <= b.rows:
        return [
            Shared(part.rows, part.width, part.a + i * a.width, part.a_stride, part.b, part.b_stride)
            for i in range(a.rows)
            for part in range_in_rows(span(a.start + i * a.stride, a.width), b)
        ]
    return sorted(map(_swapped, intersect(b, a)), key=lambda part: part.a)


def _swapped(part: Shared) -> Shared:
    return Shared(part.rows, part.width, part.b, part.b_stride, part.a, part.a_stride)


def range_in_rows(a: Strided, b: Strided) -> list[Shared]:
    """`intersect` where A is one row, whose answer keeps to B's rows: the tail of one, whole ones, the head of one."""
    lo, hi = max(a.start, b.start), min(a.start + a.width, b.end)
    if lo >= hi:
        return []
    if b.rows == 1:
        return [Shared(1, hi - lo, lo - a.start, hi - lo, lo - b.start, hi - lo)]
    first, inside = divmod(lo - b.start, b.stride)
    last, until = divmod(hi - 1 - b.start, b.stride)
    until = min(until + 1, b.width)
    parts: list[Shared] = []
    if first == last or inside > 0:
        width = (until if first == last else b.width) - inside
        if width > 0:
            at = first * b.stride + inside
            parts.append(Shared(1, width, b.start + at - a.start, width, first * b.width + inside, width))
        if first == last:
            return parts
        first += 1
    whole = last - first + (until == b.width)
    if whole > 0:
        parts.append(Shared(whole, b.width, b.start + first * b.stride - a.start, b.stride, first * b.width, b.width))
    if until < b.width:
        parts.append(Shared(1, until, b.start + last * b.stride - a.start, until, last * b.width, until))
    return parts


def _same_stride(a: Strided, b: Strided) -> list[Shared]:
    """Row i of A can only meet rows i+k of B for the few k where their columns overlap."""
    stride = a.stride
    parts: list[Shared] = []
    lowest = (a.start - b.width - b.start) // stride + 1
    highest = -((b.start - a.start - a.width) // stride) - 1
    for k in range(lowest, highest + 1):
        lo = max(a.start, b.start + k * stride)
        hi = min(a.start + a.width, b.start + k * stride + b.width)
        first, last = max(0, -k), min(a.rows, b.rows - k)
        if lo < hi and first < last:
            parts.append(
                Shared(
                    last - first,
                    hi - lo,
                    first * a.width + lo - a.start,
                    a.width,
                    (first + k) * b.width + lo - b.start - k * stride,
                    b.width,
                )
            )
    return parts


def copy_rows(
    source: memoryview,
    source_at: int,
    source_stride: int,
    target: memoryview,
    target_at: int,
    target_stride: int,
    rows: int,
    width: int,
) -> None:
    """Copy `rows` rows of `width` bytes between two flat byte views. The ranges must lie inside the views."""
    if rows > 1 and source_stride == width == target_stride:
        rows, width = 1, rows * width
    if rows == 1:
        target[target_at : target_at + width] = source[source_at : source_at + width]
        return
    numpy = _NUMPY.get(rows)
    if numpy is not None:
        # ndarray checks that the rows lie inside the buffers
        rows_in = numpy.ndarray((rows, width), numpy.uint8, source, source_at, (source_stride, 1))
        rows_out = numpy.ndarray((rows, width), numpy.uint8, target, target_at, (target_stride, 1))
        rows_out[:] = rows_in
        return
    for row in range(rows):
        into, out_of = target_at + row * target_stride, source_at + row * source_stride
        target[into : into + width] = source[out_of : out_of + width]


class _Numpy:
    """numpy copies rows in half the time, but importing it costs as much as a loop over `worth` rows (0.16 CPU s
    against 1.4 us a row): it is imported when that many were copied without it. The base install has none.
    """

    worth = 100_000

    def __init__(self) -> None:
        self.looped = 0

    def get(self, rows: int) -> Any:  # Any: the module, or None
        self.looped += rows
        if "numpy" not in sys.modules and self.looped < self.worth:
            return None
        try:
            return importlib.import_module("numpy")
        except ImportError:
            return None


_NUMPY: Final = _Numpy()
