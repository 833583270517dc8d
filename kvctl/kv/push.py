"""`kv push`: find what is stored of these tokens already, write only the blocks that are missing, commit a generation.

Order: packs, then index nodes, then the manifest. Interrupted anywhere, no generation is visible, and running it
again writes only what is missing. Packs are encoded and written in batches, so memory is bounded whatever the session
measures; raw KV is hashed and written where the source has it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import InterruptedRunError, UsageError
from kvctl.kv import sessions
from kvctl.kv.access import adopt_key, write_descriptor
from kvctl.kv.codecs import check_codec
from kvctl.kv.cutting import Cut, GroupPlan, pack_target, plan_group
from kvctl.kv.encoding import encode_cut
from kvctl.kv.geometry import block_bytes
from kvctl.kv.identity import Descriptor
from kvctl.kv.index import Finder, PackUse, Stored, full_groups, make_nodes, write_nodes
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.names import SessionName, parse_session
from kvctl.kv.seams import CheckedSource, KvSource
from kvctl.kv.tokens import BlockKey, chain, token_bytes, token_hmac
from kvctl.kv.writing import ChunkWriter, make_manifest
from kvctl.repo.chunks import ChunkRef, digest_of, digest_of_parts
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transfer.lanes import LaneSet, open_lanes
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import StageClock

BATCH: Final = 128 << 20  # payload bytes of packs that are written together, and of those encoded meanwhile
FEW: Final = 32  # packs per batch: each is looked up by a request of its own


@dataclass(frozen=True, slots=True)
class PushSession:
    """`address`: TENANT/NAME. `key`: the repo's master secret, None without one. `with_tokens`: store the token ids
    too. `expires`: seconds from now after which policies may evict the generation. `pack_bytes`: payload that a pack
    should have (None: a quarter of the session, but 16 to 64 MiB). `transport`, `transport_options`: as `open_lanes`.
    """

    repo: tuple[StoreConfig, ...]
    address: str
    source: KvSource
    key: bytes | None = None
    with_tokens: bool = False
    codec: str = "none"
    labels: Mapping[str, str] = field(default_factory=dict)
    expires: float | None = None
    pack_bytes: int | None = None
    transport: str = "auto"
    transport_options: Mapping[str, str] = field(default_factory=dict)
    max_in_flight_bytes: int | None = None
    max_rate: int | None = None


def push_session(request: PushSession, ctx: Context) -> Report:
    """Raises before anything is written when the source, the codec or the repo is not right. The generation is in
    `extra`, with blocks_written, blocks_shared, packs_written and index_requests.
    """
    watch = Stopwatch()
    session = named(request.address)
    check_codec(request.codec, request.source.descriptor.dtype)
    if not len(request.source.tokens):
        raise UsageError(f"{session}: a session of no tokens cannot be stored")
    report = Report("kv push")
    with Repo.open(request.repo, ctx) as repo, closing(_lanes(repo, request)) as lanes:
        report.target = f"{session} in repo {repo.id[:8]}"
        secret = adopt_key(repo, request.key, session.tenant)
        generations = sessions.list_generations(repo, session.prefix)
        parent = generations[-1].generation if generations else None
        with Push.begin(repo, f"kv push {session}", ctx) as push:
            pushing = _Pushing(request, session, repo, lanes, push, secret, parent, report, ctx)
            try:
                pushing.run(watch)
            except InterruptedRunError as stop:
                stop.hint = stop.hint or "run the same command again: what is stored already is not written again"
                raise
            finally:
                pushing.close()
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return report


def _lanes(repo: Repo, request: PushSession) -> LaneSet:
    # Through the page cache, unless `direct` is asked for: what is pushed is often pulled soon, and what large writes
    # leave in the cache is read a fifth faster than what reading brings there.
    return open_lanes(
        repo.up, transport=request.transport, options=request.transport_options, max_rate=request.max_rate
    )


def named(address: str) -> SessionName:
    """The session of TENANT/NAME. Raises UsageError, also when a generation is named: kvctl numbers them."""
    parsed = parse_session(address)
    if parsed.generation is not None:
        raise UsageError(f"{address!r}: a push makes the next generation", hint=f"write {parsed.session}")
    return parsed.session


@dataclass(frozen=True, slots=True)
class _Made:
    """A pack: its bytes in turn, most of them the source's own memory."""

    digest: str
    parts: Sequence[memoryview]
    header: int


class _Pushing:
    def __init__(
        self,
        request: PushSession,
        session: SessionName,
        repo: Repo,
        lanes: LaneSet,
        push: Push,
        secret: bytes,
        parent: int | None,
        report: Report,
        ctx: Context,
    ) -> None:
        self.request = request
        self.session = session
        self.repo = repo
        self.lanes = lanes
        self.push = push
        self.secret = secret
        self.parent = parent
        self.report = report
        self.ctx = ctx
        self.descriptor: Descriptor = request.source.descriptor
        self.tokens: array[int] = request.source.tokens
        self.flat = token_bytes(self.tokens)
        self.total = len(self.tokens)
        self.blocks: list[BlockKey] = []
        self.clock = StageClock()
        self.workers = min(4, os.cpu_count() or 1)
        self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="kvctl-pack")
        self.writer = ChunkWriter(push, self.lanes, ctx, budget=request.max_in_flight_bytes, max_rate=request.max_rate)
        self.packs_written = 0

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.lanes.close()  # before the buffer that it may still read from
        self.writer.close()

    def run(self, watch: Stopwatch) -> None:
        descriptor, report = self.descriptor, self.report
        with self.clock.timed("keys"):
            self.blocks = chain(
                self.secret, descriptor.digest, self.tokens, descriptor.block_tokens, self.request.source.extras
            )
        stored, uses = self._stored()
        plans = self._plans(stored, uses)
        cuts = [cut for plan in plans for cut in plan.cuts]
        payload = {id(cut): self._payload(cut) for cut in cuts}
        watch.ready()
        if self._same_as_parent(plans, cuts):
            return
        self.ctx.progress.begin("pushing", sum(payload.values()))
        try:
            fresh = self._write_all(self._batches(cuts, payload))
            tokens_ref = self._write_tokens()
        finally:
            self.ctx.progress.end()
        rows = sorted([use for plan in plans for use in plan.shared] + fresh)
        if isinstance(self.request.source, CheckedSource):
            self.request.source.check()
        write_descriptor(self.repo, descriptor)
        nodes = make_nodes(self.secret, self.blocks, self.flat, rows, descriptor)
        new_nodes = [node for node in nodes if node.tokens not in {known.tokens for known in stored.nodes}]
        nodes_written = write_nodes(self.repo, descriptor.digest, new_nodes, self._whole)
        manifest = self._manifest(rows, [node.key for node in nodes], tokens_ref)
        size = 0

        def document(generation: int) -> bytes:
            nonlocal size
            data = replace(manifest, generation=generation).to_bytes()
            size = len(data)
            return data

        generation = sessions.commit_generation(self.push, self.repo, self.session, document)
        if self.request.expires is not None:
            when = sessions.now(self.repo) + timedelta(seconds=self.request.expires)
            sessions.set_expiry(self.repo, self.session, generation, when)
        fill(report, self.writer.stats, self.lanes, self.clock.busy(), self.workers, seconds=watch.since_ready)
        shared = [use for plan in plans for use in plan.shared]
        report.target = f"{self.session}@{generation} in repo {self.repo.id[:8]}"
        report.bytes = report.needed = report.fetched = sum(payload.values())
        report.written = self.writer.written
        report.objects = self.packs_written
        report.metadata_bytes = size
        report.verified = Verification(
            "full", "every pack's digest was computed from the bytes written", self.writer.written
        )
        report.extra |= {
            "session": str(self.session),
            "generation": generation,
            "parent": self.parent,
            "new_generation": True,
            "ns": descriptor.digest,
            "tokens": self.total,
            "tokens_shared": stored.tokens,
            "blocks_written": sum(-(-(cut.end - cut.begin) // descriptor.block_tokens) for cut in cuts),
            "blocks_shared": sum(use.blocks for use in shared),
            "packs_written": self.packs_written,
            "packs_shared": len(shared),
            "index_requests": stored.requests,
            "nodes_written": nodes_written,
            "manifest_bytes": size,
            "objects_of_session": len(manifest.chunks) + len(nodes) + 1,
        }

    # -- what is there -------------------------------------------------------------------------------------

    def _stored(self) -> tuple[Stored, list[PackUse]]:
        """The longest stored prefix whose packs can be relied on, and its packs (declared: gc leaves them alone)."""
        finder = Finder(self.repo, self.secret, self.blocks, self.flat, self.descriptor)
        needed = set(full_groups(self.descriptor))
        asked: set[str] = set()
        good: set[str] = set()
        while True:
            found = finder.find()
            uses = found.uses(self.descriptor)
            good |= self.push.adopt(use.chunk for use in uses if use.chunk.name not in asked)
            asked.update(use.chunk.name for use in uses)
            gone = [
                node
                for node in found.nodes
                if any(use.group in needed and use.chunk.name not in good for use in node.packs)
            ]
            if not gone:
                self.report.notes.extend(found.problems)
                return found, [use for use in uses if use.chunk.name in good]
            for node in gone:
                self.report.notes.append(f"packs of the index at token {node.tokens} are gone: written again")
                finder.drop(node)

    def _whole(self, refs: Sequence[ChunkRef]) -> bool:
        return self.push.adopt(refs) == {ref.name for ref in refs}

    def _plans(self, stored: Stored, uses: Sequence[PackUse]) -> list[GroupPlan]:
        descriptor, source = self.descriptor, self.request.source
        target = pack_target(descriptor, self.total, self.request.pack_bytes)
        plans: list[GroupPlan] = []
        for number, group in enumerate(descriptor.groups):
            held = max(source.layer(number, layer).start for layer in group.layers)
            start = 0 if group.recurrent else held
            if start and group.kind != "sliding":
                raise UsageError(
                    f"{self.session}: a {group.kind} group must hold every token", cause=f"it begins at token {start}"
                )
            if start and group.window is not None and self.total - start < min(self.total, group.window - 1):
                raise UsageError(
                    f"{self.session}: a sliding group holds too few tokens to go on from",
                    cause=f"it holds {self.total - start}, its window needs {min(self.total, group.window - 1)}",
                )
            plans.append(plan_group(descriptor, number, start, self.total, stored.tokens, uses, target))
        return plans

    def _same_as_parent(self, plans: Sequence[GroupPlan], cuts: Sequence[Cut]) -> bool:
        """Whether the latest generation holds exactly this: then it is not pushed a second time."""
        if self.parent is None or cuts:
            return False
        known = sessions.read_session(self.repo, self.session.key(self.parent))
        rows = {(row.group, known.chunks[row.chunk][0], row.tokens) for row in known.packs}
        ours = {(use.group, use.chunk.name, use.count) for plan in plans for use in plan.shared}
        tokens = token_hmac(self.secret, self.tokens).hex()
        if (known.ns, known.token_hmac) != (self.descriptor.digest, tokens) or rows != ours:
            return False
        if dict(known.labels) != dict(self.request.labels) or (known.tokens_chunk is None) == self.request.with_tokens:
            return False
        self.report.notes.append(f"generation {self.parent} holds exactly this already")
        self.report.target = f"{self.session}@{self.parent} in repo {self.repo.id[:8]}"
        self.report.verified = Verification("none", "nothing was written")
        self.report.extra |= {
            "session": str(self.session),
            "generation": self.parent,
            "parent": known.parent,
            "new_generation": False,
            "tokens": self.total,
            "tokens_shared": self.total,
            "blocks_written": 0,
            "blocks_shared": sum(use.blocks for plan in plans for use in plan.shared),
            "packs_written": 0,
        }
        return True

    # -- writing -------------------------------------------------------------------------------------------

    def _payload(self, cut: Cut) -> int:
        size = self.descriptor.block_tokens
        group = self.descriptor.groups[cut.group]
        blocks = 1 if group.recurrent else -(-(cut.end - cut.begin) // size)
        return blocks * block_bytes(group, self.descriptor.dtype, size)

    def _batches(self, cuts: Sequence[Cut], payload: Mapping[int, int]) -> Iterator[list[Cut]]:
        batch: list[Cut] = []
        size = 0
        for cut in cuts:
            if batch and (size + payload[id(cut)] > BATCH or len(batch) == FEW):
                yield batch
                batch, size = [], 0
            batch.append(cut)
            size += payload[id(cut)]
        if batch:
            yield batch

    def _blocks_of(self, cut: Cut) -> list[BlockKey]:
        size = self.descriptor.block_tokens
        if self.descriptor.groups[cut.group].recurrent:
            return self.blocks[-1:]
        return self.blocks[cut.begin // size : -(-cut.end // size)]

    def _write_all(self, batches: Iterable[Sequence[Cut]]) -> list[PackUse]:
        """Write the packs of all batches: while one is written, the next is encoded."""
        uses: list[PackUse] = []
        ahead: tuple[Sequence[Cut], Sequence[Future[_Made]]] = ((), ())
        for cuts in batches:
            self.ctx.cancel.check("pushing")
            following = (cuts, [self.pool.submit(self._encode, cut) for cut in cuts])
            uses += self._write(*ahead)
            ahead = following
        return uses + self._write(*ahead)

    def _encode(self, cut: Cut) -> _Made:
        with self.clock.timed("encode"):
            parts, header = encode_cut(
                self.descriptor, cut, self._blocks_of(cut), self.request.source, self.request.codec
            )
        with self.clock.timed("digest"):
            return _Made(digest_of_parts(parts), parts, header)

    def _write(self, cuts: Sequence[Cut], making: Sequence[Future[_Made]]) -> list[PackUse]:
        if not cuts:
            return []
        packs = [pack.result() for pack in making]
        before = self.writer.chunks
        refs = self.writer.store({made.digest: made.parts for made in packs})
        self.packs_written += self.writer.chunks - before
        self.ctx.progress.advance(sum(self._payload(cut) for cut in cuts))
        uses = []
        for cut, made in zip(cuts, packs, strict=True):
            blocks = len(self._blocks_of(cut))
            chunk = refs[made.digest]
            uses.append(PackUse(cut.group, cut.first, cut.end - cut.first, blocks, blocks, made.header, chunk))
        return uses

    def _write_tokens(self) -> ChunkRef | None:
        if not self.request.with_tokens:
            return None
        digest = digest_of(self.flat)
        return self.writer.store({digest: (self.flat,)})[digest]

    def _manifest(
        self, rows: Sequence[PackUse], index: Sequence[bytes], tokens_ref: ChunkRef | None
    ) -> SessionManifest:
        return make_manifest(
            self.session, self.parent, self.descriptor, self.total, token_hmac(self.secret, self.tokens), rows,
            index, tokens_ref, producer=self.request.source.producer, labels=self.request.labels,
            codecs=self._codecs(rows),
        )  # fmt: skip

    def _codecs(self, rows: Sequence[PackUse]) -> tuple[str, ...]:
        """What the session's packs use: those of the sessions it shares with count too."""
        found = {self.request.codec}
        if self.parent is not None and any(True for _ in rows):
            found.update(sessions.read_session(self.repo, self.session.key(self.parent)).codecs)
        return tuple(sorted(found))
