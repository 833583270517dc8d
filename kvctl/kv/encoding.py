"""From a source's layers to the bytes of one pack."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.kv.cutting import Cut
from kvctl.kv.identity import Descriptor
from kvctl.kv.packgeometry import PackGeometry
from kvctl.kv.packs import encode_pack
from kvctl.kv.seams import KvSource
from kvctl.kv.tokens import BlockKey
from kvctl.kv.views import TokenView


def encode_cut(
    descriptor: Descriptor, cut: Cut, blocks: Sequence[BlockKey], source: KvSource, codec: str
) -> tuple[memoryview, int]:
    """(the pack's bytes, the size of its header). See `encode_pack` for what it raises."""
    geometry = PackGeometry.default(descriptor, cut.group, len(blocks))
    total = len(source.tokens)

    def view(layer: int, part: str) -> TokenView:
        kv = source.layer(cut.group, layer)
        data = kv.k if part == "k" else kv.v
        if geometry.group.recurrent:
            return TokenView(data, 0, 1)
        if kv.start <= cut.begin:
            return TokenView(data, kv.start, total - kv.start)
        return _padded(geometry, data, part, kv.start, total, cut)

    data = encode_pack(geometry, descriptor.digest, blocks, view, codec)
    return data, geometry.header_size


def _padded(geometry: PackGeometry, data: memoryview, part: str, start: int, total: int, cut: Cut) -> TokenView:
    """The cut's tokens with zeros for those before `start`, which a sliding group does not hold any more."""
    row = geometry.row(part)
    held, wanted = total - start, cut.end - cut.begin
    skip = start - cut.begin
    out = memoryview(bytearray(geometry.group.kv_heads * wanted * row))
    for head in range(geometry.group.kv_heads):
        source, target = head * held * row, (head * wanted + skip) * row
        out[target : target + (wanted - skip) * row] = data[source : source + (wanted - skip) * row]
    return TokenView(out, cut.begin, wanted)
