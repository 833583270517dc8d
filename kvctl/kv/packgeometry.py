"""The geometry of a pack: what its fragments hold, how large its header is. Pure. See `kvctl.kv.packs`."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from kvctl.core.units import KIB
from kvctl.kv.identity import DTYPE_BYTES, Descriptor, Group
from kvctl.kv.tokens import ANCHOR_TOKENS, BLOCK_TOKENS

PAGE: Final = 4 * KIB
SMALL: Final = 64 * KIB  # fragments up to this are packed
ALIGN: Final = 64
RUN_BYTES: Final = 128 * KIB  # what a default fragment has at least, where the pack has so much ..
RUN_TOKENS: Final = 512  # .. in so many tokens: where a shorter prefix is fetched, the rest of a fragment is waste
PARTS: Final = ("k", "v")

FIXED: Final = struct.Struct("<8sIIQQ32s16s16s17I28s")
BLOCK: Final = struct.Struct("<32s32sQII16s")
FRAGMENT: Final = struct.Struct("<QIIBB6xQ")


@dataclass(frozen=True, slots=True)
class PackGeometry:
    """`index`: of the group in its descriptor. `blocks`: how many the pack holds. A fragment spans `head_step` heads
    (fewer at the end) and `run_blocks` blocks (fewer at the end).
    """

    index: int
    group: Group
    dtype: str
    blocks: int
    head_step: int
    run_blocks: int
    block_tokens: int = BLOCK_TOKENS

    @classmethod
    def default(cls, descriptor: Descriptor, index: int, blocks: int, *, run_blocks: int | None = None) -> PackGeometry:
        """One head a fragment (more where that is below 4 KiB), runs of at least 128 KiB, but of no more than 512
        tokens, unless `run_blocks` says.
        """
        group = descriptor.groups[index]
        whole = cls(index, group, descriptor.dtype, blocks, 1, blocks, descriptor.block_tokens)
        smallest = min(whole.row(part) for part in whole.parts) * whole.rows
        step = 1
        while step < group.kv_heads and step * smallest * blocks < PAGE:
            step = min(2 * step, group.kv_heads)
        run = run_blocks or max(1, min(-(-RUN_BYTES // (smallest * step)), RUN_TOKENS // descriptor.block_tokens))
        return replace(whole, head_step=step, run_blocks=min(run, blocks))

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS if self.group.v_dim else PARTS[:1]

    @property
    def rows(self) -> int:
        """Rows of one head in one block: tokens; 1 in a recurrent group."""
        return 1 if self.group.recurrent else self.block_tokens

    @property
    def element(self) -> int:
        """Bytes an element, which is what the byte shuffle takes apart; a recurrent state counts as F32."""
        return 4 if self.group.recurrent else DTYPE_BYTES[self.dtype]

    def row(self, part: str) -> int:
        """Bytes of one token of one head."""
        dim = self.group.k_dim if part == "k" else self.group.v_dim
        return dim if self.group.recurrent else dim * DTYPE_BYTES[self.dtype]

    @property
    def head_ranges(self) -> int:
        return -(-self.group.kv_heads // self.head_step)

    @property
    def runs(self) -> int:
        return -(-self.blocks // self.run_blocks)

    @property
    def fragments(self) -> int:
        return len(self.group.layers) * len(self.parts) * self.head_ranges * self.runs

    @property
    def header_size(self) -> int:
        tables = 4 * len(self.group.layers) + BLOCK.size * self.blocks + FRAGMENT.size * self.fragments
        return -(-(FIXED.size + tables + 16) // PAGE) * PAGE

    @property
    def payload_bytes(self) -> int:
        """Raw, without alignment."""
        rows = self.group.kv_heads * self.blocks * self.rows * len(self.group.layers)
        return rows * sum(self.row(part) for part in self.parts)

    @property
    def bound(self) -> int:
        """The largest size of such a pack, whatever the codec; with codec none its exact size."""
        at = self.header_size
        for place in self.places():
            at = aligned(at, place.raw) + place.raw
        return at

    def places(self) -> tuple[Place, ...]:
        """What each fragment holds, in the order of the payload. Remembered: a session's packs are alike."""
        return _places(self.group, self.parts, self.head_step, self.blocks, self.run_blocks, self._block_sizes)

    @property
    def _block_sizes(self) -> tuple[int, ...]:
        """Bytes of one block of one head, by part."""
        return tuple(self.row(part) * self.rows for part in self.parts)

    def fault(self) -> str:
        """Why no pack can have this geometry; empty when one can."""
        problem = self.group.fault()
        if problem:
            return problem
        if self.dtype not in DTYPE_BYTES:
            return f"dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}"
        if not 1 <= self.head_step <= self.group.kv_heads or not 1 <= self.run_blocks <= self.blocks:
            return f"fragments of {self.head_step} heads and {self.run_blocks} blocks"
        if not 1 <= self.block_tokens <= ANCHOR_TOKENS or ANCHOR_TOKENS % self.block_tokens:
            return f"blocks of {self.block_tokens} tokens"
        if self.group.recurrent and self.blocks != 1:
            return f"{self.blocks} recurrent states"
        rows = self.head_step * self.run_blocks * self.rows
        if any(rows * self.row(part) >= 1 << 32 for part in self.parts):
            return "fragments of 4 GiB and more"
        return ""


class Place(NamedTuple):
    """What a fragment holds: a model layer, "k" or "v", heads [head, end_head), blocks [block, end_block) of the pack.
    `raw`: bytes before the codec.
    """

    layer: int
    part: str
    head: int
    end_head: int
    block: int
    end_block: int
    raw: int


@lru_cache(maxsize=32)
def _places(
    group: Group, parts: tuple[str, ...], head_step: int, blocks: int, run_blocks: int, sizes: tuple[int, ...]
) -> tuple[Place, ...]:
    return tuple(
        Place(layer, part, head, end_head, block, end, (end_head - head) * (end - block) * size)
        for layer in group.layers
        for part, size in zip(parts, sizes, strict=True)
        for head in range(0, group.kv_heads, head_step)
        for end_head in (min(head + head_step, group.kv_heads),)
        for block in range(0, blocks, run_blocks)
        for end in (min(block + run_blocks, blocks),)
    )


def aligned(at: int, size: int) -> int:
    """Where a fragment of `size` stored bytes begins, when the one before ends at `at`."""
    to = PAGE if size > SMALL else ALIGN
    return -(-at // to) * to
