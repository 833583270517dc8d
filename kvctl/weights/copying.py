"""`models cp`: a model from one repo to another. Only missing chunks move, each verified by its digest on the way;
an interrupted copy is resumed by running it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import IntegrityError, MemberDownError
from kvctl.memory.buffers import HostBuffer
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.layout import check_name
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes, transports_of
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import Place, RunStats, StageClock, Task
from kvctl.weights import stored
from kvctl.weights.committing import commit_model
from kvctl.weights.manifest import DataChunk, ModelFile, ModelManifest

BATCH: Final = 64 << 20  # bytes of chunks in memory at once


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """`name`[`version`] of the repo `source` becomes `new_name`[`new_version`] of the repo `target`."""

    source: tuple[StoreConfig, ...]
    name: str
    target: tuple[StoreConfig, ...]
    version: str | None = None
    new_name: str | None = None
    new_version: str | None = None
    max_rate: int | None = None


def copy_model(request: CopyRequest, ctx: Context) -> Report:
    """Raises what reading the source and pushing to the target raise; nothing is visible before the manifest."""
    watch = Stopwatch()
    name = check_name("model", request.new_name or request.name)
    with Repo.open(request.source, ctx) as source, Repo.open(request.target, ctx) as target:
        version, key = stored.resolve(source, request.name, request.version)
        manifest = stored.read_manifest(source, key)
        report = Report("models cp", f"{request.name}@{version} in repo {source.id[:8]}")
        with Push.begin(target, f"models cp {name}", ctx) as push:
            refs = _Copy(request, source, target, push, report, ctx).run(manifest, watch)
            copied = _renamed(manifest, refs, name)
            new_version, new = commit_model(push, target, copied, request.new_version)
        report.target = f"{name}@{new_version} in repo {target.id[:8]}"
        report.extra |= {"version": new_version, "new_version": new}
        if not new:
            report.notes.append(f"version {new_version} holds exactly this already")
    report.bytes = manifest.data_bytes
    report.tensors, report.objects = len(manifest.tensors), len(manifest.files)
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return report


class _Copy:
    def __init__(
        self, request: CopyRequest, source: Repo, target: Repo, push: Push, report: Report, ctx: Context
    ) -> None:
        self.source = source
        self.push = push
        self.report = report
        self.ctx = ctx
        self.clock = StageClock()
        self.max_rate = request.max_rate
        self.stats = RunStats()
        self.reading: LaneSet = open_lanes(source.up, max_rate=request.max_rate, trace=ctx.trace)
        self.writing: LaneSet = open_lanes(target.up, max_rate=request.max_rate, trace=ctx.trace)

    def run(self, manifest: ModelManifest, watch: Stopwatch) -> dict[str, ChunkRef]:
        """Digest -> chunk of the target, all of them there."""
        sources = {ref.digest: ref for ref in (stored.chunk_ref(manifest, n) for n in range(len(manifest.chunks)))}
        sizes = {digest: ref.size for digest, ref in sources.items()}
        found = self.push.find(sizes)
        missing = [ref for digest, ref in sources.items() if digest not in found]
        watch.ready()
        self.ctx.progress.begin("copying", sum(ref.size for ref in missing))
        buffer = HostBuffer(max((ref.size for ref in missing), default=0) + BATCH if missing else 0)
        try:
            for batch in _batches(missing):
                self.ctx.cancel.check("copying")
                found |= self._copy(batch, buffer)
        finally:
            self.ctx.progress.end()
            self.reading.close()
            self.writing.close()
            buffer.close()
        report = self.report
        fill(report, self.stats, self.writing, self.clock.busy(), 1, seconds=watch.since_ready)
        report.transport = transports_of(self.reading, self.writing)
        report.paths = [lane.report() for lane in (*self.reading.lanes, *self.writing.lanes)]
        report.needed = report.fetched = sum(ref.size for ref in missing)
        report.written = sum(lane.bytes for lane in self.writing.lanes)
        report.verified = Verification("full", "", report.fetched)
        report.extra |= {"new_chunks": len(missing), "shared_chunks": len(sources) - len(missing)}
        return found

    def _copy(self, batch: Sequence[ChunkRef], buffer: HostBuffer) -> dict[str, ChunkRef]:
        refs = self.push.new_many({ref.digest: ref.size for ref in batch})
        reads: list[Task] = []
        writes: list[Task] = []
        placing = []
        at = 0
        for ref in batch:
            members = self.source.locate(ref.digest)
            places = tuple(Place(member.index, ref.key) for member in members if member.down is None)
            if not places:
                raise MemberDownError(
                    f"chunk {ref.name} cannot be read: member {members[0].name} is down", cause=str(members[0].down)
                )
            read = Task(places, 0, ref.size, object_size=ref.size, buffer=buffer, buffer_offset=at)
            reads.append(replace(read, on_bytes=self._verifier(ref.digest)))
            new = refs[ref.digest]
            for member in self.push.targets(new):
                place = (Place(member.index, new.key),)
                write = Task(place, 0, ref.size, "write", object_size=ref.size, buffer=buffer, buffer_offset=at)
                writes.append(write)
                placing.append((new, member))
            at += ref.size
        self.stats.add(Executor(self.reading.lanes, self.ctx, max_rate=self.max_rate).run(reads))
        self.stats.add(Executor(self.writing.lanes, self.ctx.quiet(), max_rate=self.max_rate).run(writes))
        for new, member in placing:
            self.push.placed(new, member)
        self.push.keep()
        return refs

    def _verifier(self, digest: str) -> Callable[[Task, memoryview], None]:
        def verify(task: Task, view: memoryview) -> None:
            with self.clock.timed("digest"):
                got = digest_of(view)
            if got != digest:
                raise IntegrityError(f"{task.places[0].key}: the chunk is damaged", cause=f"its digest is {got}")

        return verify


def _batches(refs: Sequence[ChunkRef]) -> Iterator[list[ChunkRef]]:
    batch: list[ChunkRef] = []
    size = 0
    for ref in refs:
        if batch and size + ref.size > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(ref)
        size += ref.size
    if batch:
        yield batch


def _renamed(manifest: ModelManifest, refs: dict[str, ChunkRef], name: str) -> ModelManifest:
    """The manifest with the target's chunks; two incarnations of one digest become one chunk."""
    positions: dict[str, int] = {}
    where: list[int] = []
    for old, _ in manifest.chunks:
        where.append(positions.setdefault(refs[old[:64]].name, len(positions)))
    sizes = {ref.name: ref.size for ref in refs.values()}

    def moved(file: ModelFile) -> ModelFile:
        data = tuple(DataChunk(where[item.chunk], item.cut) for item in file.data)
        leaves = None if file.leaves is None else where[file.leaves]
        return replace(file, header=where[file.header], leaves=leaves, data=data)

    return replace(
        manifest,
        name=name,
        chunks=tuple((chunk, sizes[chunk]) for chunk in positions),
        files=tuple(moved(file) for file in manifest.files),
        sidecars=tuple(
            item if item.chunk is None else replace(item, chunk=where[item.chunk]) for item in manifest.sidecars
        ),
    )
