"""Sizes and time spans as people type them: what is more than anything holds is refused, not passed on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from kvctl.core.errors import UsageError
from kvctl.core.units import MAX_AGE, MAX_SIZE, is_count, parse_age, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("16MiB", 16 << 20), ("1.5 kib", 1536), ("2GB", 2 * 10**9), (str(MAX_SIZE), MAX_SIZE)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "-1", "1e9", "NaN", "16 MiBs", "9" * 30, "9" * 5000, "9" * 400 + ".0", "8193PiB", str(MAX_SIZE + 1)]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "7", "-1d", "inf", "101y", "9" * 400 + "y"])
def test_what_is_no_time_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_age(text)


def test_the_longest_time_span_can_be_computed_with() -> None:
    assert datetime.now(UTC) - timedelta(seconds=parse_age("100y")) < datetime.now(UTC)
    assert parse_age("100y") == MAX_AGE


def test_counts_are_ascii_digits() -> None:
    assert is_count("0123")
    assert not any(map(is_count, ("", "²", "٣", "-1", "1" * 19, "1 ")))
