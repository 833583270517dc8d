"""A pack made anew from a stored one: fewer blocks (repacking), or other keys (a copy to another domain). The KV itself
is the same, bit for bit; a lossy codec is not applied a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvctl.kv.codecs import FP8, NONE, ZSTD
from kvctl.kv.landing import place_fragment
from kvctl.kv.packgeometry import PackGeometry
from kvctl.kv.packs import PackHeader, decode_fragment, encode_pack, parse_pack_header, verify_fragment
from kvctl.kv.tokens import BlockKey
from kvctl.kv.views import TokenView


def rewrite_pack(data: memoryview, ns: str, blocks: Sequence[BlockKey] | None, count: int, where: str) -> memoryview:
    """The first `count` blocks of the pack `data` as a pack of their own, in the namespace `ns`; `blocks`: their new
    keys, None: as they are. Raises IntegrityError, FormatError, IncompatibleError.
    """
    header = parse_pack_header(data, where)
    geometry = header.geometry
    used = {fragment.codec for fragment in header.fragments}
    keys = list(blocks or header.blocks[:count])
    smaller = replace(geometry, blocks=count, run_blocks=min(geometry.run_blocks, count))
    memory = _decoded(header, data, count)

    def view(layer: int, part: str) -> TokenView:
        return memory[layer, part]

    first = None if geometry.group.recurrent else header.first
    # what a lossy codec made can be stored raw or losslessly without further loss
    codec = ZSTD if ZSTD in used else NONE
    return encode_pack(smaller, ns, keys, view, codec, first=first)


def is_lossy(header: PackHeader) -> bool:
    return any(fragment.codec == FP8 for fragment in header.fragments)


def _decoded(header: PackHeader, data: memoryview, count: int) -> dict[tuple[int, str], TokenView]:
    """(layer, part) -> the raw KV of the first `count` blocks, every fragment verified."""
    geometry: PackGeometry = header.geometry
    start = 0 if geometry.group.recurrent else header.first
    tokens = 1 if geometry.group.recurrent else header.blocks[count - 1].end - start
    memory = {
        (layer, part): TokenView(
            memoryview(bytearray(geometry.group.kv_heads * tokens * geometry.row(part))), start, tokens
        )
        for layer in geometry.group.layers
        for part in geometry.parts
    }
    for fragment in header.fragments:
        place = fragment.place
        if place.block >= count:
            continue
        stored = data[fragment.offset : fragment.end]
        verify_fragment(header, fragment, stored)
        raw = stored
        if fragment.codec != NONE:
            raw = memoryview(bytearray(place.raw))
            decode_fragment(header, fragment, stored, raw)
        place_fragment(header, fragment, raw, memory[place.layer, place.part])
    return memory
