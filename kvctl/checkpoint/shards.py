"""What a checkpoint is made of: files, each in one piece of memory for as long as it is hashed and written.

A slot's files are there already, immutable: they are written from the agent's memory, as they are. An engine's own
weights (`LiveWeights`) are copied shard by shard into a buffer, in the usual layout of a Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvctl.agent.client import AgentClient
from kvctl.agent.memory import SealedBuffer
from kvctl.checkpoint.pacing import Pacer
from kvctl.checkpoint.shares import COPIED, MAPPED, Shares
from kvctl.core.errors import IncompatibleError
from kvctl.engines.api import Part
from kvctl.memory.buffers import Buffer, HostBuffer
from kvctl.weights.dtypes import DTYPES
from kvctl.weights.engine_layout import check_is_checkpoint
from kvctl.weights.layout import encode_header
from kvctl.weights.safetensors import Header, TensorInfo, parse_header

DEFAULT_SHARD: Final = 5_000_000_000  # what transformers writes
MOST_PARTS: Final = 64  # of one read: they are named in a line of HTTP
INDEX: Final = "model.safetensors.index.json"


class UpdatedError(Exception):
    """The weights were updated while they were copied."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A weights file of the checkpoint."""

    name: str
    header: Header

    @property
    def size(self) -> int:
        return self.header.file_size


class ShardSource(Protocol):
    """`generation` names what `open` gives; it is fixed unless `unchanged` says otherwise or `open` raises
    UpdatedError, then the checkpoint begins again (`again` looks what it is now).
    """

    @property
    def name(self) -> str: ...
    @property
    def generation(self) -> str: ...
    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def at_once(self) -> int:
        """How many shards are written at once; as many again are open while the next ones are prepared."""
        ...

    @property
    def shares(self) -> Shares:
        """What reading, hashing and writing are of the pace."""
        ...

    @property
    def side_files(self) -> Mapping[str, bytes]: ...
    def open(self, shard: Shard, pacer: Pacer) -> Buffer: ...
    def unchanged(self) -> bool: ...
    def again(self) -> None: ...
    def held(self, seconds: float) -> contextlib.AbstractContextManager[bool]:
        """Updates wait while it lasts, `seconds` at most; False where that cannot be asked for."""
        ...

    def cpu_seconds(self) -> float | None:
        """CPU time of the process that owns the weights, so far; None where it is not known."""
        ...

    def close(self) -> None: ...


class SlotShards:
    """A slot's generation, leased until `close`: swaps do not touch it, and neither does the agent's death."""

    at_once = 4  # mapped, not copied: any number costs nothing
    shares = MAPPED

    def __init__(self, slot: str, *, socket: str | None = None) -> None:
        self.name = f"slot:{slot}"
        self._client = AgentClient(socket, label="checkpoint")
        try:
            opened = self._client.open(slot)
        except BaseException:
            self._client.close()
            raise
        self.generation = opened.ident
        self._files = {file.name: file for file in opened.files}
        if any(name.startswith("model-tp") for name in self._files):
            self.close()
            raise IncompatibleError(
                f"slot {slot} holds slices of tensors", hint="checkpoint a slot that was loaded without --tp-size"
            )
        self.shards: Sequence[Shard] = tuple(
            Shard(file.name, parse_header(os.pread(file.fd, file.header, 0), file.size, file.name))
            for file in opened.files
            if file.header
        )
        try:
            for shard in self.shards:
                check_is_checkpoint(shard.header.metadata, f"slot {slot}")
        except IncompatibleError:
            self.close()
            raise
        self.side_files: Mapping[str, bytes] = {
            file.name: os.pread(file.fd, file.size, 0) for file in opened.files if not file.header
        }

    def open(self, shard: Shard, pacer: Pacer) -> Buffer:
        return SealedBuffer(self._files[shard.name].fd, shard.size)

    def unchanged(self) -> bool:
        return True

    def again(self) -> None:
        return

    @contextlib.contextmanager
    def held(self, seconds: float) -> Iterator[bool]:
        yield True

    def cpu_seconds(self) -> float | None:
        try:
            with open(f"/proc/{self._client.agent_pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None  # it has died meanwhile
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.fd)
        self._files = {}
        self._client.close()


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of an engine, by its name in a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count * DTYPES[self.dtype].bits // 8


class LiveWeights(Protocol):
    """An engine's weights as they are now. `generation` changes with every update, before its first byte does. `read`
    copies bytes of tensors (row-major) into `view`, one after the other, or raises UpdatedError; `again`: what it reads
    is from now on the generation that there is now. `held`: updates wait, see `ShardSource`.
    """

    @property
    def name(self) -> str: ...
    def tensors(self) -> Sequence[LiveTensor]: ...
    def side_files(self) -> Mapping[str, bytes]: ...
    def generation(self) -> str: ...
    def again(self) -> None: ...
    def read(self, parts: Sequence[Part], view: memoryview) -> None: ...
    def held(self, seconds: float) -> contextlib.AbstractContextManager[bool]: ...
    def close(self) -> None: ...


class LiveShards:
    """An engine's weights, cut into shards of at most `shard_bytes` (a tensor is never cut)."""

    at_once = 1
    shares = COPIED

    def __init__(self, live: LiveWeights, shard_bytes: int = DEFAULT_SHARD) -> None:
        self._live = live
        self.name = live.name
        self.generation = live.generation()
        headers = cut(live.tensors(), shard_bytes)
        total = len(headers)
        names = (
            ["model.safetensors"]
            if total == 1
            else [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
        )
        self.shards: Sequence[Shard] = tuple(
            Shard(name, parse_header(raw, len(raw) + size, name))
            for name, (raw, size) in zip(names, headers, strict=True)
        )
        side = {name: data for name, data in live.side_files().items() if name != INDEX}
        if total > 1:
            side[INDEX] = index_of(self.shards)
        self.side_files: Mapping[str, bytes] = side

    def open(self, shard: Shard, pacer: Pacer) -> Buffer:
        buffer = HostBuffer(shard.size)
        try:
            at = shard.header.header_size
            buffer.view[:at] = shard.header.raw
            for parts in parts_of(shard.header.tensors, lambda: pacer.piece):
                length = sum(part.length for part in parts)
                pacer.read(length)
                began = time.monotonic()
                self._live.read(parts, buffer.view[at : at + length])
                pacer.took(time.monotonic() - began)
                at += length
        except BaseException:
            buffer.close()
            raise
        return buffer

    def unchanged(self) -> bool:
        return self._live.generation() == self.generation

    def again(self) -> None:
        self._live.again()
        self.generation = self._live.generation()

    def held(self, seconds: float) -> contextlib.AbstractContextManager[bool]:
        return self._live.held(seconds)

    def cpu_seconds(self) -> float | None:
        return None  # an adapter does not tell

    def close(self) -> None:
        self._live.close()


def cut(tensors: Sequence[LiveTensor], shard_bytes: int) -> list[tuple[bytes, int]]:
    """(header, bytes of data) of each shard, tensors in their order; one that is larger alone has its own. Pure."""
    groups: list[list[LiveTensor]] = []
    size = 0
    for tensor in tensors:
        if not groups or (size and size + tensor.nbytes > shard_bytes):
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    found: list[tuple[bytes, int]] = []
    for group in groups:
        document: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        # widest elements first: every tensor is aligned to its own
        for tensor in sorted(group, key=lambda item: -DTYPES[item.dtype].bits):
            document[tensor.name] = {
                "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]
            }  # fmt: skip
            at += tensor.nbytes
        found.append((encode_header(document), at))
    return found


def parts_of(tensors: Sequence[TensorInfo], piece: Callable[[], int]) -> Iterator[Sequence[Part]]:
    """The tensors' bytes in their order, cut into reads of `piece()` bytes (fewer where tensors are tiny), asked anew
    for each. Pure but for that.
    """
    parts: list[Part] = []
    left = piece()
    for tensor in tensors:
        start = 0
        while start < tensor.nbytes:
            length = min(left, tensor.nbytes - start)
            parts.append(Part(tensor.name, start, length))
            start, left = start + length, left - length
            if not left or len(parts) == MOST_PARTS:
                yield parts
                parts, left = [], piece()
    if parts:
        yield parts


def index_of(shards: Sequence[Shard]) -> bytes:
    """The index of a Hugging Face folder."""
    total = sum(shard.header.data_size for shard in shards)
    mapping = {tensor.name: shard.name for shard in shards for tensor in shard.header.tensors}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}
    return json.dumps(document, indent=2).encode()
