"""Loading: plan, move, verify, hand over. The use case behind `kvctl load-weights` and `kvctl.load_weights`.

`plan_load` reads headers only; `run_load` moves the bytes. The loader knows runs and targets, not formats: sources
turn themselves into runs (`kvctl.weights.planning`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvctl.core.context import Context
from kvctl.core.errors import (
    ConfigError,
    EnvError,
    IntegrityError,
    InterruptedRunError,
    KvctlError,
    NotFoundError,
    TransientError,
    UsageError,
)
from kvctl.core.units import MIB
from kvctl.memory.arena import Arena
from kvctl.memory.budget import staging_budget
from kvctl.memory.buffers import HostBuffer, address_of
from kvctl.repo.chunks import digest_of, verify_leaves
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import StageClock, Task
from kvctl.transports.registry import choose
from kvctl.weights.digesting import check_digests, check_landed, hash_source
from kvctl.weights.digests import DigestsFile, parse_digests
from kvctl.weights.from_files import PlainModel
from kvctl.weights.from_repo import RepoModel
from kvctl.weights.ondevice import DeviceTarget, direct_or_not, on_device, releasing
from kvctl.weights.planning import LoadPlan, Opened, open_weights
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import Run, gather, scatter
from kvctl.weights.targets import Landing, Target, checksum_of, make_target, opened

STAGING: Final = 256 * MIB
DEVICE_WAITERS: Final = 2


def plan_load(request: LoadRequest, ctx: Context) -> LoadPlan:
    """What a load would do, from headers alone. Raises every error that the source's headers give."""
    with open_weights(request, ctx) as source:
        return source.plan()


def run_load(request: LoadRequest, ctx: Context) -> Report:
    """Load into `request.into`. The report says what moved and what was verified; raises before any byte lands
    when the source is not right.
    """
    report, _ = load_into(request, make_target(request.into), ctx)
    return report


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load into memory gives: the plan (names and places of tensors) and the memory, now the caller's."""

    plan: LoadPlan
    landings: Sequence[Landing]


def load_into(request: LoadRequest, target: Target, ctx: Context) -> tuple[Report, Loaded | None]:
    """Load into a target; the second value is set when it keeps memory of this process."""
    watch = Stopwatch()
    target = on_device(target, request)
    with releasing(target):
        return _load_into(request, target, ctx, watch)


def _load_into(request: LoadRequest, target: Target, ctx: Context, watch: Stopwatch) -> tuple[Report, Loaded | None]:
    report = Report("load-weights", source=request.address, target=target.name)
    with open_weights(request, ctx) as source:
        plan = source.plan()
        report.metadata_bytes, report.requests = plan.metadata_bytes, plan.metadata_requests
        report.retries = source.retries
        report.tensors, report.tp, report.objects = len(plan.tensors), plan.tp_report(), plan.objects
        report.notes.extend(plan.notes)
        required = _required(request, plan)
        if required is not None and isinstance(source, RepoModel):
            check_digests(source.digests(), required, plan.source)
        with opened(target):
            if target.open(plan.outputs, plan.side_files, plan.fingerprint):
                report.notes.append(f"{target.name} holds exactly this already: nothing was fetched")
                report.verified = Verification("none", "what was there was compared by size only")
                watch.ready()
                watch.stop(report)
                return report, None
            device = isinstance(target, DeviceTarget)
            if required is not None and target.landings is None and isinstance(source, PlainModel) and not device:
                _verify_stream(source, required, report, watch, ctx)
                return report, None
            try:
                _move(request, source, plan, target, report, ctx, watch)
            except NotFoundError:
                if not source.moved():
                    raise
                # a rebalance or drain took chunks elsewhere since the plan was made; what landed stays
                report.notes.append("the repo's members changed while loading: the rest was looked up again")
                plan = source.plan()
                _move(request, source, plan, target, report, ctx, watch)
            if required is not None:
                if isinstance(target, DeviceTarget):
                    checked = check_landed(plan.tensors, tuple(target.placed), required, plan.source, target.look)
                    report.verified = Verification("full", f"read back from {target.name}", checked)
                elif target.landings is not None:
                    checked = check_landed(plan.tensors, tuple(target.landings), required, plan.source)
                    report.verified = Verification("full", "", checked)
            target.publish()
            landings = target.landings
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return report, (Loaded(plan, landings) if landings is not None else None)


def _move(
    request: LoadRequest, source: Opened, plan: LoadPlan, target: Target, report: Report, ctx: Context, watch: Stopwatch
) -> None:
    loading = _Loading(request, source, plan, target, report, ctx)
    try:
        loading.move(watch)
    finally:
        loading.release()


def _required(request: LoadRequest, plan: LoadPlan) -> DigestsFile | None:
    """The digests file that the load must match. Raises UsageError, ConfigError, FormatError."""
    if request.digests is None:
        return None
    if plan.tp:
        raise UsageError(
            "digests cover whole tensors, and this load takes slices of them",
            hint="verify the whole model, or push it to a repo: its slices are verified by leaves",
        )
    try:
        with open(request.digests, "rb") as file:
            return parse_digests(file.read(), request.digests)
    except OSError as error:
        raise ConfigError(f"cannot read the digests file {request.digests}", cause=error.strerror) from error


def _verify_stream(source: PlainModel, required: DigestsFile, report: Report, watch: Stopwatch, ctx: Context) -> None:
    """Nothing is kept, so the tensors are hashed in order as they stream by."""
    lanes = open_lanes(
        source.members, transport=source.request.transport, options=source.request.transport_options, trace=ctx.trace
    )
    clock = StageClock()
    watch.ready()
    ctx.progress.begin("loading", source.source.data_bytes)
    try:
        found = hash_source(source.source, lanes, report, clock, ctx)
    finally:
        ctx.progress.end()
        lanes.close()
    check_digests(found, required, source.request.address)
    total = source.source.data_bytes
    report.bytes = report.needed = total
    report.verified = Verification("full", "", total)
    report.transport, report.paths = lanes.report(), [lane.report() for lane in lanes.lanes]
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)


class _Loading:
    """One run of the executor over a plan's runs."""

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
        self.device = target if isinstance(target, DeviceTarget) else None
        self.direct = False  # transports write into the device's own memory
        self.staging: Arena | None = None
        self.data = [landing.buffer.view[landing.data_start :] for landing in target.landings or ()]
        self.verified_bytes = 0
        self.digested_bytes = 0

    def move(self, watch: Stopwatch) -> None:
        """Move everything; with `fallback` over the next transport when one fails, and the report says so."""
        failed: dict[str, str] = {}
        while True:
            name = "auto" if failed else self.request.transport
            lanes = open_lanes(
                self.source.members,
                memory_kind=self._memory_kind(name, failed),
                transport=name,
                options={} if failed else self.request.transport_options,
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

    def _memory_kind(self, transport: str, failed: Mapping[str, str]) -> str:
        """What the transports land in: host memory, a device's staging slots, or its own memory where one can."""
        if self.device is None:
            return "host"
        device = self.device
        schemes = [member.config.scheme for member in self.source.members]
        self.direct, why = direct_or_not(device.memory_kind, schemes, self.plan.runs, transport, failed)
        if self.direct:
            return device.memory_kind
        self.report.notes.append(f"{device.name} is reached through {device.staging_kind} staging slots: {why}")
        return device.staging_kind

    def _another(self, lanes: LaneSet, failed: Mapping[str, str]) -> bool:
        kind = "host" if self.device is None else self.device.staging_kind
        try:
            for member in self.source.members:
                choose(member.config.scheme, kind, failed=failed)
        except EnvError:
            return False
        return bool(lanes.choices)

    def _attempt(self, lanes: LaneSet, watch: Stopwatch) -> None:
        report, plan = self.report, self.plan
        # those that wait for a device's copies keep no CPU busy
        workers = min(4, os.cpu_count() or 1) + (DEVICE_WAITERS if self.device is not None else 0)
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
                # a hedge's copy is made by the CPU, which does not reach into a device
                hedge=self.request.hedge and not self.direct,
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
        if self.device is not None:
            report.extra["device"] = self._device_report(arena)
        report.verified = self._verification()

    def release(self) -> None:
        """Views of the target's memory end before the target closes it."""
        for view in self.data:
            view.release()

    @property
    def _keeps(self) -> bool:
        """Whether bytes land anywhere."""
        return self.device is not None or self.target.landings is not None

    def _staged(self, run: Run) -> bool:
        if self.device is not None:
            return not self.direct
        return run.dest is None or self.target.landings is None

    def _arena(self, lanes: LaneSet, longest: int) -> Arena:
        in_flight = sum(lane.max_window for lane in lanes.lanes) + 4
        wanted = self.request.max_in_flight_bytes or STAGING
        slots = max(2, min(in_flight, staging_budget(wanted) // longest))
        return Arena(slots, longest, HostBuffer if self.device is None else self.device.devices[0].staging)

    def _device_report(self, arena: Arena | None) -> dict[str, object]:
        """How the device was reached: JSON."""
        assert self.device is not None
        device = self.device
        if arena is None:
            return {"name": device.name, "way": "transports wrote into its memory"}
        return {
            "name": device.name,
            "way": f"{device.staging_kind} slots",
            "slots": arena.slots,
            "slot_bytes": arena.slot_bytes,
        }

    def _task(self, number: int, run: Run) -> Task:
        landings = self.target.landings
        checks = run.leaves is not None and self.request.verify != "none"
        finish = checks or self._staged(run) or not self._forgets

        def on_bytes(_: Task, view: memoryview) -> None:
            self._land(number, run, view)

        if self._staged(run):
            return Task(
                run.places, run.offset, run.length, object_size=run.object_size, on_bytes=on_bytes if finish else None
            )
        assert run.dest is not None
        landing = self.device.placed[run.output] if self.device is not None else (landings or ())[run.output]
        return Task(
            run.places,
            run.offset,
            run.length,
            object_size=run.object_size,
            buffer=landing.buffer,
            buffer_offset=landing.data_start + run.dest,
            on_bytes=on_bytes if finish else None,
        )

    @property
    def _forgets(self) -> bool:
        return self.target.name in {"none", "memory"} or self.device is not None

    def _land(self, number: int, run: Run, view: memoryview) -> None:
        """Verify what arrived, put it where it belongs, note it. On a finisher thread."""
        if self.device is not None:
            self._land_on(self.device, run, view)
            return
        self._verify(run, view)
        if self.data and run.dest is None:
            with self.clock.timed("copy"):
                scatter(view, run.pieces, self.data)
        if not self._forgets:
            self.target.record(number, checksum_of(view))

    def _land_on(self, device: DeviceTarget, run: Run, view: memoryview) -> None:
        """From the slot that `view` is to the device; or, where it was written there, back for verification. The slot
        is used again when this returns: after the copies' events.
        """
        if self.direct:
            with self.clock.timed("read back"):
                held = device.read_back(run)
            try:
                self._verify(run, held.view)
            finally:
                held.close()
            return
        self._verify(run, view)
        assert self.staging is not None
        with self.clock.timed("copy"):
            device.copy(self.staging.buffer, address_of(view) - self.staging.buffer.address, run)

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
