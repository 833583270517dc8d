"""A pace that is kept: bytes wait for their turn, the rate follows the engine's latencies window by window."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvctl.checkpoint.latency import Latencies
from kvctl.checkpoint.pace import ENOUGH, Controller, Limits, p99
from kvctl.checkpoint.shares import MAPPED, Shares, read_piece
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
_PATIENCE: Final = 6  # times the baseline's seconds, for an engine that tells something, but little


class _Bucket:
    """Bytes that may pass at a rate. What is larger than the burst leaves a debt for the next."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at = time.monotonic()

    def pause(self, rate: float) -> float:
        """Seconds until there is a turn; 0.0 now."""
        now = time.monotonic()
        self._level = min(rate * _BURST_SECONDS, self._level + (now - self._at) * rate)
        self._at = now
        return max(0.0, -self._level / rate)

    def take(self, cost: float) -> None:
        self._level -= cost


class Pacer:
    """See `kvctl.transfer.pace.Pace`. `begin` measures the baseline when there are latencies to hold to;
    `limits.deadline` counts from then on. Steps are charged their shares, and what is written is held to `max_rate`
    besides.
    """

    def __init__(
        self,
        limits: Limits,
        ctx: Context,
        latencies: Latencies | None = None,
        *,
        shares: Shares = MAPPED,
        baseline_seconds: float = BASELINE_SECONDS,
    ) -> None:
        self.limits = limits
        self.shares = shares
        self._ctx = ctx
        self._baseline_seconds = baseline_seconds
        self._latencies = latencies if limits.budget is not None else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._controller = Controller(limits, 0, None)
        self._work, self._out = _Bucket(), _Bucket()
        self._started = time.monotonic()
        self._done = 0
        self._worked = 0.0
        self._trip = 0.0
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
            began, seconds = time.monotonic(), self._baseline_seconds
            while (passed := time.monotonic() - began) < seconds or (
                0 < len(before) < ENOUGH and passed < _PATIENCE * seconds
            ):
                self._ctx.cancel.check("measuring the baseline")
                time.sleep(_NAP)
                before += self._latencies.take()
            if len(before) >= ENOUGH:
                self._controller = Controller(self.limits, total, p99(before))
            else:
                self._ctx.progress.note("the engine tells no latencies: the pace follows the rates alone")
        self._work, self._out = _Bucket(), _Bucket()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._follow, name="kvctl-pace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def written(self, nbytes: int) -> None:
        """The turn of `nbytes` to be written. Raises OpCancelledError when the run is stopping."""
        self._wait(nbytes * self.shares.write, nbytes)

    def read(self, nbytes: int) -> None:
        """The turn of `nbytes` to be read. Raises InterruptedRunError."""
        self._hold(nbytes * self.shares.read)

    def hashed(self, nbytes: int) -> None:
        """The turn of `nbytes` to be hashed. Raises InterruptedRunError."""
        self._hold(nbytes * self.shares.hash)

    def skip(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._worked += nbytes * self.shares.write

    def again(self) -> None:
        """What was done so far was in vain."""
        with self._lock:
            self._worked = 0.0

    @property
    def piece(self) -> int:
        """Bytes of the next read."""
        return read_piece(self._controller.rate, self.shares, self._trip)

    def took(self, seconds: float) -> None:
        """So long took a read."""
        self._trip += 0.2 * (seconds - self._trip)

    def _wait(self, cost: float, out: int) -> None:
        if self.unpaced:
            with self._lock:
                self._done += out
                self._worked += cost
            if self._ctx.cancel.stopping:
                raise OpCancelledError
            return
        while True:
            if self._ctx.cancel.stopping:
                raise OpCancelledError
            with self._lock:
                pause = self._work.pause(self._controller.rate)
                if out:
                    pause = max(pause, self._out.pause(self._controller.limits.ceiling))
                if not pause:
                    self._work.take(cost)
                    self._worked += cost
                    self._out.take(out)
                    self._done += out
                    return
            self._waited += min(pause, _NAP)
            time.sleep(min(pause, _NAP))

    def paced(self, transport: Transport) -> Transport:
        return PacedTransport(transport, self)

    def hold(self, nbytes: int) -> None:
        """Of a push, whose reads and hashes cost alike."""
        self.hashed(nbytes)

    def _hold(self, cost: float) -> None:
        try:
            self._wait(cost, 0)
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
                self._controller.window(samples, time.monotonic() - self._started, int(self._worked))
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
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "budget_missed": over is not None and limits.budget is not None and over > limits.budget,
            "deadline_missed": limits.deadline is not None and elapsed > limits.deadline,
        }


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


def slower(pacing: Mapping[str, Any]) -> str:  # Any: JSON
    """In words, when the bytes came slower than the least rate asked for; empty otherwise."""
    if pacing["mean_rate"] >= pacing["min_rate"]:
        return ""
    return (
        f"slower than --min-rate, {pacing['mean_rate'] / 1e6:.1f} MB/s: not the pace, but the store, the engine or the "
        "processors held it back"
    )


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
            self._pacer.written(nbytes)
            self._asked[op.id] = self._asked.get(op.id, 0) + nbytes

        return replace(op, pace=pace)

    def poll(self, timeout: float | None) -> list[Completion]:
        done = self.inner.poll(timeout)
        for item in done:
            asked, size = self._asked.pop(item.id, 0), self._sizes.pop(item.id, 0)
            if item.status is Status.DONE and asked < size:
                with contextlib.suppress(OpCancelledError):  # it went in one go: the next one waits for it
                    self._pacer.written(size - asked)
        return done
