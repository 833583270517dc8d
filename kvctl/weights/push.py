"""Pushing: plain weights into a repo. Read once, cut, hash, write only the chunks that are missing, commit last.

Here is the order of things: what a request asks for, a window after the other, the manifest, the report. How windows
come into memory is in `windows`, how chunks get into the repo in `storing`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from kvctl import __version__
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import InterruptedRunError, KvctlError
from kvctl.memory.buffers import HostBuffer
from kvctl.repo.chunks import LEAF, ChunkRef
from kvctl.repo.layout import check_name
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transfer.lanes import LaneSet, open_lanes, transports_of
from kvctl.transfer.pace import NoPace, Pace
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import StageClock
from kvctl.weights.committing import commit_model
from kvctl.weights.cut import GROUP, ChunkCut, cover_fault, cut_file
from kvctl.weights.digests import TensorDigest, model_digest
from kvctl.weights.from_files import PlainModel
from kvctl.weights.hashing import FileHasher
from kvctl.weights.manifest import DataChunk, ModelFile, ModelManifest, Sidecar
from kvctl.weights.planning import read_rules
from kvctl.weights.request import LoadRequest
from kvctl.weights.slicing import Heads
from kvctl.weights.sources import SourceFile
from kvctl.weights.storing import ChunkStore, Summary
from kvctl.weights.windows import Window, Windows

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
class _FileState:
    file: SourceFile
    hasher: FileHasher
    data: list[tuple[ChunkCut, Summary]] = field(default_factory=list)


class _Pushing:
    """One push: the source's windows are hashed and stored, then its manifest is committed."""

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
        self.pace = request.pace or NoPace()
        cutter = _Cutter(source, request, repo.format.stripe_size)
        self.windows = Windows(
            source, cutter.cuts, GROUP * repo.format.stripe_size, ctx, self.pace, self.clock,
            budget=request.max_in_flight_bytes, max_rate=request.max_rate,
        )  # fmt: skip
        self.writing: LaneSet = open_lanes(repo.up, max_rate=request.max_rate, trace=ctx.trace)
        for lane in self.writing.lanes:
            lane.transport = self.pace.paced(lane.transport)
        self.chunks = ChunkStore(
            push, self.writing, ctx, self.pace, self.clock, replicas=repo.format.replicas,
            budget=request.max_in_flight_bytes, max_rate=request.max_rate,
        )  # fmt: skip
        self.workers = min(4, os.cpu_count() or 1)
        self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="kvctl-hash")

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.writing.close()
        self.windows.close()

    def run(self, watch: Stopwatch) -> None:
        states = {file.name: _FileState(file, FileHasher(file.header)) for file in self.source.source.files}
        total = self.source.source.data_bytes
        self.pace.begin(total * self.repo.format.replicas)
        watch.ready()
        self.ctx.progress.begin("pushing", total)
        try:
            for window, buffer in self.windows.read():
                self._process(states[window.file.name], window, buffer)
            manifest = self._manifest(list(states.values()))
            version, new = commit_model(self.push, self.repo, manifest, self.request.version)
            self._done(version, new=new)
        except InterruptedRunError as stop:
            stop.hint = stop.hint or "run the same command again: what is stored already is not written again"
            raise
        finally:
            self.ctx.progress.end()
            self.pace.close()
        self._tell(states, total, watch)

    def _process(self, state: _FileState, window: Window, buffer: HostBuffer) -> None:
        hashing = self.pool.submit(self._hash_tensors, state, window, buffer)
        chunks = self.windows.chunks(window, buffer)
        summaries = list(self.pool.map(self.chunks.summary, chunks))
        hashing.result()
        self.chunks.store(list(zip(summaries, chunks, strict=True)))
        state.data.extend(zip(window.cuts, summaries, strict=True))
        self.ctx.progress.advance(sum(cut.size for cut in window.cuts))

    def _hash_tensors(self, state: _FileState, window: Window, buffer: HostBuffer) -> None:
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

    def _manifest(self, states: Sequence[_FileState]) -> ModelManifest:
        source = self.source.source
        tables = [b"".join(summary.table for _, summary in state.data) for state in states]
        side = {item.name: source.read_sidecar(item) for item in source.sidecars}
        if source.index_name is not None and source.index_data is not None:
            side[source.index_name] = source.index_data
        small = self.chunks.store_small([*(state.file.header.raw for state in states), *tables, *side.values()])
        headers, leaves = small[: len(states)], small[len(states) : 2 * len(states)]
        positions: dict[str, int] = {}

        def position(ref: ChunkRef) -> int:
            return positions.setdefault(ref.name, len(positions))

        refs: dict[str, ChunkRef] = {ref.name: ref for ref in self.chunks.refs.values()}
        digests: list[TensorDigest] = []
        files: list[ModelFile] = []
        for state, header, table in zip(states, headers, leaves, strict=True):
            assert header is not None
            digests += state.hasher.finish()
            data = tuple(DataChunk(position(self.chunks.refs[summary.digest]), cut) for cut, summary in state.data)
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

    def _tell(self, states: Mapping[str, _FileState], total: int, watch: Stopwatch) -> None:
        report, chunks = self.report, self.chunks
        report.requests += self.windows.stats.requests
        report.retries += self.windows.stats.retries
        fill(report, chunks.stats, self.writing, self.clock.busy(), self.workers, seconds=watch.since_ready)
        report.transport = transports_of(self.windows.lanes, self.writing)
        report.bytes = report.needed = report.fetched = total
        report.written = chunks.new_bytes
        report.tensors = sum(len(state.file.header.tensors) for state in states.values())
        report.objects = len(states)
        report.metadata_bytes = self.source.source.metadata_bytes
        report.verified = Verification("full", "every chunk's digest was computed from the bytes written", total)
        report.notes.extend(f"ignored {item.name}: {item.reason}" for item in self.source.source.ignored)
        report.extra |= {
            "new_chunks": chunks.new_chunks,
            "shared_chunks": chunks.shared_chunks,
            "new_bytes": chunks.new_bytes,
            "shared_bytes": chunks.shared_bytes,
        }
