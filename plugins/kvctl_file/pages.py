"""What of a write's views O_DIRECT takes where it lies, and what has to be copied first. The place in the file is
always at a page. Pure but for the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.memory.buffers import PAGE, address_of_readonly
from kvctl.transports.views import MOST


def in_place(views: Sequence[memoryview], most: int) -> list[memoryview]:
    """The beginning of the views, as far as it is whole pages of memory, and at most `most` bytes. None is empty."""
    found: list[memoryview] = []
    left = most
    for view in views[:MOST]:
        size = min(left, len(view)) // PAGE * PAGE
        if not size or address_of_readonly(view) % PAGE:
            break
        found.append(view[:size])
        left -= size
        if size < len(view):
            break
    return found


def copied(views: Sequence[memoryview], room: memoryview) -> int:
    """Copy the beginning of the views into `room`, which is whole pages and no more than the views are: until it is
    full, or what follows can be written where it lies. Returns how many bytes: whole pages.
    """
    done = 0
    for view in views:
        size = min(len(view), len(room) - done)
        gap = -done % PAGE  # then the file is at a page again, and so may be the memory
        if done and len(view) >= gap + PAGE and (address_of_readonly(view) + gap) % PAGE == 0:
            size = min(size, gap)
        room[done : done + size] = view[:size]
        done += size
        if done == len(room) or size < len(view):
            break
    return done
