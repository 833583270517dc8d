"""Pushing: plain weights into a repo. Read once, cut, hash, write only the chunks that are missing, commit last.

A window of the source (at most a few stripes) is read while the one before it is hashed and written, so memory is
bounded by two windows and their chunks, whatever the model measures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from kvctl import __version__
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import InterruptedRunError, KvctlError
from kvctl.memory.budget import staging_budget
from kvctl.memory.buffers import HostBuffer
from kvctl.repo.chunks import LEAF, ChunkRef, digest_of, leaf_table
from kvctl.repo.layout import check_name
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes, transports_of
from kvctl.transfer.pace import NoPace, Pace
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import Place, RunStats, StageClock, Task
from kvctl.weights.committing import commit_model
from kvctl.weights.cut import GROUP, ChunkCut, cover_fault, cut_file, gather, windows
from kvctl.weights.digests import TensorDigest, model_digest
from kvctl.weights.from_files import PlainModel
from kvctl.weights.hashing import FileHasher
from kvctl.weights.manifest import DataChunk, ModelFile, ModelManifest, Sidecar
from kvctl.weights.planning import read_rules
from kvctl.weights.request import LoadRequest
from kvctl.weights.slicing import Heads
from kvctl.weights.sources import SourceFile

PIECE: Final = 16 << 20
HASHED: Final = 16 << 20  # at a time
PUSH_PLAN_SCHEMA: Final = "kvctl.push-plan/1"


@dataclass(frozen=True, slots=True)
class PushRequest:
    """`source`: a path or URL of plain weights. `version` None: the next number, or the version that is there
    already when it holds exactly this. Rates in bytes per second. `pace` holds reading, hashing and writing back.
    """

    source: str
    name: str
    repo: tuple[StoreConfig, ...]
    version: str | None = None
    revision: str | None = None
    rules: str | None = None
    max_in_flight_bytes: int | None = None
    max_rate: int | None = None
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class PushPlan:
    """What a push would read and cut, from headers alone. Bytes."""

    source: str
    name: str
    files: int
    tensors: int
    bytes: int
    chunks: int
    replicas: int
    ignored: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": PUSH_PLAN_SCHEMA,
            "source": self.source,
            "name": self.name,
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "chunks": self.chunks,
            "replicas": self.replicas,
            "most_bytes_written": self.bytes * self.replicas,
            "ignored": list(self.ignored),
        }


def plan_push(request: PushRequest, ctx: Context) -> PushPlan:
    """Raises every error that the source's headers and the repo give; writes nothing."""
    check_name("model", request.name)
    with PlainModel(LoadRequest(request.source), ctx) as source, Repo.open(request.repo, ctx) as repo:
        cutter = _Cutter(source, request, repo.format.stripe_size)
        files = source.source.files
        return PushPlan(
            request.source,
            request.name,
            len(files),
            sum(len(file.header.tensors) for file in files),
            source.source.data_bytes,
            sum(len(cutter.cuts(file)) for file in files),
            repo.format.replicas,
            [f"{item.name}: {item.reason}" for item in source.source.ignored],
        )


def push_weights(request: PushRequest, ctx: Context) -> Report:
    """Store the model. Idempotent: what is there already is not written, and the same content is not a new version.

    Raises before the first byte is written when the source or the repo is not right; nothing is visible before the
    manifest, which comes last.
    """
    watch = Stopwatch()
    check_name("model", request.name)
    if request.version is not None:
        check_name("version", request.version)
    with PlainModel(LoadRequest(request.source), ctx) as source, Repo.open(request.repo, ctx) as repo:
        for member in repo.down:
            ctx.progress.note(f"member {member.name} is down: {member.down}")
        report = Report("push-weights", source=request.source, target=f"{request.name} in repo {repo.id[:8]}")
        with Push.begin(repo, f"push-weights {request.name}", ctx) as push:
            pushing = _Pushing(request, source, repo, push, report, ctx)
            try:
                pushing.run(watch)
            finally:
                pushing.close()
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return report


class _Cutter:
    def __init__(self, source: PlainModel, request: PushRequest, stripe: int) -> None:
        self._rules = read_rules(request.rules)
        self._heads = Heads.of(source.config())
        self.stripe = stripe

    def cuts(self, file: SourceFile) -> list[ChunkCut]:
        cuts = cut_file(file.header, self.stripe, self._rules, self._heads)
        fault = cover_fault(cuts, file.header.data_size)
        if fault:
            raise KvctlError(f"{file.name} was not cut right, nothing is written", cause=fault)
        return cuts


@dataclass(slots=True)
class _Window:
    """A part of a file's data section in memory: [start, start + length) for neighbouring cuts, or one cut alone whose
    parts are read one after the other (`packed`).
    """

    file: SourceFile
    cuts: list[ChunkCut]
    start: int
    length: int
    packed: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk's bytes in memory and what they hash to."""

    buffer: HostBuffer
    offset: int
    size: int

    @property
    def view(self) -> memoryview:
        return self.buffer.view[self.offset : self.offset + self.size]


@dataclass(frozen=True, slots=True)
class _Summary:
    digest: str
    size: int
    table: bytes


@dataclass(slots=True)
class _FileState:
    file: SourceFile
    hasher: FileHasher
    data: list[tuple[ChunkCut, _Summary]] = field(default_factory=list)


class _Pushing:
    """One push: source lanes read, repo lanes write, two windows of memory."""

    def __init__(
        self, request: PushRequest, source: PlainModel, repo: Repo, push: Push, report: Report, ctx: Context
    ) -> None:
        self.request = request
        self.source = source
        self.repo = repo
        self.push = push
        self.report = report
        self.ctx = ctx
        self.clock = StageClock()
        self.cutter = _Cutter(source, request, repo.format.stripe_size)
        self.refs: dict[str, ChunkRef] = {}
        self.new_bytes = self.new_chunks = self.shared_bytes = self.shared_chunks = 0
        self.stats = RunStats()
        self.reading: LaneSet = open_lanes(source.members, max_rate=request.max_rate, trace=ctx.trace)
        self.writing: LaneSet = open_lanes(repo.up, max_rate=request.max_rate, trace=ctx.trace)
        self.pace = request.pace or NoPace()
        for lane in self.writing.lanes:
            lane.transport = self.pace.paced(lane.transport)
        self.workers = min(4, os.cpu_count() or 1)
        self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="kvctl-hash")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="kvctl-read")
        self.largest = GROUP * repo.format.stripe_size
        # reading ahead takes a second window: not where memory is short
        room = 3 * self.largest
        self.inputs = [HostBuffer(0) for _ in range(2 if staging_budget(room) >= room else 1)]
        self.output = HostBuffer(0)

    def close(self) -> None:
        self.reader.shutdown(wait=True, cancel_futures=True)
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.reading.close()
        self.writing.close()
        for buffer in (*self.inputs, self.output):
            buffer.close()

    def run(self, watch: Stopwatch) -> None:
        states = [_FileState(file, FileHasher(file.header)) for file in self.source.source.files]
        total = self.source.source.data_bytes
        self.pace.begin(total * self.repo.format.replicas)
        watch.ready()
        self.ctx.progress.begin("pushing", total)
        try:
            self._data(states)
            manifest = self._manifest(states)
            version, new = commit_model(self.push, self.repo, manifest, self.request.version)
            self._done(version, new=new)
        except InterruptedRunError as stop:
            stop.hint = stop.hint or "run the same command again: what is stored already is not written again"
            raise
        finally:
            self.ctx.progress.end()
            self.pace.close()
        report = self.report
        fill(report, self.stats, self.writing, self.clock.busy(), self.workers, seconds=watch.since_ready)
        report.transport = transports_of(self.reading, self.writing)
        report.bytes = report.needed = report.fetched = total
        report.written = self.new_bytes
        report.tensors = sum(len(state.file.header.tensors) for state in states)
        report.objects = len(states)
        report.metadata_bytes = self.source.source.metadata_bytes
        report.verified = Verification("full", "every chunk's digest was computed from the bytes written", total)
        report.notes.extend(f"ignored {item.name}: {item.reason}" for item in self.source.source.ignored)
        report.extra |= {
            "new_chunks": self.new_chunks,
            "shared_chunks": self.shared_chunks,
            "new_bytes": self.new_bytes,
            "shared_bytes": self.shared_bytes,
        }

    # -- windows of data -----------------------------------------------------------------------------------

    def _data(self, states: Sequence[_FileState]) -> None:
        pending: tuple[_FileState, _Window, HostBuffer, Future[None]] | None = None
        for number, (state, window) in enumerate(self._windows(states)):
            if pending is not None and len(self.inputs) == 1:
                self._process(*pending)
                pending = None
            # the buffer of two windows ago is free: its chunks have been written
            buffer = self._room(number % len(self.inputs), window.length)
            future = self.reader.submit(self._read, window, buffer)
            if pending is not None:
                self._process(*pending)
            pending = (state, window, buffer, future)
        if pending is not None:
            self._process(*pending)

    def _windows(self, states: Sequence[_FileState]) -> Iterator[tuple[_FileState, _Window]]:
        for state in states:
            for cuts in windows(self.cutter.cuts(state.file), self.largest):
                self.ctx.cancel.check("pushing")
                start = min(cut.start for cut in cuts)
                length = max(cut.end for cut in cuts) - start
                if len(cuts) == 1 and length > max(self.largest, cuts[0].size):
                    yield state, _Window(state.file, cuts, start, cuts[0].size, packed=True)
                else:
                    yield state, _Window(state.file, cuts, start, length)

    def _room(self, number: int, length: int) -> HostBuffer:
        if self.inputs[number].nbytes < length:
            self.inputs[number].close()
            self.inputs[number] = HostBuffer(max(length, min(self.largest, self.source.source.data_bytes)))
        return self.inputs[number]

    def _read(self, window: _Window, buffer: HostBuffer) -> None:
        file = window.file
        place = (Place(0, file.key, file.version),)
        base = file.header.header_size
        tasks: list[Task] = []
        if window.packed:
            at = 0
            for part in window.cuts[0].parts:
                for row in range(part.rows):
                    offset = base + part.start + row * part.stride
                    tasks += _pieces(place, file.size, offset, part.width, buffer, at)
                    at += part.width
        else:
            tasks = _pieces(place, file.size, base + window.start, window.length, buffer, 0)
        self.pace.hold(sum(task.length for task in tasks))
        stats = self._executor(self.reading).run(tasks)
        self.report.requests += stats.requests
        self.report.retries += stats.retries

    def _executor(self, lanes: LaneSet) -> Executor:
        limits = self.request
        rate = self.pace.least or limits.max_rate  # one that waits for its turn has not stalled
        return Executor(lanes.lanes, self.ctx.quiet(), budget=limits.max_in_flight_bytes, max_rate=rate)

    def _process(self, state: _FileState, window: _Window, buffer: HostBuffer, read: Future[None]) -> None:
        with self.clock.timed("wait for source"):
            read.result()
        hashing = self.pool.submit(self._hash_tensors, state, window, buffer)
        chunks = self._chunks(window, buffer)
        summaries = list(self.pool.map(self._summary, chunks))
        hashing.result()
        self._store(list(zip(summaries, chunks, strict=True)))
        state.data.extend(zip(window.cuts, summaries, strict=True))
        self.ctx.progress.advance(sum(cut.size for cut in window.cuts))

    def _hash_tensors(self, state: _FileState, window: _Window, buffer: HostBuffer) -> None:
        with self.clock.timed("digest"):
            if not window.packed:
                for at in range(0, window.length, HASHED):
                    end = min(at + HASHED, window.length)
                    self.pace.hold(end - at)
                    state.hasher.region(window.start + at, buffer.view[at:end])
                return
            at = 0
            for part in window.cuts[0].parts:
                if part.rows == 1:
                    state.hasher.whole(part.start, buffer.view[at : at + part.width])
                at += part.nbytes

    def _chunks(self, window: _Window, buffer: HostBuffer) -> list[_Chunk]:
        """Where each cut's bytes are: in the window itself when they are one range, else gathered."""
        if window.packed:
            return [_Chunk(buffer, 0, window.length)]
        scattered = [cut for cut in window.cuts if len(cut.parts) > 1 or not cut.parts[0].contiguous]
        needed = sum(cut.size for cut in scattered)
        if self.output.nbytes < needed:
            self.output.close()
            self.output = HostBuffer(max(needed, min(self.largest, self.source.source.data_bytes)))
        chunks: list[_Chunk] = []
        at = 0
        for cut in window.cuts:
            if len(cut.parts) == 1 and cut.parts[0].contiguous:
                chunks.append(_Chunk(buffer, cut.start - window.start, cut.size))
                continue
            chunk = _Chunk(self.output, at, cut.size)
            with self.clock.timed("gather"):
                gather(cut, buffer.view, chunk.view, base=window.start)
            chunks.append(chunk)
            at += cut.size
        return chunks

    def _summary(self, chunk: _Chunk) -> _Summary:
        self.pace.hold(chunk.size)
        with self.clock.timed("digest"):
            return _Summary(digest_of(chunk.view), chunk.size, leaf_table(chunk.view))

    # -- writing -------------------------------------------------------------------------------------------

    def _store(self, chunks: Sequence[tuple[_Summary, _Chunk]]) -> None:
        """Make sure that the repo has each chunk; write those that it lacks, to every replica that lacks them."""
        unknown = {summary.digest: chunk for summary, chunk in chunks if summary.digest not in self.refs}
        sizes = {digest: chunk.size for digest, chunk in unknown.items()}
        found = self.push.find(sizes) if sizes else {}
        self.refs |= found
        self.shared_chunks += len(found)
        reused = sum(ref.size for ref in found.values())
        self.shared_bytes += reused
        self.pace.skip(reused * self.repo.format.replicas)
        fresh = self.push.new_many({digest: size for digest, size in sizes.items() if digest not in found})
        tasks: list[Task] = []
        placing = []
        for digest, ref in fresh.items():
            chunk = unknown[digest]
            self.new_chunks += 1
            for member in self.push.targets(ref):
                place = (Place(member.index, ref.key),)
                tasks.append(
                    Task(
                        place,
                        0,
                        ref.size,
                        "write",
                        object_size=ref.size,
                        buffer=chunk.buffer,
                        buffer_offset=chunk.offset,
                    )
                )
                placing.append((ref, member))
        if tasks:
            stats = self._executor(self.writing).run(tasks)
            self.stats.add(stats)
            self.new_bytes += stats.bytes
        for ref, member in placing:
            self.push.placed(ref, member)
        self.refs |= fresh
        self.push.keep()

    def _store_small(self, datas: Sequence[bytes]) -> list[ChunkRef | None]:
        """The chunks of small things, in order; None for an empty one."""
        buffer = HostBuffer(sum(map(len, datas)))
        chunks: list[tuple[_Summary, _Chunk]] = []
        at = 0
        for data in datas:
            if data:
                buffer.view[at : at + len(data)] = data
                chunk = _Chunk(buffer, at, len(data))
                chunks.append((self._summary(chunk), chunk))
            at += len(data)
        try:
            self._store(chunks)
        finally:
            buffer.close()
        refs = iter([self.refs[summary.digest] for summary, _ in chunks])
        return [next(refs) if data else None for data in datas]

    # -- the manifest --------------------------------------------------------------------------------------

    def _manifest(self, states: Sequence[_FileState]) -> ModelManifest:
        source = self.source.source
        tables = [b"".join(summary.table for _, summary in state.data) for state in states]
        side = {item.name: source.read_sidecar(item) for item in source.sidecars}
        if source.index_name is not None and source.index_data is not None:
            side[source.index_name] = source.index_data
        small = self._store_small([*(state.file.header.raw for state in states), *tables, *side.values()])
        headers, leaves = small[: len(states)], small[len(states) : 2 * len(states)]
        positions: dict[str, int] = {}

        def position(ref: ChunkRef) -> int:
            return positions.setdefault(ref.name, len(positions))

        refs: dict[str, ChunkRef] = {ref.name: ref for ref in self.refs.values()}
        digests: list[TensorDigest] = []
        files: list[ModelFile] = []
        for state, header, table in zip(states, headers, leaves, strict=True):
            assert header is not None
            digests += state.hasher.finish()
            data = tuple(DataChunk(position(self.refs[summary.digest]), cut) for cut, summary in state.data)
            files.append(
                ModelFile(
                    state.file.name,
                    state.file.size,
                    position(header),
                    state.file.header.header_size,
                    None if table is None else position(table),
                    data,
                )
            )
        sidecars = tuple(
            Sidecar(name, len(data), None if ref is None else position(ref))
            for (name, data), ref in zip(side.items(), small[2 * len(states) :], strict=True)
        )
        return ModelManifest(
            name=self.request.name,
            version=self.request.version or "",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            digest=model_digest(digests),
            stripe=self.repo.format.stripe_size,
            leaf=LEAF,
            chunks=tuple((name, refs[name].size) for name in positions),
            files=tuple(files),
            tensors={item.name: item.digest for item in digests},
            sidecars=sidecars,
            revision=self.request.revision,
            producer=f"kvctl {__version__}",
        )

    def _done(self, version: str, *, new: bool) -> None:
        self.report.target = f"{self.request.name}@{version} in repo {self.repo.id[:8]}"
        self.report.extra |= {"version": version, "new_version": new}
        if not new:
            self.report.notes.append(f"version {version} holds exactly this already")


def _pieces(place: tuple[Place, ...], size: int, offset: int, length: int, buffer: HostBuffer, at: int) -> list[Task]:
    return [
        Task(place, offset + done, min(PIECE, length - done), object_size=size, buffer=buffer, buffer_offset=at + done)
        for done in range(0, length, PIECE)
    ]
