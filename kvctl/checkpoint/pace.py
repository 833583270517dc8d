"""How fast a checkpoint may go. Pure: latencies and clock readings in, a rate out.

Once per window: one whose p99 is over the baseline's by more than the budget halves the rate, any other raises it by
15 %; windows with few latencies are judged together. The rate stays between the floor and the ceiling; a deadline
raises the floor, as time runs out, and so does the least rate when it was not kept. Without latencies the ceiling alone
paces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FIRST_SHARE: Final = 0.25  # of the ceiling, to begin with, where latencies are watched
UNLIMITED: Final = 4e9  # bytes/s that stand for 'no ceiling'
RAISE: Final = 1.15
ENOUGH: Final = 20  # samples that a p99 of a window takes at least
_EARLY: Final = 0.95  # of the time that the least rate allows: what comes after the bytes takes some too
BLIND_WINDOWS: Final = 5  # without samples, until latency counts as unknown


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates in bytes/s of whole bytes, see `shares`; `max_rate` bounds what is written at every moment too. `budget`:
    seconds over the baseline's p99, `deadline`: seconds from the start.
    """

    max_rate: float | None = None
    min_rate: float = 1 << 20
    budget: float | None = None
    deadline: float | None = None

    @property
    def paced(self) -> bool:
        return self.max_rate is not None or self.budget is not None

    @property
    def ceiling(self) -> float:
        return max(self.max_rate or UNLIMITED, self.min_rate)


def p99(samples: Sequence[float]) -> float:
    """Nearest rank; 0.0 of nothing."""
    if not samples:
        return 0.0
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


class Controller:
    """`baseline`: the p99 before the checkpoint, seconds; None when it is not known: then only rates pace."""

    def __init__(self, limits: Limits, total_bytes: int, baseline: float | None) -> None:
        self.limits = limits
        self.total = total_bytes
        self.baseline = baseline
        self.watching = limits.budget is not None and baseline is not None
        self.rate = max(limits.min_rate, limits.ceiling * FIRST_SHARE) if self.watching else limits.ceiling
        self.backoffs = 0
        self.windows = 0
        self.over_budget = 0
        self.blind = 0
        self._pending: list[float] = []
        self.lowest = self.highest = self.rate

    def floor(self, elapsed: float, done_bytes: int) -> float:
        """The least rate that the deadline and the minimum allow now. `done_bytes`: of `total_bytes`."""
        least, left = self.limits.min_rate, max(0, self.total - done_bytes)
        # one that was held up (an engine's slow steps) catches up, gently: at twice the least rate and no more
        behind = left / max(self.total / least * _EARLY - elapsed, 0.1)
        floor = min(2 * least, max(least, behind))
        if self.limits.deadline is not None:
            floor = max(floor, left / max(self.limits.deadline - elapsed, 0.1))
        return min(self.limits.ceiling, floor)

    def window(self, samples: Sequence[float], elapsed: float, done_bytes: int) -> float:
        """The rate for the next window. `samples`: latencies of the one that has ended."""
        floor = self.floor(elapsed, done_bytes)
        if self.watching:
            self._watch(samples)
        self.rate = min(self.limits.ceiling, max(floor, self.rate))
        self.lowest, self.highest = min(self.lowest, self.rate), max(self.highest, self.rate)
        return self.rate

    def _watch(self, samples: Sequence[float]) -> None:
        assert self.limits.budget is not None
        assert self.baseline is not None
        if not samples:
            self.blind += 1
            if self.blind >= BLIND_WINDOWS:
                self._pending.clear()
                self.rate = self.limits.ceiling  # the engine tells nothing any more: by rate alone
            return
        if self.blind >= BLIND_WINDOWS:  # it is back: carefully again
            self.rate = max(self.limits.min_rate, self.limits.ceiling * FIRST_SHARE)
        self.blind = 0
        self._pending += samples
        if len(self._pending) < ENOUGH:
            return  # a slow engine: some windows together say enough
        judged, self._pending = self._pending, []
        self.windows += 1
        if p99(judged) > self.baseline + self.limits.budget:
            self.over_budget += 1
            self.backoffs += 1
            self.rate /= 2
        else:
            self.rate *= RAISE

    @property
    def lost_sight(self) -> bool:
        return self.watching and self.blind >= BLIND_WINDOWS
