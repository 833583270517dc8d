"""The fragment table of a pack: where every fragment lies, how it is stored, its checksum. Pure.

A session has tens of thousands of fragments per GiB, so a table keeps columns, not an object for each. Packs of one
geometry whose fragments are all stored raw (`plain`) differ in their checksums only: they share all other columns, and
whoever reads them can plan once for all of them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, overload

from kvctl.core.errors import FormatError, IncompatibleError
from kvctl.kv import codecs
from kvctl.kv.packgeometry import FRAGMENT, PackGeometry, Place, aligned

_WORDS: Final = FRAGMENT.size // 8


class Fragment(NamedTuple):
    """Where a fragment lies in the pack and how. `offset` from the start of the pack, `stored` in bytes."""

    place: Place
    offset: int
    stored: int
    codec: str
    width: int
    checksum: int

    @property
    def end(self) -> int:
        return self.offset + self.stored


class FragmentTable(Sequence[Fragment]):
    """Fragments in order of the payload, made as they are asked for. `checksums`: XXH3-64 of each. `plain`: all are
    stored raw, where the geometry alone says.
    """

    __slots__ = ("_codecs", "_offsets", "_places", "_stored", "_width", "checksums", "plain")

    def __init__(
        self,
        places: Sequence[Place],
        offsets: Sequence[int],
        stored: Sequence[int],
        codecs_of: Sequence[str] | None,
        width: int,
        checksums: Sequence[int],
    ) -> None:
        """`codecs_of` None: all raw."""
        self._places = places
        self._offsets = offsets
        self._stored = stored
        self._codecs = codecs_of
        self._width = width
        self.checksums = checksums
        self.plain = codecs_of is None

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> Fragment: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Fragment, ...]: ...
    def __getitem__(self, at: int | slice) -> Fragment | tuple[Fragment, ...]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(*at.indices(len(self))))
        codec = codecs.NONE if self._codecs is None else self._codecs[at]
        return Fragment(
            self._places[at], self._offsets[at], self._stored[at], codec, self._width, self.checksums[at]
        )  # fmt: skip

    def __iter__(self) -> Iterator[Fragment]:
        return (self[number] for number in range(len(self)))


@lru_cache(maxsize=32)
def _plain_columns(
    places: tuple[Place, ...], header: int, width: int
) -> tuple[list[int], list[int], tuple[memoryview, ...], int]:
    """Of raw fragments behind a header of `header` bytes: their offsets, sizes, the first three words of each entry
    of the table as they must be then, and the size of the pack.
    """
    offsets: list[int] = []
    at = header
    for place in places:
        offsets.append(aligned(at, place.raw))
        at = offsets[-1] + place.raw
    sizes = [place.raw for place in places]
    kind = codecs.CODECS.index(codecs.NONE) | width << 8
    columns = (offsets, [size | size << 32 for size in sizes], [kind] * len(places))
    return offsets, sizes, tuple(memoryview(array("Q", column)) for column in columns), at


def plain_table(geometry: PackGeometry) -> FragmentTable:
    """The fragments of any pack of this geometry that stores all of them raw; their checksums are not known here."""
    places = geometry.places()
    offsets, sizes, _, _ = _plain_columns(places, geometry.header_size, geometry.element)
    return FragmentTable(places, offsets, sizes, None, geometry.element, [0] * len(places))


def parse_fragments(geometry: PackGeometry, table: memoryview, pack_size: int, where: str) -> FragmentTable:
    """The table of a header with this geometry. Raises FormatError, IncompatibleError."""
    places = geometry.places()
    offsets, sizes, columns, end = _plain_columns(places, geometry.header_size, geometry.element)
    if pack_size == end and sys.byteorder == "little":
        words = memoryview(bytes(table)).cast("Q")
        if all(words[number::_WORDS] == column for number, column in enumerate(columns)):
            return FragmentTable(places, offsets, sizes, None, geometry.element, words[_WORDS - 1 :: _WORDS])
    return _coded(geometry, table, pack_size, where)


def _coded(geometry: PackGeometry, table: memoryview, pack_size: int, where: str) -> FragmentTable:
    places = geometry.places()
    width_of, known = geometry.element, codecs.CODECS
    at = geometry.header_size
    offsets: list[int] = []
    sizes: list[int] = []
    codecs_of: list[str] = []
    checksums: list[int] = []
    for place, (offset, stored, raw, codec, width, checksum) in zip(places, FRAGMENT.iter_unpack(table), strict=True):
        if offset != aligned(at, stored) or raw != place.raw or width != width_of or not 0 < stored <= raw:
            raise FormatError(
                f"{where} is malformed",
                cause=f"fragment {len(sizes)}: {stored} bytes at {offset} for {raw}, expected {place.raw} from {at} on",
                hint="see `kvctl repo check`",
            )
        if codec >= len(known):
            raise IncompatibleError(f"{where} has fragments of codec {codec}", hint="use a newer kvctl to read it")
        offsets.append(offset)
        sizes.append(stored)
        codecs_of.append(known[codec])
        checksums.append(checksum)
        at = offset + stored
    if at != pack_size:
        raise FormatError(f"{where} is malformed", cause=f"its fragments end at {at}, it says {pack_size} bytes")
    return FragmentTable(places, offsets, sizes, codecs_of, width_of, checksums)
