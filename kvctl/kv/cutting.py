"""What a push links to and what it must write: pure. Packs never cross a multiple of 1,024 tokens, and anchors
lie at some of these, so that sharing up to an anchor shares whole packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvctl.core.units import MIB
from kvctl.kv.geometry import block_bytes, token_bytes_of
from kvctl.kv.identity import Descriptor
from kvctl.kv.index import PackUse
from kvctl.kv.tokens import ANCHOR_TOKENS

LARGEST: Final = 64 * MIB
USUAL: Final = 16 * MIB  # of small sessions; below it an object costs more than its bytes
FEWEST: Final = 4  # packs of a session, so that several are encoded and written at once


@dataclass(frozen=True, slots=True)
class Cut:
    """A pack to write: tokens [first, end) of a group. `begin`: where its first block begins; below `first` where a
    sliding group's KV sets in inside a block.
    """

    group: int
    begin: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Of one group: the stored packs to link to, and those to write, in order."""

    shared: tuple[PackUse, ...]
    cuts: tuple[Cut, ...]


def pack_target(descriptor: Descriptor, tokens: int, wanted: int | None) -> int:
    """Payload bytes that a pack should have."""
    if wanted is not None:
        return wanted
    total = tokens * sum(token_bytes_of(group, descriptor.dtype) for group in descriptor.groups)
    return min(LARGEST, max(USUAL, -(-total // FEWEST)))


def plan_group(
    descriptor: Descriptor,
    group: int,
    start: int,
    tokens: int,
    stored: int,
    uses: Sequence[PackUse],
    target: int,
) -> GroupPlan:
    """`start`: first token that the source holds. `stored`: tokens of the stored prefix, which `uses` belong to."""
    size = descriptor.block_tokens
    mine = sorted(use for use in uses if use.group == group)
    if descriptor.groups[group].recurrent:
        exact = [use for use in mine if use.end == tokens]
        return GroupPlan(tuple(exact[:1]), () if exact else (Cut(group, 0, 0, tokens),))
    shared: list[PackUse] = []
    at = start
    for use in mine:
        follows = use.first == at if shared else use.first <= at < use.end
        if follows and use.end <= stored:
            shared.append(use)
            at = use.end
    if at < tokens and at % size and shared:
        # what goes on must begin at a block: the shared part block is written again as part of a whole one
        last = shared.pop()
        at = at // size * size
        if at > last.first:
            begin = last.first // size * size
            shared.append(replace(last, count=at - last.first, blocks=(at - begin) // size))
        elif not shared:
            at = start
    return GroupPlan(tuple(shared), tuple(cut(descriptor, group, at, tokens, target)))


def cut(descriptor: Descriptor, group: int, first: int, end: int, target: int) -> list[Cut]:
    """[first, end) in packs of about `target` bytes, none across a multiple of 1,024, of equal lengths between."""
    size = descriptor.block_tokens
    most = max(1, target // max(1, block_bytes(descriptor.groups[group], descriptor.dtype, size)))
    found: list[Cut] = []
    at = first
    while at < end:
        begin = at // size * size
        stop = min(end, (at // ANCHOR_TOKENS + 1) * ANCHOR_TOKENS)
        blocks = -(-(stop - begin) // size)
        packs = -(-blocks // most)
        each = -(-blocks // packs)
        while at < stop:
            begin = at // size * size
            last = min(stop, begin + each * size)
            found.append(Cut(group, begin, at, last))
            at = last
    return found
