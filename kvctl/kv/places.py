"""Where a chain has index nodes: a function of the place alone, so that all who write and read agree. Pure.

Anchors are the nodes at multiples of spacing(place): 1,024 tokens up to 32,768, from there on a sixteenth of the power
of two below. So a session has 32 of them, and 16 more for each doubling: 90 at 438,764 tokens, 144 at 4,194,304.
Behind its last anchor it has nodes at ever smaller steps, the coarse ones first: an eighth of the spacing, an eighth
of that, .. while it is more than 8 blocks, then 8, 4, 2 and 1 blocks, of each as many as fit, and one at the end of a
partial block. So where a session ended is found to the block: at most 11 such nodes up to 32,768 tokens, 19 at 438,764.

Where other tokens leave a stored session inside, what leads there is the last anchor before: under 1,024 tokens are
lost below 32,768, beyond it under a sixteenth of the place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvctl.kv.tokens import ANCHOR_TOKENS

PER_DOUBLING: Final = 16  # anchors between a power of two and the next, from 16 * ANCHOR_TOKENS on
COARSE: Final = 8  # a step behind the last anchor is so many of the next smaller; the last ones are blocks


def spacing(place: int) -> int:
    """Tokens from the last anchor at or before `place` to the next one."""
    return max(ANCHOR_TOKENS, (1 << place.bit_length() >> 1) // PER_DOUBLING)


def anchor_before(tokens: int) -> int:
    """The last anchor's place before `tokens` (at least 1); 0 where there is none."""
    last = tokens - 1
    return last - last % spacing(last)


def anchors(tokens: int) -> list[int]:
    """Places of the anchors of a chain of so many tokens, ascending."""
    found: list[int] = []
    at = spacing(0)
    while at <= tokens:
        found.append(at)
        at += spacing(at)
    return found


def steps(anchor: int, block_tokens: int) -> Iterator[int]:
    """Tokens between the nodes behind an anchor (or the start, 0), the coarse ones first; all are whole blocks."""
    step = spacing(anchor) // COARSE
    while step > COARSE * block_tokens:
        yield step
        step //= COARSE
    for blocks in (COARSE, 4, 2, 1):
        yield blocks * block_tokens


def points(tokens: int, block_tokens: int) -> list[int]:
    """Where a chain of so many tokens has nodes, ascending."""
    found = anchors(tokens)
    at = anchor = found[-1] if found else 0
    for step in steps(anchor, block_tokens):
        while at + step <= tokens:
            at += step
            found.append(at)
    if at < tokens:
        found.append(tokens)
    return found
