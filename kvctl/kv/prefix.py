"""The stored prefix of any transcript, whoever pushed it: found by the index, or in a session that is named, and pulled
into a sink, all of it or only from some token on (an engine has the rest already).

What the index finds belongs to sessions that are not named here, so it is read without a lease: gc's grace period has
to outlast the pull, and what is gone is a shorter prefix, never wrong bytes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Final

from kvctl.core.context import Context
from kvctl.core.errors import IntegrityError, NotFoundError
from kvctl.core.units import MIB
from kvctl.kv import sessions
from kvctl.kv.access import secret_of
from kvctl.kv.fetching import Fetch, choose_heads
from kvctl.kv.identity import Descriptor, check_compatible
from kvctl.kv.index import Finder, PackUse
from kvctl.kv.names import SessionName, parse_session
from kvctl.kv.reading import Resolver, StoredSession, Wish
from kvctl.kv.seams import KvSink, Layout, Slot, slot_of
from kvctl.kv.tokens import Extra, chain, token_bytes, token_hmac
from kvctl.kv.verdict import window_start
from kvctl.kv.writing import make_manifest
from kvctl.memory.arena import Arena
from kvctl.memory.budget import staging_budget
from kvctl.repo.repo import Repo
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, fill
from kvctl.transfer.tasks import RunStats, StageClock

STAGING: Final = 256 * MIB


@dataclass(frozen=True, slots=True)
class Prefix:
    """`tokens` of the transcript are stored and can be gone on from, because `reason`. `uses`: the packs that hold
    them, empty where a session was named: then it is `session`, with its generation.
    """

    tokens: int
    reason: str
    uses: tuple[PackUse, ...] = ()
    session: str = ""
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """Whose KV, of which tokens. `tenant`: under whose secret keys are made; `key`: the repo's master secret."""

    descriptor: Descriptor
    tokens: array[int]
    tenant: str
    key: bytes | None = None
    extras: tuple[Extra, ...] = ()


def find_prefix(repo: Repo, want: Want, ctx: Context, *, session: str | None = None, above: int = 0) -> Prefix:
    """The longest stored prefix: the index's, or that of `session` (TENANT/NAME[@GENERATION]) where it goes farther.
    `above`: the caller has so many tokens; a session is not looked at when the index cannot be beaten by it. Raises
    IncompatibleError when the session is of another run, what reading the repo raises; a session that is not there is
    no error.
    """
    secret = secret_of(repo, want.key, want.tenant)
    descriptor = want.descriptor
    blocks = chain(secret, descriptor.digest, want.tokens, descriptor.block_tokens, want.extras)
    stored = Finder(repo, secret, blocks, token_bytes(want.tokens), descriptor).find()
    tokens, uses = usable(descriptor, stored.tokens, stored.uses(descriptor))
    reason = "all that are wanted are stored" if tokens == len(want.tokens) else f"{tokens:,} tokens of it are stored"
    found = Prefix(tokens, reason, tuple(uses), "", stored.requests)
    if session is None or tokens >= len(want.tokens):
        return found
    try:
        opened = StoredSession.open(repo, parse_session(session), ctx)
    except NotFoundError:
        return found
    with opened:
        check_compatible(descriptor, opened.descriptor, f"the KV of {session}")
        limit = Resolver(opened, Wish(want.tokens, want.extras, None, want.key), session).resolve()
        if limit.tokens > max(tokens, above):
            return Prefix(limit.tokens, limit.reason, (), str(opened.found), stored.requests + opened.requests)
    return found


def usable(descriptor: Descriptor, tokens: int, uses: Sequence[PackUse]) -> tuple[int, list[PackUse]]:
    """How many of the `tokens` that the full groups have every group allows to go on from, and which packs it takes.
    Of sliding groups the whole window must be there, of recurrent ones the state after exactly the last token. Pure.
    """
    ends = {tokens}
    for use in uses:
        group = descriptor.groups[use.group]
        if group.recurrent:
            ends.add(use.end)
        elif group.kind == "sliding":
            ends.add(min(use.end, tokens) // descriptor.block_tokens * descriptor.block_tokens)
    for end in sorted((end for end in ends if 0 < end <= tokens), reverse=True):
        covers = [_cover(descriptor, number, end, uses) for number in range(len(descriptor.groups))]
        if all(cover is not None for cover in covers):
            return end, sorted(use for cover in covers for use in cover or ())
    return 0, []


def _cover(descriptor: Descriptor, group: int, end: int, uses: Iterable[PackUse]) -> list[PackUse] | None:
    """Packs of a group that hold what is needed to go on after `end` tokens; None where some is missing."""
    own = sorted(use for use in uses if use.group == group and use.first < end)
    if descriptor.groups[group].recurrent:
        return [use for use in own if use.end == end][:1] or None
    at = window_start(descriptor.groups[group], end)
    found: list[PackUse] = []
    while at < end:
        fitting = [use for use in own if use.first <= at < use.end]
        if not fitting:
            return None
        found.append(max(fitting, key=lambda use: use.end))
        at = found[-1].end
    return found


def pull_prefix(
    repo: Repo,
    want: Want,
    found: Prefix,
    sink: KvSink,
    ctx: Context,
    *,
    start: int = 0,
    rank: tuple[int, int] = (0, 1),
    early: bool = False,
    batch: int = STAGING,
) -> tuple[Report, int]:
    """Fill the sink with tokens [start, found.tokens) of every group (of sliding ones, as far as the window goes), some
    layers after the other: `prepare` is called for each batch of layers, of at most `batch` bytes where a layer is not
    larger, and `layer_ready` for each of its layers once it is verified, before the next batch is prepared; with
    `early` as soon as that layer is there. Returns the report and how many tokens, counted from 0, are there and
    verified. Fewer than were found: some were missing or damaged, and the sink was told. `rank`: (rank, ranks). Raises
    what reading the repo raises, after telling the sink that nothing is valid.
    """
    watch = Stopwatch()
    report = Report("kv pull", target="engine")
    with open_prefix(repo, want, found, ctx, start=start) as session:
        report.source = f"{found.session or 'the index'} in repo {repo.id[:8]}"
        report.extra["leased"] = session.hold is not None
        pulling = _PrefixPull(want, session, sink, ctx, report, start, rank, early=early, batch=batch)
        try:
            tokens = pulling.run(watch, found)
        except BaseException:
            sink.invalid(0)
            raise
    if session.hold is not None:
        sessions.note_use(repo, session.found.session)
    watch.stop(report)
    return report, tokens


def open_prefix(repo: Repo, want: Want, found: Prefix, ctx: Context, *, start: int = 0) -> StoredSession:
    """What was found, as a session; of packs that the index names (from token `start` on) one without a lease. Raises
    what opening a session raises.
    """
    if found.session:
        return StoredSession.open(repo, parse_session(found.session), ctx)
    descriptor = want.descriptor
    secret = secret_of(repo, want.key, want.tenant)
    uses = [use for use in found.uses if use.end > start]
    name = SessionName(want.tenant, "found by the index")
    manifest = make_manifest(
        name, None, descriptor, found.tokens, token_hmac(secret, want.tokens[: found.tokens]), uses, [], None,
        producer={}, labels={}, codecs=(),
    )  # fmt: skip
    generation = sessions.Generation(name, 0, datetime.now(UTC))
    return StoredSession(repo, generation, manifest, descriptor, None, manifest.refs)


class _PrefixPull:
    def __init__(
        self,
        want: Want,
        session: StoredSession,
        sink: KvSink,
        ctx: Context,
        report: Report,
        start: int,
        rank: tuple[int, int],
        *,
        early: bool,
        batch: int,
    ) -> None:
        self.want, self.session, self.sink, self.ctx, self.report = want, session, sink, ctx, report
        self.start, self.rank, self.early, self.batch = start, rank, early, batch
        self.clock, self.stats = StageClock(), RunStats()
        self.workers = min(4, os.cpu_count() or 1)
        # damage shortens a prefix in place; where windows would begin elsewhere then, it ends it
        self.shrinks = all(group.window is None and not group.recurrent for group in session.descriptor.groups)

    def run(self, watch: Stopwatch, found: Prefix) -> int:
        wish = Wish(self.want.tokens[: found.tokens], self.want.extras, None, self.want.key)
        resolver = Resolver(self.session, wish, found.session or "the index")
        tokens = resolver.resolve().tokens
        if tokens < found.tokens:
            self.report.notes.extend(self.session.bad.values())
            tokens = self._shorter(tokens)
        watch.ready()
        lanes = open_lanes(self.session.repo.up)
        try:
            for layout in self._layouts(tokens):
                if tokens <= self.start:
                    break
                tokens = self._deliver(lanes, layout, tokens, resolver)
        finally:
            fill(self.report, self.stats, lanes, self.clock.busy(), self.workers, seconds=watch.since_ready)
            lanes.close()
        self.report.fetched, self.report.metadata_bytes = self.stats.bytes, self.session.header_bytes
        self.report.verified = Verification("leaves", "", self.stats.bytes)
        self.sink.done(tokens)
        return tokens

    def _deliver(self, lanes: LaneSet, layout: Layout, tokens: int, resolver: Resolver) -> int:
        """One batch of layers. Returns how many tokens are usable after it."""
        ready = self.sink.layer_ready if self.early else None
        fetch = Fetch(self.session, layout, self.sink.prepare(self.session.descriptor, layout), self.clock, ready)
        if tokens < layout.tokens:
            fetch.shrink(tokens)
        while True:
            try:
                self._fetch(lanes, fetch)
                break
            except (IntegrityError, NotFoundError) as error:
                bad = fetch.damaged()
                if not bad:
                    raise
                self.report.notes.append(str(error))
                self.session.bad.update(bad)
                tokens = self._shorter(resolver.resolve().tokens)
                self.sink.invalid(tokens)
                if tokens <= self.start:
                    return tokens
                fetch.shrink(tokens)
        self.report.bytes += layout.nbytes
        self.report.needed += fetch.needed
        self.report.objects = max(self.report.objects, fetch.packs)
        if ready is None:
            for layer in sorted({slot.layer for slot in layout.slots}):
                self.sink.layer_ready(layer)
        return tokens

    def _shorter(self, tokens: int) -> int:
        return tokens if self.shrinks else 0

    def _layouts(self, tokens: int) -> Iterator[Layout]:
        """The layers in batches."""
        descriptor = self.session.descriptor
        slots = sorted(
            (
                slot_of(
                    number, group, descriptor.dtype, layer, choose_heads(group, *self.rank),
                    tokens if group.recurrent else max(self.start, window_start(group, tokens)), tokens,
                )
                for number, group in enumerate(descriptor.groups)
                for layer in group.layers
            ),
            key=lambda slot: (slot.layer, slot.group),
        )  # fmt: skip
        some: list[Slot] = []
        size = 0
        for _, own in groupby(slots, key=lambda slot: slot.layer):
            layer = list(own)
            nbytes = sum(slot.k_bytes + slot.v_bytes for slot in layer)
            if some and size + nbytes > self.batch:
                yield Layout(tokens, tuple(some))
                some, size = [], 0
            some += layer
            size += nbytes
        if some:
            yield Layout(tokens, tuple(some))

    def _fetch(self, lanes: LaneSet, fetch: Fetch) -> None:
        tasks = fetch.tasks()
        if not tasks:
            return
        in_flight = sum(lane.max_window for lane in lanes.lanes) + 4
        longest = max(task.length for task in tasks)
        arena = Arena(max(2, min(in_flight, len(tasks), staging_budget(STAGING) // longest)), longest)
        executor = Executor(lanes.lanes, self.ctx, arena=arena, finishers=self.workers)
        try:
            executor.run(tasks)
        finally:
            self.stats.add(executor.stats)
            arena.close()
