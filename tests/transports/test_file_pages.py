"""How a write's parts become pieces that O_DIRECT takes."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvctl.memory.buffers import PAGE, HostBuffer, address_of_readonly
from kvctl.transports.views import advance
from kvctl_file.pages import copied, in_place

PAGES = 64
DATA = random.Random(3).randbytes(PAGES * PAGE)
ROOM = 4 * PAGE
# (gap before the part in memory, its bytes)
PARTS = st.lists(
    st.tuples(
        st.sampled_from((0, 0, 0, 64, 512, PAGE - 64, PAGE)),
        st.sampled_from((1, 64, PAGE - 64, PAGE, 2 * PAGE, 5 * PAGE, 5 * PAGE + 64)),
    ),
    min_size=1,
    max_size=9,
)


def lay_out(parts: list[tuple[int, int]]) -> tuple[HostBuffer, list[memoryview]]:
    """The beginning of DATA, cut into these parts, in page-aligned memory with the gaps between them."""
    buffer = HostBuffer(sum(gap + size for gap, size in parts))
    views: list[memoryview] = []
    at = done = 0
    for gap, size in parts:
        at += gap
        views.append(buffer.view[at : at + size])
        views[-1][:] = DATA[done : done + size]
        at, done = at + size, done + size
    return buffer, views


def written(views: list[memoryview], most: int) -> tuple[bytes, int]:
    """The whole pages of the views as the transport writes them, and how many bytes of them were copied first."""
    left = list(views)
    end = sum(map(len, left)) // PAGE * PAGE
    room = HostBuffer(ROOM)
    file = b""
    copies = 0
    while len(file) < end:
        pieces = in_place(left, min(most, end - len(file)))
        if not pieces:
            target = room.view[: min(ROOM, most, end - len(file))]
            count = copied(left, target)
            copies += count
            pieces = [target[:count]]
        size = sum(map(len, pieces))
        assert 0 < size <= most
        assert all(len(piece) % PAGE == 0 == address_of_readonly(piece) % PAGE for piece in pieces)
        file += b"".join(pieces)
        advance(left, size)
    return file, copies


@given(PARTS, st.sampled_from((PAGE, 3 * PAGE, 64 * PAGE)))
def test_every_piece_is_whole_pages_and_all_of_them_are_the_bytes(parts: list[tuple[int, int]], most: int) -> None:
    _, views = lay_out(parts)
    file, copies = written(views, most)
    assert file == DATA[: len(file)]
    assert copies <= len(file)


def test_pages_are_written_where_they_lie() -> None:
    _, views = lay_out([(0, 5 * PAGE), (PAGE, PAGE), (PAGE, 2 * PAGE)])
    assert [len(piece) for piece in in_place(views, 64 * PAGE)] == [5 * PAGE, PAGE, 2 * PAGE]
    assert written(views, 64 * PAGE) == (DATA[: 8 * PAGE], 0)


def test_a_part_that_is_not_where_its_bytes_belong_is_copied_and_the_next_ones_are_not() -> None:
    _, views = lay_out([(64, PAGE), (PAGE - 64, 2 * PAGE)])
    assert written(views, 64 * PAGE) == (DATA[: 3 * PAGE], PAGE)


def test_what_lies_as_in_the_file_is_copied_to_the_next_page_only() -> None:
    _, views = lay_out([(0, 100), (PAGE, 3 * PAGE - 100)])  # the second begins 100 bytes into a page, as in the file
    assert written(views, 64 * PAGE) == (DATA[: 3 * PAGE], PAGE)


def test_the_address_of_memory_that_cannot_be_written_is_known() -> None:
    whole = memoryview(DATA)
    assert address_of_readonly(whole[5:]) == address_of_readonly(whole) + 5
