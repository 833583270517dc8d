"""Chunks of a push on their way into the repo: hashed, looked for, and written where they are missing.

Knows chunks as bytes in memory, and nothing of tensors or files: what is cut how is `cut`'s, how the bytes came into
memory is `windows`', what a model's manifest says of them is `push`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.core.context import Context
from kvctl.memory.buffers import HostBuffer
from kvctl.repo.chunks import ChunkRef, digest_of, leaf_table
from kvctl.repo.pushing import Push
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet
from kvctl.transfer.pace import Pace
from kvctl.transfer.tasks import Place, RunStats, StageClock, Task


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's bytes in memory."""

    buffer: HostBuffer
    offset: int
    size: int

    @property
    def view(self) -> memoryview:
        return self.buffer.view[self.offset : self.offset + self.size]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a chunk's bytes hash to."""

    digest: str
    size: int
    table: bytes


class ChunkStore:
    """`refs`: every chunk that is in the repo by now, by digest. Counts in bytes and chunks; `stats` of the writes."""

    def __init__(
        self,
        push: Push,
        lanes: LaneSet,
        ctx: Context,
        pace: Pace,
        clock: StageClock,
        *,
        replicas: int,
        budget: int | None,
        max_rate: int | None,
    ) -> None:
        self._push = push
        self._lanes = lanes
        self._ctx = ctx
        self._pace = pace
        self._clock = clock
        self._replicas = replicas
        self._budget = budget
        self._max_rate = pace.least or max_rate  # one that waits for its turn has not stalled
        self.refs: dict[str, ChunkRef] = {}
        self.new_bytes = self.new_chunks = self.shared_bytes = self.shared_chunks = 0
        self.stats = RunStats()

    def summary(self, chunk: Chunk) -> Summary:
        """Thread-safe."""
        self._pace.hold(chunk.size)
        with self._clock.timed("digest"):
            return Summary(digest_of(chunk.view), chunk.size, leaf_table(chunk.view))

    def store(self, chunks: Sequence[tuple[Summary, Chunk]]) -> None:
        """Make sure that the repo has each chunk; write those that it lacks, to every replica that lacks them."""
        unknown = {summary.digest: chunk for summary, chunk in chunks if summary.digest not in self.refs}
        sizes = {digest: chunk.size for digest, chunk in unknown.items()}
        found = self._push.find(sizes) if sizes else {}
        self.refs |= found
        self.shared_chunks += len(found)
        reused = sum(ref.size for ref in found.values())
        self.shared_bytes += reused
        self._pace.skip(reused * self._replicas)
        fresh = self._push.new_many({digest: size for digest, size in sizes.items() if digest not in found})
        tasks: list[Task] = []
        placing = []
        for digest, ref in fresh.items():
            chunk = unknown[digest]
            self.new_chunks += 1
            for member in self._push.targets(ref):
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
            executor = Executor(self._lanes.lanes, self._ctx.quiet(), budget=self._budget, max_rate=self._max_rate)
            stats = executor.run(tasks)
            self.stats.add(stats)
            self.new_bytes += stats.bytes
        for ref, member in placing:
            self._push.placed(ref, member)
        self.refs |= fresh
        self._push.keep()

    def store_small(self, datas: Sequence[bytes]) -> list[ChunkRef | None]:
        """The chunks of small things, in order; None for an empty one."""
        buffer = HostBuffer(sum(map(len, datas)))
        chunks: list[tuple[Summary, Chunk]] = []
        at = 0
        for data in datas:
            if data:
                buffer.view[at : at + len(data)] = data
                chunk = Chunk(buffer, at, len(data))
                chunks.append((self.summary(chunk), chunk))
            at += len(data)
        try:
            self.store(chunks)
        finally:
            buffer.close()
        refs = iter([self.refs[summary.digest] for summary, _ in chunks])
        return [next(refs) if data else None for data in datas]
