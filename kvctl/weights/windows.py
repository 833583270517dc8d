"""A source's data in windows of memory: one is read while the one before it is hashed and written, so memory is bounded
by two windows and their chunks, whatever the model measures.

Owns that memory, and the thread and the lanes that fill it. What a window's bytes are good for is `push`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvctl.core.context import Context
from kvctl.memory.budget import staging_budget
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes
from kvctl.transfer.pace import Pace
from kvctl.transfer.tasks import Place, RunStats, StageClock, Task
from kvctl.weights.cut import ChunkCut, gather, windows
from kvctl.weights.from_files import PlainModel
from kvctl.weights.sources import SourceFile
from kvctl.weights.storing import Chunk

PIECE: Final = 16 << 20


@dataclass(slots=True)
class Window:
    """A part of a file's data section in memory: [start, start + length) for neighbouring cuts, or one cut alone whose
    parts are read one after the other (`packed`).
    """

    file: SourceFile
    cuts: list[ChunkCut]
    start: int
    length: int
    packed: bool = False


class Windows:
    """`cuts`: how a file is cut; `largest`: bytes of a window that holds more than one cut. `stats` of the reads."""

    def __init__(
        self,
        model: PlainModel,
        cuts: Callable[[SourceFile], list[ChunkCut]],
        largest: int,
        ctx: Context,
        pace: Pace,
        clock: StageClock,
        *,
        budget: int | None,
        max_rate: int | None,
    ) -> None:
        self._source = model.source
        self._cuts = cuts
        self._largest = largest
        self.lanes: LaneSet = open_lanes(model.members, max_rate=max_rate, trace=ctx.trace)
        self._ctx = ctx
        self._pace = pace
        self._clock = clock
        self._budget = budget
        self._max_rate = pace.least or max_rate  # one that waits for its turn has not stalled
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvctl-read")
        # reading ahead takes a second window: not where memory is short
        room = 3 * largest
        self._inputs = [HostBuffer(0) for _ in range(2 if staging_budget(room) >= room else 1)]
        self._output = HostBuffer(0)
        self.stats = RunStats()

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)
        self.lanes.close()
        for buffer in (*self._inputs, self._output):
            buffer.close()

    def read(self) -> Iterator[tuple[Window, HostBuffer]]:
        """Every window in turn, its bytes in the buffer until the next one is asked for."""
        pending: tuple[Window, HostBuffer, Future[None]] | None = None
        for number, window in enumerate(self._windows()):
            if pending is not None and len(self._inputs) == 1:
                yield self._filled(*pending)
                pending = None
            # the buffer of two windows ago is free: its chunks have been written
            buffer = self._room(number % len(self._inputs), window.length)
            future = self._reader.submit(self._read, window, buffer)
            if pending is not None:
                yield self._filled(*pending)
            pending = (window, buffer, future)
        if pending is not None:
            yield self._filled(*pending)

    def chunks(self, window: Window, buffer: HostBuffer) -> list[Chunk]:
        """Where each cut's bytes are: in the window itself when they are one range, else gathered."""
        if window.packed:
            return [Chunk(buffer, 0, window.length)]
        scattered = [cut for cut in window.cuts if len(cut.parts) > 1 or not cut.parts[0].contiguous]
        needed = sum(cut.size for cut in scattered)
        if self._output.nbytes < needed:
            self._output.close()
            self._output = HostBuffer(max(needed, min(self._largest, self._source.data_bytes)))
        chunks: list[Chunk] = []
        at = 0
        for cut in window.cuts:
            if len(cut.parts) == 1 and cut.parts[0].contiguous:
                chunks.append(Chunk(buffer, cut.start - window.start, cut.size))
                continue
            chunk = Chunk(self._output, at, cut.size)
            with self._clock.timed("gather"):
                gather(cut, buffer.view, chunk.view, base=window.start)
            chunks.append(chunk)
            at += cut.size
        return chunks

    def _filled(self, window: Window, buffer: HostBuffer, read: Future[None]) -> tuple[Window, HostBuffer]:
        with self._clock.timed("wait for source"):
            read.result()
        return window, buffer

    def _windows(self) -> Iterator[Window]:
        for file in self._source.files:
            for cuts in windows(self._cuts(file), self._largest):
                self._ctx.cancel.check("pushing")
                start = min(cut.start for cut in cuts)
                length = max(cut.end for cut in cuts) - start
                if len(cuts) == 1 and length > max(self._largest, cuts[0].size):
                    yield Window(file, cuts, start, cuts[0].size, packed=True)
                else:
                    yield Window(file, cuts, start, length)

    def _room(self, number: int, length: int) -> HostBuffer:
        if self._inputs[number].nbytes < length:
            self._inputs[number].close()
            self._inputs[number] = HostBuffer(max(length, min(self._largest, self._source.data_bytes)))
        return self._inputs[number]

    def _read(self, window: Window, buffer: HostBuffer) -> None:
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
        self._pace.hold(sum(task.length for task in tasks))
        executor = Executor(self.lanes.lanes, self._ctx.quiet(), budget=self._budget, max_rate=self._max_rate)
        self.stats.add(executor.run(tasks))


def _pieces(place: tuple[Place, ...], size: int, offset: int, length: int, buffer: HostBuffer, at: int) -> list[Task]:
    return [
        Task(place, offset + done, min(PIECE, length - done), object_size=size, buffer=buffer, buffer_offset=at + done)
        for done in range(0, length, PIECE)
    ]
