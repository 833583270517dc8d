"""Moving a plan's runs: over which lanes, into which memory, verified and noted as they land.

The loader knows runs and targets, not formats; `kvctl.weights.ondevice` is the same for memory that the CPU does not
reach.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from kvctl.core.context import Context
from kvctl.core.errors import EnvError, IntegrityError, InterruptedRunError, KvctlError, TransientError
from kvctl.core.units import MIB
from kvctl.memory.arena import Arena
from kvctl.memory.budget import staging_budget
from kvctl.memory.buffers import Buffer, HostBuffer
from kvctl.repo.chunks import digest_of, verify_leaves
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, fill
from kvctl.transfer.tasks import RunStats, StageClock, Task
from kvctl.transports.registry import choose
from kvctl.weights.planning import LoadPlan, Opened
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import Run, gather, scatter
from kvctl.weights.targets import Landing, Target, checksum_of

STAGING: Final = 256 * MIB


class Loading:
    """One run of the executor over a plan's runs. What differs where the CPU does not reach is in the hooks that
    `kvctl.weights.ondevice` overrides.
    """

    def __init__(
        self, request: LoadRequest, source: Opened, plan: LoadPlan, target: Target, report: Report, ctx: Context
    ) -> None:
        self.request = request
        self.source = source
        self.plan = plan
        self.target = target
        self.report = report
        self.ctx = ctx
        self.clock = StageClock()
        self.stats = RunStats()  # of the attempts that succeeded
        self.staging: Arena | None = None
        self.data = [landing.buffer.view[landing.data_start :] for landing in target.landings or ()]
        self.verified_bytes = 0
        self.digested_bytes = 0

    def move(self, watch: Stopwatch) -> None:
        """Move everything; with `fallback` over the next transport when one fails, and the report says so."""
        failed: dict[str, str] = {}
        while True:
            name, options = ("auto", {}) if failed else self._transport()
            lanes = open_lanes(
                self.source.members,
                memory_kind=self._memory_kind(),
                transport=name,
                options=options,
                max_rate=self.request.max_rate,
                failed=failed,
                trace=self.ctx.trace,
            )
            try:
                self._attempt(lanes, watch)
            except (EnvError, TransientError) as error:
                if not self.request.fallback:
                    raise
                failed.update((choice.spec.name, f"it failed: {error}") for choice in lanes.choices)
                if not self._another(lanes, failed):
                    raise
                self.ctx.progress.note(f"falling back from {', '.join(failed)}: {error}")
                continue
            for entry in self.report.transport:
                entry.fallback = "; ".join(f"{name}: {why}" for name, why in failed.items())
            return

    def _transport(self) -> tuple[str, Mapping[str, str]]:
        """The transport to begin with, and its options."""
        return self.request.transport, self.request.transport_options

    def _memory_kind(self) -> str:
        """The kind of memory that the transports land in."""
        return "host"

    def _another(self, lanes: LaneSet, failed: Mapping[str, str]) -> bool:
        try:
            for member in self.source.members:
                choose(member.config.scheme, self._memory_kind(), failed=failed)
        except EnvError:
            return False
        return bool(lanes.choices)

    def _attempt(self, lanes: LaneSet, watch: Stopwatch) -> None:
        report, plan = self.report, self.plan
        workers = self._workers()
        arena: Arena | None = None
        try:
            runs = self._still_to_do()
            staged = [run for run in runs.values() if self._staged(run)]
            if staged:
                self.staging = arena = self._arena(lanes, max(run.length for run in staged))
            tasks = [self._task(number, run) for number, run in runs.items()]
            watch.ready()
            self.ctx.progress.begin("loading", sum(run.length for run in runs.values()))
            executor = Executor(
                lanes.lanes,
                self.ctx,
                arena=arena,
                budget=self.request.max_in_flight_bytes,
                hedge=self.request.hedge and self._hedges,
                finishers=workers,
                max_rate=self.request.max_rate,
            )
            try:
                executor.run(tasks)
            except InterruptedRunError as stop:
                stop.hint = stop.hint or "run the same command again: it resumes from what has landed"
                raise
            finally:
                fill(report, executor.stats, lanes, self.clock.busy(), workers)
        finally:
            self.ctx.progress.end()
            lanes.close()
            self.staging = None
            if arena is not None:
                arena.close()
        done = executor.stats.bytes
        report.fetched = done
        report.needed = sum(run.needed for run in runs.values())
        report.bytes = plan.needed_bytes
        report.misaligned_bytes = sum(run.length for run in staged if run.dest is None and self._keeps)
        report.verified = self._verification()
        self.stats.add(executor.stats)

    def release(self) -> None:
        """Views of the target's memory end before the target closes it."""
        for view in self.data:
            view.release()

    @property
    def _keeps(self) -> bool:
        """Whether bytes land anywhere."""
        return self.target.landings is not None

    @property
    def _hedges(self) -> bool:
        """Whether the copy of a hedge that won can be put where the bytes belong."""
        return True

    def _workers(self) -> int:
        """Threads that verify and hand over."""
        return min(4, os.cpu_count() or 1)

    def _staged(self, run: Run) -> bool:
        return run.dest is None or self.target.landings is None

    def _arena(self, lanes: LaneSet, longest: int) -> Arena:
        in_flight = sum(lane.max_window for lane in lanes.lanes) + 4
        wanted = self.request.max_in_flight_bytes or STAGING
        slots = max(2, min(in_flight, staging_budget(wanted) // longest))
        return Arena(slots, longest, self._slots_of)

    def _slots_of(self, nbytes: int) -> Buffer:
        return HostBuffer(nbytes)

    def _landing(self, run: Run) -> Landing:
        """Where a run's output is."""
        landings = self.target.landings
        assert landings is not None
        return landings[run.output]

    def _task(self, number: int, run: Run) -> Task:
        checks = run.leaves is not None and self.request.verify != "none"
        finish = checks or self._staged(run) or not self._forgets

        def on_bytes(_: Task, view: memoryview) -> None:
            self._land(number, run, view)

        if self._staged(run):
            return Task(
                run.places,
                run.offset,
                run.length,
                object_size=run.object_size,
                on_bytes=on_bytes if finish else None,
                at_once=self._computes,
            )
        assert run.dest is not None
        landing = self._landing(run)
        return Task(
            run.places,
            run.offset,
            run.length,
            object_size=run.object_size,
            buffer=landing.buffer,
            buffer_offset=landing.data_start + run.dest,
            on_bytes=on_bytes if finish else None,
            at_once=self._computes,
        )

    @property
    def _computes(self) -> bool:
        """Whether `_land` waits for nothing."""
        return True

    @property
    def _forgets(self) -> bool:
        return self.target.name in {"none", "memory"}

    def _land(self, number: int, run: Run, view: memoryview) -> None:
        """Verify what arrived, put it where it belongs, note it. On a finisher thread."""
        self._verify(run, view)
        if self.data and run.dest is None:
            with self.clock.timed("copy"):
                scatter(view, run.pieces, self.data)
        if not self._forgets:
            self.target.record(number, checksum_of(view))

    def _verify(self, run: Run, view: memoryview) -> None:
        if run.leaves is None or self.request.verify == "none":
            return
        with self.clock.timed("verify"):
            try:
                verify_leaves(view, run.leaves.start, run.leaves.table)
                if self.request.verify == "full" and run.leaves.digest:
                    check_digest(run, view)
                    self.digested_bytes += run.length
            except KvctlError as error:
                error.details.setdefault("key", run.places[0].key)
                error.what = f"{run.places[0].key}: {error.what}"
                raise
        self.verified_bytes += run.length

    def _still_to_do(self) -> dict[int, Run]:
        """Runs that have not landed. What the journal names is compared with what the target holds: after a power
        loss a journal may be ahead of its data.
        """
        left: dict[int, Run] = {}
        scratch = bytearray()
        for number, run in enumerate(self.plan.runs):
            noted = self.target.landed(number)
            if noted is None or not self.data:
                left[number] = run
                continue
            if run.dest is not None:
                here = self.data[run.output][run.dest : run.dest + run.length]
            elif sum(piece.nbytes for piece in run.pieces) == run.length:
                if len(scratch) < run.length:
                    scratch = bytearray(run.length)
                here = memoryview(scratch)[: run.length]
                gather(self.data, run.pieces, here)
            else:
                left[number] = run
                continue
            if checksum_of(here) != noted:
                left[number] = run
        if len(left) < len(self.plan.runs):
            resumed = sum(run.length for number, run in enumerate(self.plan.runs) if number not in left)
            self.report.notes.append(f"resumed: {resumed} bytes had landed before")
            self.report.extra["resumed_bytes"] = resumed
        return left

    def _verification(self) -> Verification:
        total = sum(run.length for run in self.plan.runs)
        if self.request.verify == "none":
            return Verification("none", "--verify none")
        if not self.verified_bytes and total:
            return Verification("none", self.plan.unverified_because or "nothing had to be fetched")
        if self.request.verify == "full" and self.digested_bytes == self.verified_bytes:
            return Verification("full", "", self.verified_bytes)
        why = "parts of chunks were read: their digests need the whole chunk" if self.request.verify == "full" else ""
        return Verification("leaves", why, self.verified_bytes)


def check_digest(run: Run, view: memoryview) -> None:
    """Raises IntegrityError when a whole chunk's bytes do not have its digest."""
    assert run.leaves is not None
    got = digest_of(view)
    if got != run.leaves.digest:
        raise IntegrityError("a chunk's digest is wrong", cause=f"BLAKE3 {got}, expected {run.leaves.digest}")
