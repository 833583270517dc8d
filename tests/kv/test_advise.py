"""Advice: published crossovers come out of their inputs; windows, states and hopeless cases are told right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.errors import UsageError
from kvctl.kv.advise import (
    GroupCost,
    Prefill,
    Restore,
    advise,
    break_even,
    group_costs,
    session_bytes,
)
from kvctl.kv.geometry import cache_bytes, groups_of

LONG, LONG_BYTES = 235_000, 43_000_000_000  # tokens, and the size of their KV
PUBLISHED = [GroupCost("full", 1, LONG_BYTES // LONG)]
PREFILL = Prefill.fitted([(4096, 0.091), (LONG, 11.223)])


def restore_through(short: float, long: float) -> Restore:
    """The latency and bandwidth of measured restores of 4,096 and 235,000 tokens."""
    small, large = session_bytes(PUBLISHED, 4096), session_bytes(PUBLISHED, LONG)
    bandwidth = (large - small) / (long - short)
    return Restore(bandwidth, short - small / bandwidth)


@pytest.mark.parametrize("short", [0.113, 0.129])
def test_published_short_prompt_is_computed_faster(short: float) -> None:
    """4k tokens: 91 ms computed, 113 to 129 ms offloaded: not worth it."""
    found = advise(PUBLISHED, restore_through(short, 0.837), PREFILL, 4096)
    assert found.recompute_s == pytest.approx(0.091, rel=0.01)
    assert found.restore_s == pytest.approx(short, rel=0.01)
    assert not found.store
    assert "latency" in found.reason


@pytest.mark.parametrize("short", [0.113, 0.129])
def test_published_long_prompt_is_restored_faster(short: float) -> None:
    """235k tokens, 43 GB: 837 ms restored, 11,223 ms computed."""
    found = advise(PUBLISHED, restore_through(short, 0.837), PREFILL, LONG)
    assert found.bytes == pytest.approx(LONG_BYTES, rel=0.001)
    assert found.restore_s == pytest.approx(0.837, rel=0.01)
    assert found.recompute_s == pytest.approx(11.223, rel=0.01)
    assert found.store
    assert found.to_json()["speedup"] == pytest.approx(13.4, rel=0.02)


@pytest.mark.parametrize("short", [0.113, 0.129])
def test_published_crossover_between_them(short: float) -> None:
    """The two ends alone give 5 to 6 thousand tokens: above the 4k at which offload was seen to lose, and below the
    16k from which it was seen to win on every run.
    """
    point = break_even(PUBLISHED, restore_through(short, 0.837), PREFILL)
    assert point is not None
    assert 4096 < point <= 16_384


@pytest.mark.parametrize("short", [0.113, 0.129])
def test_published_crossover_of_one_drive(short: float) -> None:
    """Llama-3-8B (131,072 bytes a token) from one drive of 7 GB/s, with those times at 4k: roughly 8 to 16 thousand."""
    costs = [GroupCost("full", 32, 131_072)]
    restore = Restore(7e9, short - 4096 * 131_072 / 7e9)
    point = break_even(costs, restore, Prefill.fitted([(4096, 0.091)]))
    assert point is not None
    assert 8_000 <= point <= 16_384


def test_bytes_are_those_of_the_geometry() -> None:
    gemma = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2560,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    }
    groups = groups_of(gemma)
    costs = group_costs(groups, "BF16")
    for tokens in (1, 1000, 1024, 1025, 100_000):
        assert session_bytes(costs, tokens) == cache_bytes(groups, "BF16", tokens)
    restore, prefill = Restore(1e9), Prefill(1e-5)
    assert advise(costs, restore, prefill, 1024).bytes_per_token == 139_264
    assert advise(costs, restore, prefill, 1025).bytes_per_token == 20_480


def test_one_point_is_a_rate_and_two_fit_both_terms() -> None:
    rate = Prefill.fitted([(1000, 0.5)])
    assert rate.linear == pytest.approx(0.0005)
    assert rate.quadratic == 0
    found = Prefill.fitted([(1000, 0.1 + 0.02), (10_000, 1.0 + 2.0)])
    assert found.linear == pytest.approx(1e-4)
    assert found.quadratic == pytest.approx(2e-8)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(1e-4, 1e4)), min_size=1, max_size=6))
def test_a_fit_never_has_negative_terms(points: list[tuple[int, float]]) -> None:
    found = Prefill.fitted(points)
    assert found.linear >= 0
    assert found.quadratic >= 0


@given(
    per_token=st.integers(1, 1 << 20),
    window=st.none() | st.integers(1, 1 << 16),
    fixed=st.integers(0, 1 << 28),
    bandwidth=st.floats(1e6, 1e12),
    latency=st.floats(0, 10),
    linear=st.floats(1e-7, 1e-1),
    quadratic=st.floats(0, 1e-6),
)
def test_break_even_is_where_the_winner_changes(
    per_token: int,
    window: int | None,
    fixed: int,
    bandwidth: float,
    latency: float,
    linear: float,
    quadratic: float,
) -> None:
    costs = [GroupCost("full", 1, per_token), GroupCost("sliding", 1, per_token, window, fixed)]
    restore, prefill = Restore(bandwidth, latency), Prefill(linear, quadratic)

    def wins(tokens: int) -> bool:
        return restore.seconds(session_bytes(costs, tokens)) <= prefill.seconds(tokens)

    point = break_even(costs, restore, prefill, longest=1 << 20)
    if point is None:
        assert not wins(1 << 20)
    else:
        assert wins(point)
        assert point == 1 or not wins(point - 1)


def test_a_link_slower_than_computing_never_wins_and_says_what_would() -> None:
    costs = [GroupCost("full", 1, 100_000)]
    found = advise(costs, Restore(1e8, 0.1), Prefill.at_rate(10_000), 50_000)
    assert found.break_even is None
    assert not found.store
    assert "no length" in found.reason
    assert found.needed_bandwidth is not None
    assert found.needed_bandwidth == pytest.approx(5e9 / 4.9)
    assert advise(costs, Restore(found.needed_bandwidth * 1.2, 0.1), Prefill.at_rate(10_000), 50_000).store


def test_a_latency_longer_than_computing_needs_no_bandwidth() -> None:
    found = advise([GroupCost("full", 1, 1000)], Restore(1e9, 2.0), Prefill.at_rate(10_000), 1000)
    assert found.needed_bandwidth is None
    assert "latency" in found.reason


def test_a_narrow_win_is_not_worth_storing() -> None:
    found = advise([GroupCost("full", 1, 1000)], Restore(1e7), Prefill.at_rate(9_900), 1000)
    assert found.restore_s < found.recompute_s
    assert not found.store
    assert "within" in found.reason


def test_speed_from_a_report() -> None:
    found = Restore.from_report({"bytes": 4_000_000_000, "seconds": 2.5, "setup_s": 0.5})
    assert (found.bandwidth, found.latency) == (2e9, 0.5)
    with pytest.raises(UsageError, match="shows no transfer"):
        Restore.from_report({"bytes": 0, "seconds": 1.0, "setup_s": 0.2, "id": "x"})


@pytest.mark.parametrize("tokens", [0, -1])
def test_no_session_no_advice(tokens: int) -> None:
    with pytest.raises(UsageError):
        advise(PUBLISHED, Restore(1e9), PREFILL, tokens)


def test_impossible_speeds_are_refused() -> None:
    for make in (
        lambda: Restore(0.0),
        lambda: Restore(1.0, -1.0),
        lambda: Prefill(0.0),
        lambda: Prefill.at_rate(0.0),
        lambda: Prefill.fitted([]),
        lambda: Prefill.fitted([(0, 1.0)]),
    ):
        with pytest.raises(UsageError):
            make()
