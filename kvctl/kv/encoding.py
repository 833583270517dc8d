"""From a source's layers to the bytes of one pack."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.kv.cutting import Cut
from kvctl.kv.identity import Descriptor
from kvctl.kv.packgeometry import PackGeometry
from kvctl.kv.packs import encode_parts
from kvctl.kv.seams import KvSource
from kvctl.kv.tokens import BlockKey
from kvctl.kv.views import TokenView


def encode_cut(
    descriptor: Descriptor, cut: Cut, blocks: Sequence[BlockKey], source: KvSource, codec: str
) -> tuple[list[memoryview], int]:
    """(the pack's bytes in turn, the size of its header). See `encode_parts`, also for what it raises."""
    geometry = PackGeometry.default(descriptor, cut.group, len(blocks))
    total = len(source.tokens)
    recurrent = geometry.group.recurrent

    def view(layer: int, part: str) -> TokenView:
        kv = source.layer(cut.group, layer)
        data = kv.k if part == "k" else kv.v
        return TokenView(data, 0, 1) if recurrent else TokenView(data, kv.start, total - kv.start)

    first = None if recurrent else cut.first
    return encode_parts(geometry, descriptor.digest, blocks, view, codec, first=first), geometry.header_size
