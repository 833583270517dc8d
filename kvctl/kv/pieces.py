"""What to read of a pack for one layout, and where each fragment's bytes go: straight into the receiver's memory, or
through staging. Pure.

Places are relative, tokens to the pack's first block and bytes to where that block lies in a head of the receiver, so
that one plan serves all packs of a session that are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from kvctl.core.units import MIB
from kvctl.kv import codecs
from kvctl.kv.fragments import Fragment, plain_table
from kvctl.kv.packs import PackGeometry, PackHeader, ranges_of

SHORTEST: Final = 4 * MIB
LONGEST: Final = 16 * MIB
AT_LEAST: Final = 16  # ranges that a pull is cut into, so that several are always under way
STAGED: Final = -1


@dataclass(frozen=True, slots=True)
class Want:
    """What a layout takes of a pack: `layers` of the model, heads [first_head, first_head + heads), tokens [low, high)
    counted from the first block on; each head of the receiver has room for `tokens`. `by_layer`: no range may span
    layers. No range is longer than `longest` bytes, unless one fragment is.
    """

    layers: tuple[int, ...]
    first_head: int
    heads: int
    low: int
    high: int
    tokens: int
    by_layer: bool = False
    longest: int = LONGEST


class Step(NamedTuple):
    """`nbytes` of a range, in turn. `view`: the receiver's view that they go to, numbered K and V of the first layer
    wanted, then of the second; `at`: where in it, for a pack that begins where the layout does. `view` STAGED: a
    fragment that must be decoded or cut, or (`fragment` -1) padding.
    """

    fragment: int
    view: int
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One ranged read of a pack: whole fragments that follow each other. `needed`: bytes, as stored, of it that the
    layout asks for. `layers`: those it belongs to. `straight`: the numbers of its fragments, where all of them go to
    the receiver's memory as they are and nothing is between them; then `slices` has the place of each in its view.
    """

    offset: int
    length: int
    needed: int
    layers: tuple[int, ...]
    steps: tuple[Step, ...]
    straight: slice | None = None
    views: tuple[int, ...] = ()
    slices: tuple[slice, ...] = ()


def plan(header: PackHeader, want: Want) -> Sequence[Piece]:
    """The reads, by offset."""
    if header.fragments.plain:
        return _plain_plan(header.geometry, want)
    return _plan(header.geometry, header.fragments, want)


@lru_cache(maxsize=64)
def _plain_plan(geometry: PackGeometry, want: Want) -> Sequence[Piece]:
    """Remembered: the packs of a session are alike, and so are the sessions of a model."""
    return _plan(geometry, plain_table(geometry), want)


def _plan(geometry: PackGeometry, fragments: Sequence[Fragment], want: Want) -> Sequence[Piece]:
    size = 1 if geometry.group.recurrent else geometry.block_tokens
    block, end = want.low // size, -(-want.high // size)
    views = {layer: 2 * number for number, layer in enumerate(want.layers)}
    heads = (want.first_head, want.first_head + want.heads)
    return [
        _piece(geometry, want, first, run, views)
        for span in ranges_of(geometry, fragments, want.layers, heads, block, end - block)
        for first, run in _split(span.first, span.fragments, want)
    ]


def longest_of(nbytes: int) -> int:
    """How long the ranges of a pull of so many bytes should be."""
    return min(LONGEST, max(SHORTEST, nbytes // AT_LEAST))


def _split(first: int, fragments: Sequence[Fragment], want: Want) -> Iterator[tuple[int, Sequence[Fragment]]]:
    begin = 0
    for number, fragment in enumerate(fragments):
        start = fragments[begin]
        if number > begin and (
            fragment.end - start.offset > want.longest or (want.by_layer and fragment.place.layer != start.place.layer)
        ):
            yield first + begin, fragments[begin:number]
            begin = number
    yield first + begin, fragments[begin:]


def _piece(geometry: PackGeometry, want: Want, first: int, run: Sequence[Fragment], views: Mapping[int, int]) -> Piece:
    steps: list[Step] = []
    needed = 0
    at = run[0].offset
    for number, fragment in enumerate(run, first):
        if fragment.offset > at:
            steps.append(Step(-1, STAGED, 0, fragment.offset - at))
        at = fragment.end
        place, stored = fragment.place, fragment.stored
        if geometry.group.recurrent:
            needed += stored
            view = views[place.layer] if fragment.codec == codecs.NONE else STAGED
            steps.append(Step(number, view, 0, stored))
            continue
        begin, rows = place.block * geometry.block_tokens, (place.end_block - place.block) * geometry.block_tokens
        low, high = max(begin, want.low), min(begin + rows, want.high)
        held = place.end_head - place.head
        wanted = min(place.end_head, want.first_head + want.heads) - max(place.head, want.first_head)
        whole = high - low == rows and wanted == held
        needed += stored if whole else stored * max(0, high - low) * wanted // (rows * held)
        # the rows of a head lie together at either end, heads only where a fragment has all tokens of the layout
        if whole and fragment.codec == codecs.NONE and (held == 1 or rows == want.tokens):
            to = ((place.head - want.first_head) * want.tokens + begin) * geometry.row(place.part)
            steps.append(Step(number, views[place.layer] + (place.part == "v"), to, stored))
        else:
            steps.append(Step(number, STAGED, 0, stored))
    layers = tuple(dict.fromkeys(fragment.place.layer for fragment in run))
    length = run[-1].end - run[0].offset
    if any(step.view == STAGED for step in steps):
        return Piece(run[0].offset, length, needed, layers, tuple(steps))
    return Piece(
        run[0].offset, length, needed, layers, tuple(steps), slice(first, first + len(run)),
        tuple(step.view for step in steps), tuple(slice(step.at, step.at + step.nbytes) for step in steps),
    )  # fmt: skip
