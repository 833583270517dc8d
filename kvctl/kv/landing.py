"""How the raw bytes of a fragment get to where keys and values belong in memory, when they do not land there by
themselves (`kvctl.kv.pieces`). Pure but for the copies.
"""

from __future__ import annotations

from kvctl.kv.packs import Fragment, PackHeader
from kvctl.kv.views import TokenView


def place_fragment(
    header: PackHeader, fragment: Fragment, raw: memoryview, target: TokenView, *, end: int | None = None
) -> None:
    """Copy the raw bytes of a fragment to where they belong in `target`: only heads and tokens that the target has,
    none from token `end` on, never the zeros that fill a block.
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
    if end is not None:
        high = min(high, end)
    heads = len(target.data) // (target.tokens * row) if target.tokens else 0
    length = (high - low) * row
    if length <= 0:
        return
    for head in range(max(place.head, target.first_head), min(place.end_head, target.first_head + heads)):
        source = ((head - place.head) * rows + low - begin) * row
        at = ((head - target.first_head) * target.tokens + low - target.start) * row
        target.data[at : at + length] = raw[source : source + length]
