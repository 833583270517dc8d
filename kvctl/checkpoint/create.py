"""Writing a checkpoint: hash, share or write each file, then the digests, the manifest, LATEST, retention.

Nothing is visible as a checkpoint before its manifest. Where the files lie, and which are there already, is `folder`'s.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Final

import blake3

from kvctl.checkpoint import names
from kvctl.checkpoint.catalog import Catalog
from kvctl.checkpoint.direct import write_options
from kvctl.checkpoint.folder import Folder
from kvctl.checkpoint.gentle import gently
from kvctl.checkpoint.latency import Latencies
from kvctl.checkpoint.lock import Lock
from kvctl.checkpoint.names import Entry, Manifest
from kvctl.checkpoint.pace import Limits
from kvctl.checkpoint.pacing import BASELINE_SECONDS, Pacer, slower
from kvctl.checkpoint.shards import Shard, ShardSource, UpdatedError
from kvctl.checkpoint.shares import PIECE
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import ConflictError, InterruptedRunError, UsageError
from kvctl.memory.buffers import Buffer
from kvctl.repo.locking import LockingStore
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, Member, open_lanes, open_member
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import Place, RunStats, StageClock, Task
from kvctl.weights.digests import DigestsFile, TensorDigest, TensorHasher

RESTARTS: Final = 2
HOLD_SECONDS: Final = 600.0
_SINGLE_PUT: Final = 5 << 30  # S3's limit of one PUT


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """`to`: the store of URL/NAME. `keep_last`: checkpoints of that name that stay (None: all). `restarts`: how often
    an update of the weights makes it begin again, before updates are asked to wait for `hold_seconds` at most.
    """

    to: StoreConfig
    limits: Limits = field(default_factory=Limits)
    keep_last: int | None = None
    transport: str = "auto"
    transport_options: Mapping[str, str] = field(default_factory=dict)
    restarts: int = RESTARTS
    hold_seconds: float = HOLD_SECONDS
    baseline_seconds: float = BASELINE_SECONDS


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A shard in memory, hashed."""

    shard: Shard
    buffer: Buffer
    digests: list[TensorDigest]
    content: str


def create(source: ShardSource, request: CreateRequest, ctx: Context, *, latencies: Latencies | None = None) -> Report:
    """Write a checkpoint of `source`. Raises ConflictError while another one is written to the same name (6), or when
    updates come all the time; CapacityError, TransientError: run it again, it resumes. LATEST names a whole one always.
    One with a pace gives way to everything else on the processors too.
    """
    if request.limits.paced:
        return gently(lambda: _create(source, request, ctx, latencies))
    return _create(source, request, ctx, latencies)


def _create(source: ShardSource, request: CreateRequest, ctx: Context, latencies: Latencies | None) -> Report:
    watch = Stopwatch()
    if request.keep_last is not None and request.keep_last < 1:
        raise UsageError("--keep-last keeps at least one")
    member = open_member(request.to.url, 0, request.to, ctx)
    try:
        store = LockingStore(member.store)
        report = Report("checkpoint create", source=source.name, target=request.to.url)
        Catalog(store).check_ours()
        with Lock.take(store) as lock:
            writing = _Writing(source, request, member, store, lock, report, ctx, latencies)
            try:
                writing.run(watch)
            except InterruptedRunError as stop:
                stop.hint = stop.hint or "run the same command again: what is written already stays"
                raise
    finally:
        member.store.close()
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return report


class _Writing:
    def __init__(
        self, source: ShardSource, request: CreateRequest, member: Member, store: LockingStore, lock: Lock,
        report: Report, ctx: Context, latencies: Latencies | None,
    ) -> None:  # fmt: skip
        self.source = source
        self.request = request
        self.member = member
        self.store = store
        self.lock = lock
        self.report = report
        self.ctx = ctx
        self.catalog = Catalog(store)
        self.clock = StageClock()
        self.stats = RunStats()
        self.total = sum(shard.size for shard in source.shards)
        self.pacer = Pacer(
            request.limits, ctx, latencies, shares=source.shares, baseline_seconds=request.baseline_seconds
        )
        self.folder = Folder(store, self.catalog, source.name, source.shards, report.notes)
        self._source_cpu: float | None = None
        self.digests: list[TensorDigest] = []
        self.counts = {"written_bytes": 0, "shared_bytes": 0, "copied_bytes": 0, "resumed_bytes": 0, "restarts": 0}

    def run(self, watch: Stopwatch) -> None:
        self._check_sizes()
        self.folder.find()
        self._source_cpu = self.source.cpu_seconds()
        self.pacer.begin(self.total)
        asked = self.request.transport
        options, note = write_options((self.member.config,), asked, self.request.transport_options)
        if note:
            self.report.notes.append(note)
        lanes = open_lanes((self.member,), memory_kind="shared", transport=asked, options=options, trace=self.ctx.trace)
        for lane in lanes.lanes:
            lane.transport = self.pacer.paced(lane.transport)
        watch.ready()
        self.ctx.progress.begin("checkpointing", self.total)
        try:
            self._generation(lanes)
        finally:
            self.ctx.progress.end()
            self.pacer.close()
            lanes.close()
        manifest = self._commit()
        fill(self.report, self.stats, lanes, self.clock.busy(), 1, seconds=watch.since_ready)
        self._tell(manifest)

    def _check_sizes(self) -> None:
        if self.member.config.scheme != "s3":
            return
        for shard in self.source.shards:
            if shard.size > _SINGLE_PUT:
                raise UsageError(
                    f"{shard.name} is larger than an S3 server takes in one request",
                    cause=f"{shard.size} bytes, the limit is {_SINGLE_PUT}",
                    hint="shard the model by 5 GB before it is loaded, or write to a node:// or file store",
                )

    # -- the weights -----------------------------------------------------------------------------------------

    def _generation(self, lanes: LaneSet) -> None:
        """Write all shards of one generation."""
        for attempt in range(self.request.restarts + 1):
            try:
                self._attempt(lanes)
                return
            except UpdatedError:
                self.counts["restarts"] += 1
                self.source.again()
                self.ctx.progress.note(f"{self.source.name} was updated: beginning again ({attempt + 1})")
        with self.source.held(self.request.hold_seconds) as held:
            self.source.again()
            try:
                self._attempt(lanes)
            except UpdatedError:
                raise ConflictError(
                    f"{self.source.name} is updated faster than it can be copied",
                    cause=f"{self.counts['restarts'] + 1} copies, each overtaken by an update"
                    + ("" if held else "; it cannot hold updates back"),
                    hint="raise --max-rate, or load into a slot and swap: a slot's generation cannot change",
                ) from None
        if held:
            self.report.notes.append("updates were held back for the last copy")

    def _attempt(self, lanes: LaneSet) -> None:
        """Shards are hashed in turn while those before are written: what is hashed by then, a few at a time."""
        self.digests = []
        self.pacer.again()
        most = self.source.at_once
        coming = iter(self.source.shards)
        ahead: deque[Future[_Prepared]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="kvctl-hash") as pool:
            try:
                while True:
                    ahead.extend(pool.submit(self._prepare, shard) for shard in islice(coming, most - len(ahead)))
                    if not ahead:
                        break
                    items = [ahead.popleft().result()]
                    while ahead and ahead[0].done() and ahead[0].exception() is None:
                        items.append(ahead.popleft().result())
                    ahead.extend(pool.submit(self._prepare, shard) for shard in islice(coming, most - len(ahead)))
                    self._place_all(items, lanes)
            finally:
                for future in ahead:
                    if not future.cancel():
                        with contextlib.suppress(Exception):
                            future.result().buffer.close()
        if not self.source.unchanged():
            raise UpdatedError

    def _place_all(self, items: Sequence[_Prepared], lanes: LaneSet) -> None:
        try:
            if not items:
                return
            if not self.source.unchanged():
                raise UpdatedError
            self.lock.check()
            tasks = [task for task in map(self._task, items) if task is not None]
            if tasks:
                # a paced write may take long: it is no stall
                executor = Executor(lanes.lanes, self.ctx, hedge=False, max_rate=self.pacer.least)
                try:
                    executor.run(tasks)
                finally:
                    self.stats.add(executor.stats)
            for item in items:
                self.digests += item.digests
        finally:
            for item in items:
                item.buffer.close()

    def _prepare(self, shard: Shard) -> _Prepared:
        buffer = self.source.open(shard, self.pacer)
        try:
            with self.clock.timed("digest"):
                digests = self._hash(shard, buffer)
        except BaseException:
            buffer.close()
            raise
        content = blake3.blake3(shard.header.raw)
        for item in digests:
            content.update(bytes.fromhex(item.digest))
        return _Prepared(shard, buffer, digests, content.hexdigest())

    def _hash(self, shard: Shard, buffer: Buffer) -> list[TensorDigest]:
        found: list[TensorDigest] = []
        for tensor in shard.header.tensors:
            hasher = TensorHasher(tensor.dtype, tensor.shape, tensor.nbytes)
            base = shard.header.header_size + tensor.start
            for start in range(0, tensor.nbytes, PIECE):
                length = min(PIECE, tensor.nbytes - start)
                self.pacer.hashed(length)
                hasher.update(buffer.view[base + start : base + start + length])
            found.append(TensorDigest(tensor.name, tensor.dtype, tensor.shape, hasher.digest()))
        return found

    def _task(self, item: _Prepared) -> Task | None:
        """The write that it takes until the file is there; None when it was written before, or the store made it of the
        last checkpoint's.
        """
        shard, folder = item.shard, self.folder
        entry = Entry(shard.size, item.content)
        if folder.has(shard.name, entry):
            self.counts["resumed_bytes"] += shard.size
            self._skip(shard.size)
            return None
        reused = folder.reuse(shard.name, entry)
        if reused is not None:
            self.counts["shared_bytes" if reused.shared else "copied_bytes"] += shard.size
            self._skip(shard.size)
            return None

        def written(_: Task, view: memoryview) -> None:
            self.counts["written_bytes"] += shard.size
            folder.written(shard.name, entry)

        place = Place(0, folder.key(shard.name))
        return Task((place,), 0, shard.size, "write", object_size=shard.size, buffer=item.buffer, on_bytes=written)

    def _skip(self, nbytes: int) -> None:
        self.ctx.progress.advance(nbytes)
        self.pacer.skip(nbytes)

    # -- the end -----------------------------------------------------------------------------------------------

    def _commit(self) -> Manifest:
        # a model that was restored from a checkpoint has that one's own documents
        ours = {names.MANIFEST, names.DIGESTS}
        side = {name: data for name, data in self.source.side_files.items() if name not in ours}
        digests = DigestsFile(tuple(self.digests))
        side[names.DIGESTS] = json.dumps(digests.to_json(), indent=1).encode()
        folder = self.folder
        for name, data in side.items():
            version = self.store.put(folder.key(name), data).version
            folder.there[name] = Entry(len(data), blake3.blake3(data).hexdigest(), version)
        wanted = {shard.name for shard in self.source.shards} | side.keys()
        manifest = Manifest(
            folder.ident, datetime.now(UTC).isoformat(timespec="seconds"), self.source.name, self.source.generation,
            digests.digest, {name: entry for name, entry in folder.there.items() if name in wanted},
        )  # fmt: skip
        self.lock.check()
        folder.clean(wanted)
        self.store.put(folder.key(names.MANIFEST), json.dumps(manifest.to_json(), indent=1).encode())
        self.store.delete([folder.key(names.PARTIAL)])
        self.store.put(names.LATEST, f"{folder.ident}\n".encode())
        return manifest

    def _tell(self, manifest: Manifest) -> None:
        report, request = self.report, self.request
        removed: list[str] = []
        if request.keep_last is not None:
            removed = names.to_remove(self.catalog.complete(), request.keep_last, manifest.ident)
            for ident in removed:
                self.lock.check()
                self.catalog.remove(ident)
        report.target = f"{request.to.url}/{manifest.ident}"
        report.bytes = report.needed = self.total
        report.fetched = self.total
        report.written = self.counts["written_bytes"]
        report.tensors, report.objects = len(self.digests), len(self.source.shards)
        report.verified = Verification("full", "every tensor's digest was computed from the bytes written", self.total)
        pacing = self.pacer.report()
        if report.written == self.total and (slow := slower(pacing)):
            report.notes.append(slow)
        report.extra |= {
            "id": manifest.ident,
            "generation": manifest.generation,
            "digest": manifest.digest,
            **self.counts,
            "removed": removed,
            "source_cpu_s_per_gb": self._source_share(),
            "pacing": pacing,
        }

    def _source_share(self) -> float | None:
        """CPU seconds per GB of the process that owns the weights; None where it cannot be told."""
        now = self.source.cpu_seconds()
        if now is None or self._source_cpu is None or not self.total:
            return None
        return (now - self._source_cpu) / (self.total / 1e9)
