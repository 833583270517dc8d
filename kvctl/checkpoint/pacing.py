"""A pace that is kept: bytes wait for their turn, the rate follows the engine's latencies window by window."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from kvctl.checkpoint.latency import Latencies
from kvctl.checkpoint.pace import ENOUGH, Controller, Limits, p99
from kvctl.core.context import Context
from kvctl.core.errors import InterruptedRunError
from kvctl.transfer.report import Report
from kvctl.transports.api import Completion, Op, Status, Transport
from kvctl.transports.threaded import OpCancelledError
from kvctl.transports.wrapper import TransportWrapper

WINDOW_SECONDS: Final = 1.0
BASELINE_SECONDS: Final = 5.0
_BURST_SECONDS: Final = 0.02
_NAP: Final = 0.1


class Pacer:
    """See `kvctl.transfer.pace.Pace`. `begin` measures the baseline when there are latencies to hold to;
    `limits.deadline` counts from then on.
    """

    def __init__(
        self,
        limits: Limits,
        ctx: Context,
        latencies: Latencies | None = None,
        *,
        baseline_seconds: float = BASELINE_SECONDS,
    ) -> None:
        self.limits = limits
        self._ctx = ctx
        self._baseline_seconds = baseline_seconds
        self._latencies = latencies if limits.budget is not None else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._controller = Controller(limits, 0, None)
        self._level = 0.0
        self._at = self._started = time.monotonic()
        self._done = 0
        self._waited = 0.0
        self._samples: list[float] = []

    @property
    def unpaced(self) -> bool:
        """Nothing holds it back: no rate was given and there are no latencies to follow."""
        return self.limits.max_rate is None and self._latencies is None

    @property
    def least(self) -> int | None:
        return None if self.unpaced else int(self.limits.min_rate)

    def begin(self, total: int) -> None:
        """Raises InterruptedRunError when asked to stop meanwhile."""
        self._controller = Controller(self.limits, total, None)
        if self._latencies is not None:
            self._latencies.take()
            before: list[float] = []
            ends = time.monotonic() + self._baseline_seconds
            while time.monotonic() < ends:
                self._ctx.cancel.check("measuring the baseline")
                time.sleep(_NAP)
                before += self._latencies.take()
            if len(before) >= ENOUGH:
                self._controller = Controller(self.limits, total, p99(before))
            else:
                self._ctx.progress.note("the engine tells no latencies: the pace follows the rates alone")
        self._at = self._started = time.monotonic()
        self._thread = threading.Thread(target=self._follow, name="kvctl-pace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def wait(self, nbytes: int, *, weight: float = 1.0, counts: bool = True) -> None:
        """The turn of `nbytes`. `weight`: how much of them the rate is charged. Raises OpCancelledError when the run
        is stopping.
        """
        if self.unpaced:
            with self._lock:
                self._done += nbytes if counts else 0
            if self._ctx.cancel.stopping:
                raise OpCancelledError
            return
        cost = nbytes * weight
        while True:
            with self._lock:
                now = time.monotonic()
                rate = self._controller.rate
                self._level = min(rate * _BURST_SECONDS, self._level + (now - self._at) * rate)
                self._at = now
                if self._level >= 0:  # what is larger than the burst leaves a debt for the next
                    self._level -= cost
                    self._done += nbytes if counts else 0
                    return
                pause = -self._level / rate
            if self._ctx.cancel.stopping:
                raise OpCancelledError
            self._waited += min(pause, _NAP)
            time.sleep(min(pause, _NAP))

    def paced(self, transport: Transport) -> Transport:
        return PacedTransport(transport, self)

    def skip(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes

    def hold(self, nbytes: int) -> None:
        """As `wait`, for what is no transport's work. Raises InterruptedRunError."""
        try:
            self.wait(nbytes, weight=0.25, counts=False)
        except OpCancelledError:
            raise InterruptedRunError(
                "stopped while checkpointing", signum=self._ctx.cancel.signum,
                hint="run the same command again: it resumes",
            ) from None  # fmt: skip

    def _follow(self) -> None:
        told = False
        while not self._stop.wait(WINDOW_SECONDS):
            samples: Sequence[float] = self._latencies.take() if self._latencies is not None else ()
            with self._lock:
                self._samples += samples
                self._controller.window(samples, time.monotonic() - self._started, self._done)
                lost = self._controller.lost_sight
            if lost and not told:
                self._ctx.progress.note("the engine tells no latencies any more: the pace follows the rates alone")
            told = lost

    def report(self) -> dict[str, Any]:  # Any: JSON
        """What was measured, with which resolution, and what was done."""
        control, limits = self._controller, self.limits
        measured = p99(self._samples) if control.watching and len(self._samples) >= ENOUGH else None
        over = None if measured is None or control.baseline is None else max(0.0, measured - control.baseline)
        if not control.watching:
            by = "rate alone" if limits.budget is None else "rate alone: the engine told no latencies"
        else:
            by = "rate alone at the end: the latencies vanished" if control.lost_sight else "latency"
        elapsed = time.monotonic() - self._started
        return {
            "by": by,
            "resolution": self._latencies.resolution if self._latencies is not None else None,
            "baseline_p99_s": control.baseline,
            "p99_s": measured,
            "over_baseline_s": over,
            "budget_s": limits.budget,
            "samples": len(self._samples),
            "windows": control.windows,
            "windows_over_budget": control.over_budget,
            "backoffs": control.backoffs,
            "lowest_rate": round(control.lowest),
            "highest_rate": round(control.highest),
            "mean_rate": round(self._done / elapsed) if elapsed > 0 else 0,
            "max_rate": limits.max_rate,
            "min_rate": limits.min_rate,
            "waited_s": round(self._waited, 3),
            "budget_missed": over is not None and limits.budget is not None and over > limits.budget,
            "deadline_missed": limits.deadline is not None and elapsed > limits.deadline,
        }


class PacedTransport(TransportWrapper):
    """Writes of any transport at a pacer's pace: piece by piece where it can, else object by object. See
    `kvctl.transports.api.Transport`.
    """

    def __init__(self, inner: Transport, pacer: Pacer) -> None:
        super().__init__(inner)
        self._pacer = pacer
        self._asked: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def submit(self, ops: Sequence[Op]) -> None:
        self.inner.submit([self._paced(op) for op in ops])

    def _paced(self, op: Op) -> Op:
        if op.kind != "write":
            return op
        self._asked[op.id], self._sizes[op.id] = 0, op.length
        if self._pacer.unpaced:
            return op  # in as few pieces as the transport likes

        def pace(nbytes: int) -> None:
            self._pacer.wait(nbytes)
            self._asked[op.id] = self._asked.get(op.id, 0) + nbytes

        return replace(op, pace=pace)

    def poll(self, timeout: float | None) -> list[Completion]:
        done = self.inner.poll(timeout)
        for item in done:
            asked, size = self._asked.pop(item.id, 0), self._sizes.pop(item.id, 0)
            if item.status is Status.DONE and asked < size:
                with contextlib.suppress(OpCancelledError):  # it went in one go: the next one waits for it
                    self._pacer.wait(size - asked)
        return done


def missed(report: Report) -> str:
    """What of the pace was not kept, in words; empty when all was."""
    pacing: dict[str, Any] = report.extra.get("pacing", {})  # Any: JSON
    parts = []
    if pacing.get("budget_missed"):
        parts.append(
            f"p99 was {1000 * pacing['over_baseline_s']:.1f} ms over the baseline, "
            f"the budget was {1000 * pacing['budget_s']:g} ms"
        )
    if pacing.get("deadline_missed"):
        parts.append("the deadline had passed")
    return "; ".join(parts)
