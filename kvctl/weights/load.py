"""Loading: plan, move, verify, hand over. The use case behind `kvctl load-weights` and `kvctl.load_weights`.

`plan_load` reads headers only; `run_load` moves the bytes. The loader knows runs and targets, not formats: sources
turn themselves into runs (`kvctl.weights.planning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.core.context import Context
from kvctl.core.errors import ConfigError, NotFoundError, UsageError
from kvctl.transfer.lanes import open_lanes
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share
from kvctl.transfer.tasks import StageClock
from kvctl.weights.digesting import check_digests, check_landed, hash_source
from kvctl.weights.digests import DigestsFile, parse_digests
from kvctl.weights.from_files import PlainModel
from kvctl.weights.from_repo import RepoModel
from kvctl.weights.moving import Loading
from kvctl.weights.ondevice import DeviceLoading, DeviceTarget, on_device, releasing
from kvctl.weights.planning import LoadPlan, Opened, open_weights
from kvctl.weights.request import LoadRequest
from kvctl.weights.targets import Landing, Target, make_target, opened


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
                there = getattr(target, "address", "")
                if required is not None and there:
                    with PlainModel(LoadRequest(there), ctx) as kept:
                        _verify_stream(kept, required, report, watch, ctx)
                    return report, None
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
    kind: type[Loading] = DeviceLoading if isinstance(target, DeviceTarget) else Loading
    loading = kind(request, source, plan, target, report, ctx)
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
