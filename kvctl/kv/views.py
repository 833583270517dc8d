"""Keys and values of a layer as bytes in memory, and how a fragment's bytes come from there and get there. Pure but
for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvctl.core.errors import UsageError
from kvctl.kv.packgeometry import PackGeometry, Place
from kvctl.kv.tokens import BlockKey


@dataclass(frozen=True, slots=True)
class TokenView:
    """Keys or values of one layer as flat bytes, [heads][tokens][dim] in C order: tokens `start` to `start + tokens`,
    heads from `first_head` on. Of a recurrent group: the state's bytes, as one token of one head; `start` is ignored.
    """

    data: memoryview
    start: int
    tokens: int
    first_head: int = 0


Source = Callable[[int, str], TokenView]
"""(model layer, "k" or "v") -> its bytes; must cover the tokens of the blocks that are packed."""


def check_view(geometry: PackGeometry, view: TokenView, first: int, end: int, layer: int, part: str) -> None:
    """Raises UsageError unless the view has the size it says, all heads, and tokens [first, end)."""
    group = geometry.group
    tokens = 1 if group.recurrent else view.tokens
    if view.data.itemsize != 1 or view.data.ndim != 1 or len(view.data) != group.kv_heads * tokens * geometry.row(part):
        raise UsageError(
            f"layer {layer} {part} has {view.data.nbytes} bytes",
            cause=f"expected {group.kv_heads} heads x {tokens} tokens x {geometry.row(part)} bytes, flat",
        )
    if not group.recurrent and not (view.start <= first and end <= view.start + tokens):
        raise UsageError(
            f"layer {layer} {part} does not hold the tokens to pack",
            cause=f"it has [{view.start}, {view.start + tokens}), wanted [{first}, {end})",
        )


def lying_together(
    geometry: PackGeometry, place: Place, blocks: Sequence[BlockKey], first: int, view: TokenView
) -> memoryview | None:
    """The fragment's bytes as a piece of the view; None where they are not one, or zeros fill a block."""
    if geometry.group.recurrent:
        return view.data
    begin, rows = blocks[place.block].start, (place.end_block - place.block) * geometry.rows
    if place.end_head - place.head > 1 or begin < first or begin + rows > blocks[place.end_block - 1].end:
        return None
    row = geometry.row(place.part)
    at = ((place.head - view.first_head) * view.tokens + begin - view.start) * row
    return view.data[at : at + rows * row]


def gather(
    geometry: PackGeometry, place: Place, blocks: Sequence[BlockKey], first: int, view: TokenView, raw: memoryview
) -> None:
    """Fill `raw` with the fragment's bytes; what is before `first` and after the last token becomes zeros."""
    if geometry.group.recurrent:
        raw[:] = view.data
        return
    row = geometry.row(place.part)
    size = (place.end_block - place.block) * geometry.rows * row
    begin = blocks[place.block].start
    low = max(begin, first)
    before, held = (low - begin) * row, (blocks[place.end_block - 1].end - low) * row
    for number in range(place.end_head - place.head):
        source = ((place.head + number - view.first_head) * view.tokens + low - view.start) * row
        target = number * size
        if before:
            raw[target : target + before] = bytes(before)
        raw[target + before : target + before + held] = view.data[source : source + held]
        if before + held < size:
            raw[target + before + held : target + size] = bytes(size - before - held)
