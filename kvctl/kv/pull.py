"""`kv pull`: a verdict first, then exactly the ranges that the usable prefix needs, verified before hand-over.

Damage that shows only in transit makes the prefix shorter: each pack that fails is given up once, so a pull ends after
at most as many rounds as the session has packs. Nothing that was not verified is ever called done.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    IntegrityError,
    KvctlError,
    NotFoundError,
    PartialError,
    UsageError,
)
from kvctl.core.units import MIB
from kvctl.kv import sessions
from kvctl.kv.fetching import Fetch, choose_heads
from kvctl.kv.identity import Descriptor
from kvctl.kv.names import parse_session
from kvctl.kv.reading import UNLEASED, Resolver, StoredSession, Wish
from kvctl.kv.seams import KvSink, Layout, Slot, slot_of
from kvctl.kv.tokens import Extra
from kvctl.kv.verdict import Limit, Verdict, window_start
from kvctl.memory.arena import Arena
from kvctl.memory.budget import staging_budget
from kvctl.repo.repo import Repo
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import RunStats, StageClock

STAGING: Final = 256 * MIB
MODES: Final = ("prefix", "layers")


@dataclass(frozen=True, slots=True)
class PullSession:
    """`address`: TENANT/NAME[@GENERATION]. `tokens`: the caller's transcript, of which the longest stored prefix is
    pulled (None: all that is stored). `descriptor`: the caller's own; pulled KV must have been made by the same run.
    `layers`: only these. `tp_rank`: the rank whose heads are wanted, of `tp_size`. `mode`: 'prefix' or 'layers'.
    `transport`, `transport_options`: as `open_lanes`.
    """

    repo: tuple[StoreConfig, ...]
    address: str
    sink: KvSink | None = None
    key: bytes | None = None
    tokens: array[int] | None = None
    extras: tuple[Extra, ...] = ()
    descriptor: Descriptor | None = None
    tp_rank: int | None = None
    tp_size: int = 1
    layers: tuple[int, ...] | None = None
    min_tokens: int = 0
    strict: bool = False
    mode: str = "prefix"
    transport: str = "auto"
    transport_options: Mapping[str, str] = field(default_factory=dict)
    max_in_flight_bytes: int | None = None
    max_rate: int | None = None
    hedge: bool = True

    def wish(self) -> Wish:
        return Wish(self.tokens, self.extras, self.descriptor, self.key)


def resolve_session(request: PullSession, ctx: Context) -> Verdict:
    """What a pull would bring, before any KV is moved. A short prefix is no error here. Raises NotFoundError,
    IncompatibleError with every differing field, and what reading the repo raises.
    """
    with Repo.open(request.repo, ctx) as repo, _open(repo, request, ctx) as session:
        resolver = Resolver(session, request.wish(), request.address)
        limit = resolver.resolve()
        layout = make_layout(session.descriptor, limit.tokens, request)
        return resolver.verdict(limit, layout.nbytes)


def pull_session(request: PullSession, ctx: Context) -> Report:
    """Fill the sink with the usable prefix. A short prefix is success. Raises PartialError (3) when fewer than
    `min_tokens` are usable (nothing is delivered then), or when damage made the prefix shorter (what is left was
    delivered, its `usable_tokens` are in the details); with `strict` IntegrityError (7), and nothing is delivered.
    After any other error the sink was told that nothing is valid.
    """
    watch = Stopwatch()
    with Repo.open(request.repo, ctx) as repo:
        return pull_from(repo, request, ctx, watch=watch)


def pull_from(
    repo: Repo,
    request: PullSession,
    ctx: Context,
    *,
    watch: Stopwatch | None = None,
    first: Callable[[StoredSession], None] | None = None,
) -> Report:
    """`pull_session` from a repo that is open, which many pulls may share, at once too; the request's own is not looked
    at. `watch`: begun where the report's time begins (None: here). `first` sees the session before anything moves.
    """
    watch = watch or Stopwatch()
    if request.sink is None:
        raise UsageError("a pull needs somewhere to put the KV")
    if request.mode not in MODES:
        raise UsageError(f"{request.mode!r} is no way to deliver", hint=f"use {' or '.join(MODES)}")
    report = Report("kv pull")
    with closing(_lanes(repo, request)) as lanes, _open(repo, request, ctx) as session:
        report.source = f"{session.found} in repo {repo.id[:8]}"
        if session.hold is None:
            report.notes.append(UNLEASED)
        if first is not None:
            first(session)
        pulling = _Pulling(request, request.sink, session, lanes, report, ctx)
        try:
            limit = pulling.run(watch)
        except BaseException:
            request.sink.invalid(0)
            raise
        if session.hold is not None:
            sessions.note_use(repo, session.found.session)
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    if limit.damaged:
        raise _partial(pulling.verdict, report)
    return report


def _lanes(repo: Repo, request: PullSession) -> LaneSet:
    return open_lanes(
        repo.up, transport=request.transport, options=request.transport_options, max_rate=request.max_rate
    )


def _open(repo: Repo, request: PullSession, ctx: Context) -> StoredSession:
    return StoredSession.open(repo, parse_session(request.address), ctx)


def _partial(verdict: Verdict, report: Report | None, *, strict: bool = False) -> KvctlError:
    kind = IntegrityError if strict else PartialError
    return kind(
        f"only {verdict.usable:,} of {verdict.wanted:,} tokens of {verdict.session}@{verdict.generation} are usable",
        cause=verdict.reason,
        hint="`kvctl repo check` lists what is damaged; the rest is to be computed again",
        details={
            "usable_tokens": verdict.usable,
            "verdict": verdict.to_json(),
            "delivered": report is not None,
            **({"report": report.to_json()} if report is not None else {}),
        },
    )


def make_layout(descriptor: Descriptor, tokens: int, request: PullSession) -> Layout:
    """The sink's slots for a prefix. Raises UsageError for layers or ranks that do not exist, IncompatibleError for
    heads that do not divide.
    """
    if request.tp_size < 1 or (request.tp_rank is None and request.tp_size != 1):
        raise UsageError(f"tp_size {request.tp_size} needs a tp_rank", hint=f"0 to {request.tp_size - 1}")
    if request.tp_rank is not None and not 0 <= request.tp_rank < request.tp_size:
        raise UsageError(f"there is no rank {request.tp_rank} of {request.tp_size}")
    wanted = None if request.layers is None else set(request.layers)
    slots: list[Slot] = []
    for number, group in enumerate(descriptor.groups):
        heads = choose_heads(group, request.tp_rank or 0, request.tp_size)
        start = window_start(group, tokens)
        slots += [
            slot_of(number, group, descriptor.dtype, layer, heads, start, tokens)
            for layer in group.layers
            if wanted is None or layer in wanted
        ]
    unknown = (wanted or set()) - {slot.layer for slot in slots}
    if unknown:
        raise UsageError(
            f"the session has no layer {min(unknown)}", cause=f"its layers are 0 to {descriptor.layers - 1}"
        )
    return Layout(tokens, tuple(sorted(slots, key=lambda slot: (slot.layer, slot.group))) if tokens else ())


class _Pulling:
    def __init__(
        self,
        request: PullSession,
        sink: KvSink,
        session: StoredSession,
        lanes: LaneSet,
        report: Report,
        ctx: Context,
    ) -> None:
        self.request = request
        self.sink = sink
        self.session = session
        self.lanes = lanes
        self.report = report
        self.ctx = ctx
        self.clock = StageClock()
        self.stats = RunStats()
        self.resolver = Resolver(session, request.wish(), request.address)
        self.verdict = Verdict("", 0, 0, 0, 0, "")
        self.workers = min(4, os.cpu_count() or 1)

    def run(self, watch: Stopwatch) -> Limit:
        limit = self.resolver.resolve()
        layout = make_layout(self.session.descriptor, limit.tokens, self.request)
        self._judge(limit, layout)
        self.ctx.progress.note(str(self.verdict))
        watch.ready()
        try:
            limit = self._deliver(limit, layout)
        finally:
            fill(self.report, self.stats, self.lanes, self.clock.busy(), self.workers, seconds=watch.since_ready)
            self.lanes.close()  # nothing moves any more when the sink is told what of it is valid
        self.report.metadata_bytes = self.session.header_bytes
        self.report.extra |= {
            "session": str(self.session.found.session),
            "generation": self.session.found.generation,
            "usable_tokens": limit.tokens,
            "verdict": self.verdict.to_json(),
            "header_requests": self.session.requests,
            "leased": self.session.hold is not None,
        }
        if self.request.tp_size > 1:
            self.report.tp = {"rank": self.request.tp_rank or 0, "size": self.request.tp_size}
        return limit

    def _judge(self, limit: Limit, layout: Layout) -> None:
        """Raises when what is usable is not enough."""
        self.verdict = self.resolver.verdict(limit, layout.nbytes)
        short = limit.tokens < self.request.min_tokens
        if short or (limit.damaged and self.request.strict):
            raise _partial(self.verdict, None, strict=self.request.strict)

    def _deliver(self, limit: Limit, layout: Layout) -> Limit:
        if not limit.tokens:
            self.sink.done(0)
            self.report.verified = Verification("none", "nothing was fetched")
            return limit
        descriptor = self.session.descriptor
        in_place = all(group.window is None and not group.recurrent for group in descriptor.groups)
        self.ctx.progress.begin("pulling", layout.nbytes)
        fetch: Fetch | None = None
        try:
            while True:
                if fetch is None:
                    views = self.sink.prepare(descriptor, layout)
                    ready = self.sink.layer_ready if self.request.mode == "layers" else None
                    fetch = Fetch(self.session, layout, views, self.clock, ready)
                try:
                    self._run(fetch)
                    break
                except (IntegrityError, NotFoundError) as error:
                    bad = fetch.damaged()
                    if not bad:
                        raise
                    self.report.notes.append(str(error))
                    self.session.bad.update(bad)
                    limit = self.resolver.resolve()
                    layout = make_layout(descriptor, limit.tokens, self.request)
                    self._judge(limit, layout)
                    self.ctx.progress.note(str(self.verdict))
                    self.sink.invalid(limit.tokens if in_place else 0)
                    if not limit.tokens:
                        break
                    if in_place:
                        fetch.shrink(limit.tokens)
                    elif self.request.mode == "layers":
                        raise _partial(self.verdict, None) from error  # layers with other windows were handed over
                    else:
                        fetch = None
        finally:
            self.ctx.progress.end()
        self.sink.done(limit.tokens)
        self._count(layout, fetch)
        return limit

    def _count(self, layout: Layout, fetch: Fetch | None) -> None:
        report = self.report
        report.bytes = layout.nbytes
        report.needed = 0 if fetch is None else fetch.needed
        report.fetched = self.stats.bytes
        report.objects = 0 if fetch is None else fetch.packs
        why = "" if fetch is not None else "nothing was fetched"
        report.verified = Verification("leaves" if fetch is not None else "none", why, self.stats.bytes)

    def _run(self, fetch: Fetch) -> None:
        tasks = fetch.tasks()
        if not tasks:
            return
        in_flight = sum(lane.max_window for lane in self.lanes.lanes) + 4
        longest = max(task.length for task in tasks)
        wanted = self.request.max_in_flight_bytes or STAGING
        arena = Arena(max(2, min(in_flight, len(tasks), staging_budget(wanted) // longest)), longest)
        executor = Executor(
            self.lanes.lanes,
            self.ctx,
            arena=arena,
            budget=self.request.max_in_flight_bytes,
            hedge=self.request.hedge,
            finishers=self.workers,
            max_rate=self.request.max_rate,
        )
        try:
            executor.run(tasks)
        finally:
            self.stats.add(executor.stats)
            arena.close()
