"""Byte geometry against brute force."""

from __future__ import annotations

import importlib
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvctl.weights import strided
from kvctl.weights.strided import Shared, Strided, copy_rows, intersect, range_in_rows, span

STRIDED = st.builds(
    lambda start, rows, width, gap: Strided(start, rows, width + gap, width),
    st.integers(0, 30),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 6),
)


def packed(item: Strided) -> dict[int, int]:
    """Byte -> place in the packed form."""
    return {
        item.start + row * item.stride + column: row * item.width + column
        for row in range(item.rows)
        for column in range(item.width)
    }


def pairs(parts: list[Shared]) -> list[tuple[int, int]]:
    return [
        (part.a + row * part.a_stride + column, part.b + row * part.b_stride + column)
        for part in parts
        for row in range(part.rows)
        for column in range(part.width)
    ]


@settings(max_examples=600)
@given(STRIDED, STRIDED)
@example(Strided(0, 3, 4, 4), Strided(2, 2, 5, 3))
@example(Strided(3, 4, 8, 6), Strided(0, 5, 8, 5))
def test_intersection_gives_every_common_byte_once(a: Strided, b: Strided) -> None:
    in_a, in_b = packed(a), packed(b)
    expected = sorted((in_a[byte], in_b[byte]) for byte in in_a.keys() & in_b.keys())
    assert sorted(pairs(intersect(a, b))) == expected
    if a.stride == b.stride or a.rows == 1 or b.rows == 1:
        assert len(intersect(a, b)) <= 4


@settings(max_examples=300)
@given(STRIDED, st.integers(0, 40), st.integers(1, 40))
def test_a_range_meets_rows_as_rows(b: Strided, start: int, length: int) -> None:
    parts = range_in_rows(span(start, length), b)
    in_b = packed(b)
    assert sorted(pairs(parts)) == sorted((byte - start, in_b[byte]) for byte in in_b if start <= byte < start + length)
    assert len(parts) <= 3
    for part in parts:
        if b.rows > 1:
            assert part.b % b.width + part.width <= b.width


@pytest.mark.parametrize("with_numpy", [True, False])
@given(STRIDED, STRIDED)
@settings(max_examples=60)
def test_rows_are_copied_with_and_without_numpy(with_numpy: bool, a: Strided, b: Strided) -> None:
    rows, width = min(a.rows, b.rows), min(a.width, b.width)
    source, target = bytes(range(200)), bytearray(200)
    patch = pytest.MonkeyPatch()
    patch.setattr(strided, "_NUMPY", strided._Numpy())
    importlib.import_module("numpy")
    if not with_numpy:
        patch.setitem(sys.modules, "numpy", None)
    copy_rows(memoryview(source), a.start, a.stride, memoryview(target), b.start, b.stride, rows, width)
    patch.undo()
    expected = bytearray(200)
    for row in range(rows):
        for column in range(width):
            expected[b.start + row * b.stride + column] = source[a.start + row * a.stride + column]
    assert target == expected


def test_numpy_is_imported_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    wanted: list[str] = []

    def missing(name: str) -> None:
        wanted.append(name)
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    copier = strided._Numpy()
    assert copier.get(copier.worth - 1) is None
    assert wanted == []
    assert copier.get(1) is None
    assert wanted == ["numpy"]
