"""How a fragment gets to where keys and values belong in memory: read in place, or copied. Pure but for the copies."""

from __future__ import annotations

from kvctl.kv import codecs
from kvctl.kv.packs import Fragment, PackHeader
from kvctl.kv.views import TokenView


def landing(header: PackHeader, fragment: Fragment, target: TokenView) -> tuple[int, int] | None:
    """(offset, length) in `target.data` where the stored bytes can be read to as they are, verified there, and stay;
    None when they must go through `place_fragment`: a codec, several heads that are not neighbours in the target, heads
    or tokens that the target does not have (the zeros of a tail or of a window's start among them).
    """
    place, geometry = fragment.place, header.geometry
    if fragment.codec != codecs.NONE:
        return None
    row = geometry.row(place.part)
    rows = (place.end_block - place.block) * geometry.rows
    begin = header.blocks[place.block].start
    start = 0 if geometry.group.recurrent else begin - target.start
    first = place.head - target.first_head
    tokens = 1 if geometry.group.recurrent else target.tokens
    if (
        first < 0
        or start < 0
        or start + rows > tokens
        or (begin < header.first and not geometry.group.recurrent)
        or (place.end_head - place.head > 1 and rows != tokens)
    ):
        return None
    offset = (first * tokens + start) * row
    return (offset, fragment.stored) if offset + fragment.stored <= len(target.data) else None


def place_fragment(header: PackHeader, fragment: Fragment, raw: memoryview, target: TokenView) -> None:
    """Copy the raw bytes of a fragment to where they belong in `target`: only heads and tokens that the target has,
    never the zeros that fill a block.
    """
    place, geometry = fragment.place, header.geometry
    row = geometry.row(place.part)
    rows = (place.end_block - place.block) * geometry.rows
    if geometry.group.recurrent:
        target.data[:] = raw
        return
    begin = header.blocks[place.block].start
    low = max(begin, header.first, target.start)
    high = min(header.blocks[place.end_block - 1].end, target.start + target.tokens)
    heads = len(target.data) // (target.tokens * row) if target.tokens else 0
    length = (high - low) * row
    if length <= 0:
        return
    for head in range(max(place.head, target.first_head), min(place.end_head, target.first_head + heads)):
        source = ((head - place.head) * rows + low - begin) * row
        at = ((head - target.first_head) * target.tokens + low - target.start) * row
        target.data[at : at + length] = raw[source : source + length]
