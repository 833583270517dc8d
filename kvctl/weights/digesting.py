"""Tensor digests of a plain source by reading all of it, region by region, with two buffers: the next region is read
while the one before is hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from kvctl.core.context import Context
from kvctl.core.errors import IntegrityError
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet
from kvctl.transfer.report import Report
from kvctl.transfer.tasks import Place, StageClock, Task
from kvctl.weights.digests import DigestsFile, TensorDigest, tensor_digest
from kvctl.weights.hashing import FileHasher
from kvctl.weights.runs import LoadedTensor
from kvctl.weights.sources import SourceFile, WeightSource
from kvctl.weights.targets import Landing

REGION: Final = 64 << 20
PIECE: Final = 16 << 20


def hash_source(
    source: WeightSource, lanes: LaneSet, report: Report, clock: StageClock, ctx: Context
) -> list[TensorDigest]:
    """The digest of every tensor; every data byte is read once, of the pinned version. Counts go to `report`."""
    found: list[TensorDigest] = []
    buffers = [HostBuffer(min(REGION, source.data_bytes)) for _ in range(2)]
    hashers = [FileHasher(file.header) for file in source.files]

    def read(file: SourceFile, start: int, length: int, buffer: HostBuffer) -> None:
        place = (Place(0, file.key, file.version),)
        base = file.header.header_size + start
        tasks = [
            Task(place, base + at, min(PIECE, length - at), object_size=file.size, buffer=buffer, buffer_offset=at)
            for at in range(0, length, PIECE)
        ]
        stats = Executor(lanes.lanes, ctx).run(tasks)
        report.requests += stats.requests
        report.retries += stats.retries
        report.fetched += stats.bytes

    def hash_one(item: tuple[int, int, int, HostBuffer, Future[None]]) -> None:
        number, start, length, buffer, future = item
        future.result()
        with clock.timed("digest"):
            hashers[number].region(start, buffer.view[:length])

    with ThreadPoolExecutor(1, thread_name_prefix="kvctl-read") as reader:
        pending: tuple[int, int, int, HostBuffer, Future[None]] | None = None
        for count, (number, start, length) in enumerate(_regions(source)):
            ctx.cancel.check("hashing")
            buffer = buffers[count % 2]
            future = reader.submit(read, source.files[number], start, length, buffer)
            if pending is not None:
                hash_one(pending)
            pending = (number, start, length, buffer, future)
        if pending is not None:
            hash_one(pending)
    for hasher in hashers:
        found += hasher.finish()
    for buffer in buffers:
        buffer.close()
    return found


def _regions(source: WeightSource) -> Iterator[tuple[int, int, int]]:
    for number, file in enumerate(source.files):
        for start in range(0, file.header.data_size, REGION):
            yield number, start, min(REGION, file.header.data_size - start)


def check_digests(found: list[TensorDigest], required: DigestsFile, where: str) -> None:
    """Raises IntegrityError that names the first tensor that is missing, additional or different."""
    by_name = required.by_name()
    _check_names({item.name for item in found}, by_name, where)
    for item in found:
        _check_one(item, by_name[item.name], where)


def check_landed(
    tensors: tuple[LoadedTensor, ...],
    landings: tuple[Landing, ...],
    required: DigestsFile,
    where: str,
    look: Callable[[Landing, int, int], memoryview] | None = None,
) -> int:
    """Compare what landed in memory with the required digests; returns the bytes hashed. `look` gives bytes
    [start, end) of a data section, where the CPU cannot see the landing. Raises IntegrityError.
    """
    by_name = required.by_name()
    _check_names({tensor.name for tensor in tensors}, by_name, where)
    total = 0
    for tensor in tensors:
        landing = landings[tensor.output]
        if look is None:
            start = landing.data_start + tensor.start
            data = landing.buffer.view[start : start + tensor.end - tensor.start]
        else:
            data = look(landing, tensor.start, tensor.end)
        digest = TensorDigest(tensor.name, tensor.dtype, tensor.shape, _digest(tensor, data))
        data.release()
        _check_one(digest, by_name[tensor.name], where)
        total += tensor.end - tensor.start
    return total


def _digest(tensor: LoadedTensor, data: memoryview) -> str:
    from kvctl.weights.safetensors import TensorInfo

    return tensor_digest(TensorInfo(tensor.name, tensor.dtype, tensor.shape, tensor.start, tensor.end), data)


def _check_names(found: set[str], required: Mapping[str, TensorDigest], where: str) -> None:
    missing, more = sorted(required.keys() - found), sorted(found - required.keys())
    if missing or more:
        raise IntegrityError(
            f"{where} does not hold the tensors of the digests file",
            cause=f"{len(missing)} are missing ({missing[0]})" if missing else f"{len(more)} are new ({more[0]})",
            hint="it is another model, or the digests are of another version",
        )


def _check_one(found: TensorDigest, required: TensorDigest, where: str) -> None:
    if found != required:
        raise IntegrityError(
            f"{where}: tensor {found.name!r} is not what the digests file says",
            cause=f"{found.dtype} {list(found.shape)} {found.digest}, "
            f"expected {required.dtype} {list(required.shape)} {required.digest}",
            details={"tensor": found.name, "digest": found.digest, "expected": required.digest},
        )
