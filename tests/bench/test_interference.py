"""What `bench interference` makes of an engine's samples. The whole of it runs against a real vLLM (tests/vllm)."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.bench.interference import InterferenceOptions, Kind, Watch, document_of
from kvctl.checkpoint.pace import Limits
from kvctl.core.addresses import parse_store
from kvctl.engines.api import EngineAdapter, Sample, Samples
from scripts.bench.interference import table


class Clock:
    """An engine whose tokens come every 0.5 s of its own clock, which is nobody else's."""

    def __init__(self, *, raw: bool = True) -> None:
        self.now = 1000.0
        self.asked = 0
        self._raw = raw

    def samples(self, since: float) -> Samples:
        self.asked += 1
        moments = [1000.0 + 0.5 * number for number in range(100)]
        found = tuple(Sample(at, 0.5) for at in moments if since < at <= self.now)
        return Samples(found, self.now, self._raw)

    def close(self) -> None:
        return


def watch_of(clock: Clock) -> Watch:
    adapter: Any = clock  # Any: what a watch does not use is left out
    found: EngineAdapter = adapter
    return Watch(found)


def test_gaps_count_that_lie_in_the_stretch_by_the_engines_clock() -> None:
    clock = Clock()
    watch = watch_of(clock)
    clock.now = 1001.25
    watch.begin()
    clock.now = 1004.0
    # the one that was ready at 1001.5 began before
    assert [token.at for token in watch.end()] == [1002.0, 1002.5, 1003.0, 1003.5, 1004.0]
    watch.begin()
    clock.now = 1008.0
    assert [token.at for token in watch.end(after=2.0)] == [1006.5, 1007.0, 1007.5, 1008.0]
    assert clock.asked == 5  # never while something is measured


def test_metrics_have_no_moments_and_all_of_them_count() -> None:
    clock = Clock(raw=False)
    watch = watch_of(clock)
    watch.begin()
    clock.now = 1001.0
    assert len(watch.end()) == 2


PACE = {"mean_rate": 25_000_000, "budget_missed": True, "backoffs": 3, "windows": 20}


def document(paced: float) -> dict[str, Any]:  # Any: JSON
    gaps = {
        "baseline": [[0.04] * 98 + [0.05] * 2, [0.04] * 98 + [0.052] * 2],
        "unpaced": [[0.08] * 100, [0.09] * 100],
        "paced": [[paced] * 100] * 2,
        "plain copy": [[0.07] * 100] * 2,
    }
    kinds = {name: Kind(name, bytes=1_000_000_000, copies=2, busy_s=10.0) for name in gaps}
    kinds["baseline"] = Kind("baseline")
    kinds["paced"].pacing.extend([PACE, {**PACE, "budget_missed": False}])
    options = InterferenceOptions("http://x", "engine:http://x", parse_store("mem://x"), Limits(), rounds=2)
    return document_of(options, kinds, gaps, "raw")


@pytest.mark.parametrize(("paced", "within", "share"), [(0.052, True, 1 / 34), (0.055, False, 4 / 34)])
def test_changes_are_of_rounds_against_their_own_baselines(paced: float, within: bool, share: float) -> None:
    found = document(paced)
    changes = {kind["name"]: kind["change_s"] for kind in found["kinds"]}
    assert changes["baseline"] == 0.0
    assert changes["unpaced"] == pytest.approx(0.034)
    assert found["baseline_spread_s"] == pytest.approx(0.002)
    assert found["within_baseline_spread"] is within
    assert found["paced_of_unpaced"] == pytest.approx(share)


def test_the_readmes_table_says_what_was_asked_and_what_was_done() -> None:
    found = document(0.055)
    found |= {
        "model": "m", "when": "2026-11-30T00:00:00Z", "machine": {"cores": 2, "cpu": "x"},
        "vllm": {"version": "1", "dtype": "float32", "threads": 1, "streams": 4},
    }  # fmt: skip
    lines = table(found)
    assert "| baseline |  |  | 200 | 40.0 | 52.0 |  |" in lines
    assert "| paced | 2 | 100 | 200 | 55.0 | 55.0 | +4.0 |" in lines
    assert lines[-1].startswith("The paced change is 0.12 of the unpaced; the paced one is beyond what")
    assert "25.0 MB/s and more (kept); the budget was missed by 1 of 2; 6 back-offs in 40 windows." in lines[-1]
