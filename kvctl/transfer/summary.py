"""From what lanes, stages and the executor counted to a Report: who was busy, and what limited the run."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from kvctl.transfer.lanes import Lane, LaneSet, percentile
from kvctl.transfer.report import Report
from kvctl.transfer.tasks import RunStats

BUSY: Final = 0.85  # a stage this busy is called the limiter


def cpu_seconds() -> float:
    """CPU seconds of this process so far, user and system, all threads."""
    return time.process_time()


def peak_memory() -> int:
    """The process's largest resident set so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(slots=True)
class Stopwatch:
    """Wall and CPU time of a command from its first line; `ready` marks the end of the set-up."""

    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    wall: float = field(default_factory=time.monotonic)
    cpu: float = field(default_factory=cpu_seconds)
    setup_s: float = 0.0

    @property
    def since_ready(self) -> float:
        """Seconds since the set-up ended."""
        return time.monotonic() - self.wall - self.setup_s

    def ready(self) -> None:
        self.setup_s = time.monotonic() - self.wall

    def stop(self, report: Report) -> None:
        report.started = self.started
        report.seconds = time.monotonic() - self.wall
        report.setup_s = self.setup_s
        report.cpu_s = cpu_seconds() - self.cpu
        report.peak_memory = peak_memory()


def fill(
    report: Report,
    stats: RunStats,
    lanes: LaneSet,
    busy: Mapping[str, float],
    workers: int,
    *,
    seconds: float | None = None,
) -> None:
    """Add a run's counts to `report`. `busy`: seconds per stage summed over `workers` threads; shares are of
    `seconds` (the executor's own time when None).
    """
    report.requests += stats.requests
    report.retries += stats.retries
    report.hedges += stats.hedges
    report.hedge_wins += stats.hedge_wins
    report.hedged_bytes += stats.hedged_bytes
    report.p50_s = percentile(stats.durations, 0.5)
    report.p99_s = percentile(stats.durations, 0.99)
    report.paths = [lane.report() for lane in lanes.lanes]
    report.transport = lanes.report()
    report.notes.extend(stats.notes)
    wall = max(stats.seconds if seconds is None else seconds, 1e-9)
    report.stages = {stage: min(1.0, seconds / wall / workers) for stage, seconds in sorted(busy.items())}
    if lanes.lanes:
        report.stages["transfer"] = sum(lane.active_s for lane in lanes.lanes) / wall / len(lanes.lanes)
    report.limiter = limiter(report.stages, lanes.lanes, wall)


def limiter(stages: Mapping[str, float], lanes: Sequence[Lane], wall: float) -> str:
    """Which part the numbers point to: 'client CPU', a stage, 'member NAME', 'endpoint', or 'nothing clear'."""
    cpu_share = stages.get("cpu", 0.0)
    if cpu_share > BUSY:
        return "client CPU"
    own = {name: share for name, share in stages.items() if name not in {"cpu", "transfer"}}
    if own:
        worst = max(own, key=lambda name: own[name])
        if own[worst] > BUSY:
            return {"verify": "verification", "write": "destination", "copy": "destination"}.get(worst, worst)
    active = {lane.member_name: lane.active_s / wall for lane in lanes}
    slowest = max(active, key=lambda name: active[name], default="")
    if slowest and active[slowest] > BUSY:
        others = [share for name, share in active.items() if name != slowest]
        return f"member {slowest}" if others and max(others) < active[slowest] / 2 else "endpoint"
    return "nothing clear"


def cpu_share(cpu_s: float, wall: float) -> float:
    """Share of all CPUs this process may use, 0..1."""
    return min(1.0, cpu_s / max(wall, 1e-9) / max(1, len(os.sched_getaffinity(0))))
