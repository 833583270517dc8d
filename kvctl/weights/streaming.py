"""A load as a stream: tensors one by one, as they are complete and verified, in bounded memory.

The bytes land in memory that is reserved at full size and committed as they land; a tensor's pages are given back when
its consumer drops the last reference. What has landed and waits for its consumer is bounded: the load stands still
until some is taken. So the peak is what the consumer keeps, plus that bound.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from kvctl.core.cancel import CancelToken
from kvctl.core.context import Context
from kvctl.core.errors import NotFoundError
from kvctl.core.units import MIB
from kvctl.memory.buffers import PAGE, HostBuffer
from kvctl.transfer.report import Report
from kvctl.transfer.summary import Stopwatch, cpu_share
from kvctl.weights.from_repo import RepoModel
from kvctl.weights.moving import Loading
from kvctl.weights.planning import LoadPlan, Opened, open_weights
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import LoadedTensor, OutputFile, Run, scatter
from kvctl.weights.targets import Landing, UnrecordedTarget

AHEAD: Final = 256 * MIB  # bytes of complete tensors that may wait for the consumer


class TensorStream:
    """Iterate over it: (tensor, its bytes). The bytes are a writable ctypes array that owns its pages: keep a reference
    to it (`torch.frombuffer` does) for as long as they are read. `plan` is known at once; `report` after the last
    tensor. Raises what loading raises, from the iteration. A context manager: leaving it early ends the load.
    """

    def __init__(self, request: LoadRequest, ctx: Context, *, ahead: int = AHEAD) -> None:
        self._watch = Stopwatch()
        self._cancel = CancelToken()
        self._ctx = replace(ctx, cancel=self._cancel)
        self._request = request
        self._ahead = ahead
        self._cv = threading.Condition()
        self._ready: deque[LoadedTensor] = deque()
        self._waiting = 0
        self._error: BaseException | None = None
        self._over = False
        self._thread: threading.Thread | None = None
        self.report = Report("load-weights", source=request.address, target="engine")
        self._source: Opened = open_weights(request, ctx)
        try:
            self.plan = self._source.plan()
        except BaseException:
            self._source.close()
            raise
        self._target = _Sparse(self.plan)
        self._missing = {tensor: tensor.end - tensor.start for tensor in self.plan.tensors}
        self._index = _Index(self.plan.tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._cv:
            self._over = True
            self._cv.notify_all()
        self._cancel.request(2)
        self._cancel.request(2)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._source.close()

    def __iter__(self) -> Iterator[tuple[LoadedTensor, Any]]:  # Any: a ctypes array
        if self._thread is not None:
            raise RuntimeError("a stream of tensors is read once")
        self._thread = threading.Thread(target=self._run, name="kvctl-stream", daemon=True)
        self._thread.start()
        left = len(self.plan.tensors)
        while left:
            with self._cv:
                self._cv.wait_for(lambda: self._ready or self._error is not None)
                if not self._ready:
                    assert self._error is not None
                    raise self._error
                tensor = self._ready.popleft()
            yield tensor, self._target.take(tensor)
            left -= 1
            with self._cv:
                self._waiting -= tensor.end - tensor.start
                self._cv.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def digest(self) -> str | None:
        """The model digest, where the source knows it: a repo's manifest. None: only its bytes tell."""
        return self._source.manifest.digest if isinstance(self._source, RepoModel) else None

    # -- the load's side -----------------------------------------------------------------------------------

    def _run(self) -> None:
        report, plan = self.report, self.plan
        report.metadata_bytes, report.requests = plan.metadata_bytes, plan.metadata_requests
        report.tensors, report.tp, report.objects = len(plan.tensors), plan.tp_report(), plan.objects
        report.notes.extend(plan.notes)
        try:
            for tensor in plan.tensors:
                if tensor.start == tensor.end:
                    self._complete(tensor)
            watch = self._watch
            for part in self._parts(plan):
                self._move(part, watch)
                watch = Stopwatch()  # what came before the first part is the set-up
        except BaseException as error:
            with self._cv:
                self._error = error
                self._cv.notify_all()
            return
        report.bytes = plan.needed_bytes
        self._watch.stop(report)
        report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)

    def _move(self, plan: LoadPlan, watch: Stopwatch) -> None:
        loading = _Streaming(self, plan)
        try:
            loading.move(watch)
            _add(self.report, loading.report)
        except NotFoundError:
            if not self._source.moved():
                raise
            # a rebalance took chunks elsewhere since the plan was made: look them up again. What is not complete is
            # counted anew; what is has been handed over, and its pages are not touched
            again = self._source.plan()
            self._missing = {tensor: tensor.end - tensor.start for tensor in self._missing}
            left = _only(again, tuple(self._missing))
            loading.release()
            loading = _Streaming(self, left)
            loading.move(watch)
            _add(self.report, loading.report)
        finally:
            loading.release()

    def _parts(self, plan: LoadPlan) -> Iterator[LoadPlan]:
        """The plan in parts of half of what may wait, each once there is room for it."""
        runs: list[Run] = []
        size = 0
        for run in (*plan.runs, None):
            if runs and (run is None or size + run.length > self._ahead // 2):
                self._room(size)
                yield replace(plan, runs=tuple(runs))
                runs, size = [], 0
            if run is not None:
                runs.append(run)
                size += run.length

    def _room(self, nbytes: int) -> None:
        with self._cv:
            self._cv.wait_for(lambda: self._over or not self._waiting or self._waiting + nbytes <= self._ahead)
        self._cancel.check("streaming weights")

    def arrived(self, run: Run) -> None:
        """A run's bytes are in place. On a finisher thread."""
        done: list[LoadedTensor] = []
        with self._cv:
            for tensor, nbytes in self._index.of(run):
                if tensor in self._missing:
                    self._missing[tensor] -= nbytes
                    if self._missing[tensor] <= 0:
                        del self._missing[tensor]
                        done.append(tensor)
        for tensor in done:
            self._complete(tensor)

    def _complete(self, tensor: LoadedTensor) -> None:
        size = tensor.end - tensor.start
        with self._cv:
            self._missing.pop(tensor, None)
            self._ready.append(tensor)
            self._waiting += size
            self._cv.notify_all()


def _only(plan: LoadPlan, tensors: Sequence[LoadedTensor]) -> LoadPlan:
    """The runs that these tensors need."""
    index = _Index(tensors)
    return replace(plan, runs=tuple(run for run in plan.runs if any(True for _ in index.of(run))))


def _add(total: Report, part: Report) -> None:
    """What one part of a load moved, into the report of all of it."""
    for name in (
        "needed",
        "fetched",
        "requests",
        "retries",
        "hedges",
        "hedge_wins",
        "hedged_bytes",
        "misaligned_bytes",
    ):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    total.p50_s, total.p99_s = max(total.p50_s, part.p50_s), max(total.p99_s, part.p99_s)
    total.transport, total.stages, total.limiter = part.transport, part.stages, part.limiter
    ways = {(path.member, path.endpoint, path.transport): path for path in total.paths}
    for path in part.paths:
        known = ways.setdefault((path.member, path.endpoint, path.transport), path)
        if known is not path:
            known.bytes, known.requests = known.bytes + path.bytes, known.requests + path.requests
            known.retries, known.failures = known.retries + path.retries, known.failures + path.failures
    total.paths = list(ways.values())
    part.verified.bytes += total.verified.bytes
    total.verified = part.verified


class _Streaming(Loading):
    """One run of the executor whose ranges report to a stream."""

    def __init__(self, stream: TensorStream, plan: LoadPlan) -> None:
        super().__init__(stream._request, stream._source, plan, stream._target, Report("load-weights"), stream._ctx)
        self._stream = stream

    @property
    def _forgets(self) -> bool:
        return False  # every run has to be told to the stream

    def _land(self, number: int, run: Run, view: memoryview) -> None:
        self._verify(run, view)
        if run.dest is None:
            with self.clock.timed("copy"):
                scatter(view, run.pieces, self.data)
        self._stream.arrived(run)


class _Index:
    """Which tensors a run's bytes belong to."""

    def __init__(self, tensors: Sequence[LoadedTensor]) -> None:
        self._tensors = sorted(
            (tensor for tensor in tensors if tensor.end > tensor.start),
            key=lambda tensor: (tensor.output, tensor.start),
        )
        self._starts = [(tensor.output, tensor.start) for tensor in self._tensors]

    def of(self, run: Run) -> Iterator[tuple[LoadedTensor, int]]:
        """(tensor, bytes of it)."""
        if run.dest is not None:
            yield from self._range(run.output, run.dest, run.dest + run.length)
            return
        for piece in run.pieces:
            if piece.rows == 1 or piece.dest_stride == piece.row_bytes:
                yield from self._range(piece.output, piece.dest, piece.dest + piece.nbytes)
            else:
                for row in range(piece.rows):
                    start = piece.dest + row * piece.dest_stride
                    yield from self._range(piece.output, start, start + piece.row_bytes)

    def _range(self, output: int, start: int, end: int) -> Iterator[tuple[LoadedTensor, int]]:
        number = max(0, bisect_right(self._starts, (output, start)) - 1)
        while number < len(self._tensors):
            tensor = self._tensors[number]
            if (tensor.output, tensor.start) >= (output, end):
                return
            held = min(end, tensor.end) - max(start, tensor.start)
            if tensor.output == output and held > 0:
                yield tensor, held
            number += 1


class _Sparse(UnrecordedTarget):
    """Memory at full size, of which only what has landed and is still held takes room."""

    name = "engine"

    def __init__(self, plan: LoadPlan) -> None:
        self._buffers: list[HostBuffer] = []
        self.landings = [self._landing(output) for output in plan.outputs]

    def _landing(self, output: OutputFile) -> Landing:
        start = output.congruent_to % PAGE
        buffer = HostBuffer(start + output.data_size)
        self._buffers.append(buffer)
        return Landing(buffer, start)

    def take(self, tensor: LoadedTensor) -> Any:  # Any: a ctypes array
        """The tensor's bytes; its pages are given back when the array goes."""
        assert self.landings is not None
        landing, size = self.landings[tensor.output], tensor.end - tensor.start
        start = landing.data_start + tensor.start
        data = (ctypes.c_ubyte * size).from_buffer(landing.buffer.view, start) if size else (ctypes.c_ubyte * 0)()
        weakref.finalize(data, _forget, self._buffers[tensor.output], start, start + size)
        return data


def _forget(buffer: HostBuffer, start: int, end: int) -> None:
    """Give back the pages that lie wholly in [start, end)."""
    first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    if last > first:
        buffer._map.madvise(mmap.MADV_DONTNEED, first, last - first)
