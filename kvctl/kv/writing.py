"""Chunks and manifests on their way into a repo; used by push, cp and repacking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from kvctl.core.context import Context
from kvctl.kv.codecs import LOSSY
from kvctl.kv.identity import Descriptor
from kvctl.kv.index import PackUse
from kvctl.kv.manifest import PackRow, SessionManifest
from kvctl.kv.names import SessionName
from kvctl.memory.buffers import HostBuffer
from kvctl.repo.chunks import ChunkRef
from kvctl.repo.pushing import Push
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet
from kvctl.transfer.tasks import Place, RunStats, Task


class ChunkWriter:
    """Writes the chunks that a repo lacks, to every replica that lacks them. `written` bytes, `chunks` new ones."""

    def __init__(
        self, push: Push, lanes: LaneSet, ctx: Context, *, budget: int | None = None, max_rate: int | None = None
    ) -> None:
        self._push = push
        self._lanes = lanes
        self._ctx = ctx
        self._budget = budget
        self._max_rate = max_rate
        self._gathers = all(lane.transport.capabilities.gather for lane in lanes.lanes)
        self._buffer = HostBuffer(0)  # for transports that do not gather
        self.stats = RunStats()
        self.written = 0
        self.chunks = 0

    def store(self, datas: Mapping[str, Sequence[memoryview]]) -> dict[str, ChunkRef]:
        """Digest -> chunk, all of them there when it returns; `datas`: the bytes of each in turn. Each digest is looked
        up by a request of its own.
        """
        sizes = {digest: sum(map(len, parts)) for digest, parts in datas.items()}
        refs = self._push.find(sizes, one_by_one=True)
        fresh = self._push.new_many({digest: size for digest, size in sizes.items() if digest not in refs})
        tasks: list[Task] = []
        placing = []
        at = 0
        self._room(0 if self._gathers else sum(ref.size for ref in fresh.values()))
        for digest, ref in fresh.items():
            parts = tuple(datas[digest])
            if not self._gathers:
                self._fill(at, parts)
                parts = ()
            for member in self._push.targets(ref):
                place = (Place(member.index, ref.key),)
                tasks.append(
                    Task(
                        place, 0, ref.size, "write", object_size=ref.size, buffer=self._buffer, buffer_offset=at,
                        parts=parts,
                    )
                )  # fmt: skip
                placing.append((ref, member))
            at += 0 if self._gathers else ref.size
        if tasks:
            executor = Executor(self._lanes.lanes, self._ctx.quiet(), budget=self._budget, max_rate=self._max_rate)
            try:
                executor.run(tasks)
            finally:
                self.stats.add(executor.stats)
            self.written += executor.stats.bytes
        for ref, member in placing:
            self._push.placed(ref, member)
        self.chunks += len(fresh)
        self._push.keep()
        return refs | fresh

    def _fill(self, at: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            self._buffer.view[at : at + len(part)] = part
            at += len(part)

    def _room(self, nbytes: int) -> None:
        if self._buffer.nbytes < nbytes:
            self._buffer.close()
            self._buffer = HostBuffer(nbytes)

    def close(self) -> None:
        self._buffer.close()


def make_manifest(
    session: SessionName,
    parent: int | None,
    descriptor: Descriptor,
    tokens: int,
    hmac_of_tokens: bytes,
    rows: Sequence[PackUse],
    index: Sequence[bytes],
    tokens_ref: ChunkRef | None,
    *,
    producer: Mapping[str, str],
    labels: Mapping[str, str],
    codecs: Sequence[str],
    created: str | None = None,
) -> SessionManifest:
    """A manifest whose generation is still to be given (it says 1 more than its parent)."""
    packs, chunks, tokens_chunk = rows_and_chunks(rows, tokens_ref)
    return SessionManifest(
        tenant=session.tenant,
        session=session.name,
        generation=(parent or 0) + 1,
        parent=parent,
        created=created or datetime.now(UTC).isoformat(timespec="seconds"),
        ns=descriptor.digest,
        tokens=tokens,
        token_hmac=hmac_of_tokens.hex(),
        chunks=chunks,
        packs=packs,
        producer=dict(producer),
        codecs=tuple(codecs),
        lossy=bool(LOSSY & set(codecs)),
        tokens_chunk=tokens_chunk,
        index=tuple(key.hex() for key in index),
        labels=dict(labels),
    )


def rows_and_chunks(
    uses: Sequence[PackUse], tokens_ref: ChunkRef | None
) -> tuple[tuple[PackRow, ...], tuple[tuple[str, int], ...], int | None]:
    """The fields packs, chunks and tokens_chunk of a manifest."""
    positions: dict[str, int] = {}
    sizes: dict[str, int] = {}
    packs = []
    for use in sorted(uses):
        sizes[use.chunk.name] = use.chunk.size
        position = positions.setdefault(use.chunk.name, len(positions))
        packs.append(PackRow(position, use.group, use.first, use.count, use.blocks, use.header, use.total))
    if tokens_ref is not None:
        sizes[tokens_ref.name] = tokens_ref.size
        positions.setdefault(tokens_ref.name, len(positions))
    chunks = tuple((name, sizes[name]) for name in positions)
    return tuple(packs), chunks, None if tokens_ref is None else positions[tokens_ref.name]


def uses_of(manifest: SessionManifest) -> list[PackUse]:
    """The manifest's packs as the index and the planner know them."""
    refs = manifest.refs
    return [
        PackUse(row.group, row.first, row.tokens, row.blocks, row.total, row.header_size, refs[row.chunk])
        for row in manifest.packs
    ]
