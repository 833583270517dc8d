"""Lists of views that bytes go to or come from in turn: what of them is next, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST: Final = 1024  # views that the kernel takes at once: IOV_MAX on Linux


def advance(left: list[memoryview], count: int) -> None:
    """Take `count` bytes that were moved off the front of `left`, none of which is empty."""
    if len(left) == 1:
        left[0] = left[0][count:]
        if not left[0]:
            left.clear()
        return
    whole = 0
    while whole < len(left) and count >= len(left[whole]):
        count -= len(left[whole])
        whole += 1
    del left[:whole]
    if count:
        left[0] = left[0][count:]


def first_of(views: Sequence[memoryview], most: int) -> tuple[list[memoryview], int]:
    """The beginning of the views, no more than `most` bytes and than the kernel takes at once, and how many bytes."""
    found: list[memoryview] = []
    left = most
    for view in views[:MOST]:
        if not left:
            break
        found.append(view[:left])
        left -= len(found[-1])
    return found, most - left
