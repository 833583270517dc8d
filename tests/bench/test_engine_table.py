"""What the bench of a real engine makes of its figures."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.kv.advise import GroupCost
from scripts.bench.engine_table import advice, crossing, spread, table

GROUPS = (GroupCost("full", 4, 4096),)
BASE, LATENCY, BANDWIDTH, LINEAR = 0.010, 0.008, 400e6, 1e-4  # s, s, bytes/s, s per token: equal at 89.1 tokens


def way(seconds: float, count: int = 100) -> dict[str, float]:
    return spread([seconds] * count)


def row(tokens: int) -> dict[str, Any]:
    restored = BASE + LATENCY + 4096 * tokens / BANDWIDTH
    return {
        "computed": way(BASE + LINEAR * tokens, 25),
        "own cache": way(BASE),
        "restored": way(restored),
        "fetched_per_needed": 1.0,
        "restored_tokens": tokens,
        "lost_tokens": 0,
        "bytes_per_restore": 4096 * tokens,
    }


def place() -> dict[str, Any]:
    return {
        "tokens": {str(tokens): {"1": row(tokens), "4": row(tokens)} for tokens in (512, 8192)},
        "base": way(BASE, 20),
        "crossover": {str(tokens): row(tokens) for tokens in (32, 64, 96, 128)},
        "stream": None,
    }


def test_the_crossover_lies_between_the_last_loss_and_the_next_length() -> None:
    assert crossing({32: (1.0, 2.0), 64: (2.0, 1.0)}) == 48.0
    assert crossing({32: (1.0, 2.0), 64: (2.0, 1.0), 96: (1.0, 1.5), 128: (2.0, 1.5)}) == 112.0
    assert crossing({32: (2.0, 1.0), 64: (3.0, 1.0)}) == 32.0
    assert crossing({32: (1.0, 2.0), 64: (2.0, 3.0)}) is None
    assert crossing({}) is None


def test_the_advice_from_long_prompts_meets_what_short_ones_show() -> None:
    said = advice(GROUPS, place())
    assert said is not None
    assert said["advised_from"] == 90
    assert said["measured_from"] == pytest.approx(89.13, abs=0.01)
    assert said["bandwidth"] == pytest.approx(BANDWIDTH)
    assert said["latency_s"] == pytest.approx(LATENCY)
    assert said["prefill"] == {"linear_s": pytest.approx(LINEAR), "quadratic_s": pytest.approx(0.0, abs=1e-12)}


def test_a_p99_is_by_nearest_rank() -> None:
    assert spread([float(number) for number in range(1, 101)]) == {"n": 100, "p50": 50.5, "p99": 99.0}
    assert spread([1.0])["p99"] == 1.0


def test_the_tables_of_both_models() -> None:
    places = {"memory": place(), "s3": place()}
    places["s3"]["stream"] = {
        "tokens": 2048,
        "alone": {**way(0.006), "max": 0.02, "others": 0},
        "beside restores": {**way(0.006), "max": 0.02, "others": 3},
        "beside computing": {**way(0.006), "max": 0.2, "others": 3},
    }
    found = {
        "dtype": "float32",
        "cores": 2,
        "computed": {str(tokens): {width: way(LINEAR * tokens) for width in "14"} for tokens in (512, 8192)},
        "places": places,
        "advice": {"memory": advice(GROUPS, places["memory"]), "s3": None},
    }
    text = table({"models": {"tiny": found, "smollm2": found}})
    assert text.count("| tokens | at once | computed | own cache | host memory | S3 |") == 2
    assert "| 8,192 | 4 | 819 / 819 | 10 / 10 | 102 / 102 | 102 / 102 |" in text
    assert "| measured | 89 |" in text
    assert "| `kv advise` of the same inputs | 90 |" in text
    assert "| S3 | 6 / 6 / 20 | 6 / 6 / 20 | 6 / 6 / 200 |" in text
    assert "fetched / needed: 1.00 at most; tokens wanted that did not come: 0; 100 samples each" in text
