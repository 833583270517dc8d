"""`kv cp`: sessions from one repo to another. Only what is missing moves, verified on the way; an interrupted copy goes
on when it is run again.

Between repos whose block keys are made under the same secret, packs are copied as they are: keys travel, and the copy
shares blocks with whatever has them. Under another secret (another key file, or another tenant with one) every pack
gets new keys: that needs the token ids, stored or brought.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    FormatError,
    IncompatibleError,
    IntegrityError,
    InterruptedRunError,
    MemberDownError,
    NotFoundError,
    UsageError,
)
from kvctl.kv import sessions
from kvctl.kv.access import adopt_key, check_key, secret_of, write_descriptor
from kvctl.kv.index import Node, PackUse, make_nodes, node_key, packs_of, read_once, write_nodes
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.names import SessionName, parse_session
from kvctl.kv.reading import UNLEASED, StoredSession, stored_tokens
from kvctl.kv.rewriting import rewrite_pack
from kvctl.kv.tokens import BlockKey, Extra, chain, domain_secret, same_tokens, token_bytes, token_hmac
from kvctl.kv.writing import ChunkWriter, make_manifest, uses_of
from kvctl.memory.buffers import HostBuffer
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes, transports_of
from kvctl.transfer.report import Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import Place, RunStats, StageClock, Task

BATCH: Final = 64 << 20  # bytes of chunks in memory at once
FEW: Final = 32
Ends = tuple[LaneSet, LaneSet]  # what reads, what writes
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CopySession:
    """`address` (TENANT/NAME[@GENERATION]) of the repo `source` becomes the next generation of `new_address`
    (TENANT/NAME; the same) in the repo `target`. `tokens`, `extras`: the transcript, for a copy that needs new keys.
    `transport`, `transport_options`: as `open_lanes`, for what reads; `target_transport`, `target_options`: for what
    writes.
    """

    source: tuple[StoreConfig, ...]
    address: str
    target: tuple[StoreConfig, ...]
    new_address: str | None = None
    source_key: bytes | None = None
    target_key: bytes | None = None
    tokens: array[int] | None = None
    extras: tuple[Extra, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    transport: str = "auto"
    transport_options: Mapping[str, str] = field(default_factory=dict)
    target_transport: str = "auto"
    target_options: Mapping[str, str] = field(default_factory=dict)
    max_rate: int | None = None


def copy_session(request: CopySession, ctx: Context) -> Report:
    """Raises IncompatibleError when new keys are needed and cannot be made, and what reading the source and pushing to
    the target raise. Nothing is visible before the manifest. `extra` says whether keys travel ('keys').
    """
    watch = Stopwatch()
    address = parse_session(request.address)
    target_name = parse_session(request.new_address or str(address.session))
    if target_name.generation is not None:
        raise UsageError(f"{request.new_address!r}: a copy becomes the next generation", hint="leave @GENERATION out")
    with (
        Repo.open(request.source, ctx) as source,
        Repo.open(request.target, ctx) as target,
        open_ends(request, source, target) as ends,
        StoredSession.open(source, address, ctx) as session,
    ):
        report = Report("kv cp", f"{session.found} in repo {source.id[:8]}")
        name = target_name.session
        old = secret_of(source, request.source_key, session.manifest.tenant)
        check_key(target, request.target_key)
        new = domain_secret(request.target_key, name.tenant)
        keys = _new_keys(request, session, old, new)
        adopt_key(target, request.target_key, name.tenant)
        with Push.begin(target, f"kv cp {name}", ctx) as push:
            copying = Copying(request, session, target, ends, push, name, new, keys, report, ctx)
            try:
                copying.run(watch)
            except InterruptedRunError as stop:
                stop.hint = stop.hint or "run the same command again: what is copied already is not copied again"
                raise
            finally:
                copying.close()
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return report


@contextmanager
def open_ends(request: CopySession, source: Repo, target: Repo) -> Iterator[Ends]:
    """The lanes of a copy. Raises as `open_lanes`."""
    with (
        closing(
            open_lanes(
                source.up, transport=request.transport, options=request.transport_options, max_rate=request.max_rate
            )
        ) as reading,
        closing(
            open_lanes(
                target.up, transport=request.target_transport, options=request.target_options, max_rate=request.max_rate
            )
        ) as writing,
    ):
        yield reading, writing


@dataclass(frozen=True, slots=True)
class _Keys:
    """The new chain of a copy that is re-keyed, and the tokens it is of."""

    blocks: Sequence[BlockKey]
    tokens: array[int]


def _new_keys(request: CopySession, session: StoredSession, old: bytes, new: bytes) -> _Keys | None:
    """None when keys can travel. Raises IncompatibleError when they cannot and new ones cannot be made."""
    if old == new:
        return None
    manifest, descriptor = session.manifest, session.descriptor
    tokens = request.tokens if request.tokens is not None else stored_tokens(session, old)
    problem = ""
    if tokens is None:
        problem = "its token ids are not stored, and none were given"
    elif not same_tokens(old, tokens, bytes.fromhex(manifest.token_hmac)):
        problem = "the token ids given are not its own"
    elif descriptor.salt is not None:
        problem = "it is salted, and the salt itself is stored nowhere"
    if problem or tokens is None:
        raise IncompatibleError(
            f"{session.found} cannot be copied there: its blocks need keys under another secret",
            cause=problem,
            hint="give the transcript, or push the session again at the target",
        )
    blocks = chain(new, descriptor.digest, tokens, descriptor.block_tokens, request.extras)
    own = chain(old, descriptor.digest, tokens, descriptor.block_tokens, request.extras)
    row = session.manifest.packs[0]
    session.read_headers([row])
    header = session.headers.get(row)
    if header is not None and not descriptor.groups[row.group].recurrent:
        at = row.first // descriptor.block_tokens
        if header.blocks[0].key != own[at].key:
            raise IncompatibleError(
                f"{session.found} cannot be copied there: its blocks mean more than their tokens",
                cause="they were pushed with extras (images, positions), and other ones or none were given",
            )
    return _Keys(blocks, tokens)


class Copying:
    """A copy under way; a context for its lanes and memory, given back by `close`."""

    def __init__(
        self,
        request: CopySession,
        session: StoredSession,
        target: Repo,
        ends: Ends,
        push: Push,
        name: SessionName,
        secret: bytes,
        keys: _Keys | None,
        report: Report,
        ctx: Context,
    ) -> None:
        self.request = request
        self.session = session
        self.target = target
        self.reading, self.writing = ends
        self.push = push
        self.name = name
        self.secret = secret
        self.keys = keys
        self.report = report
        self.ctx = ctx
        self.clock = StageClock()
        self.stats = RunStats()
        self.fetched = 0
        self.writer = ChunkWriter(push, self.writing, ctx, max_rate=request.max_rate)
        self.buffer = HostBuffer(0)

    def close(self) -> None:
        self.reading.close()
        self.writing.close()
        self.writer.close()
        self.buffer.close()

    def run(self, watch: Stopwatch) -> None:
        session, report = self.session, self.report
        manifest = session.manifest
        watch.ready()
        refs = session.refs
        uses = uses_of(manifest)
        if self.keys is None:
            made = self._copy_all(refs)
            new_uses = [replace(use, chunk=made[use.chunk.digest]) for use in uses]
        else:
            new_uses = self._rekey_all(uses, self.keys)
            made = self._copy_all([] if manifest.tokens_chunk is None else [refs[manifest.tokens_chunk]])
        tokens_ref = made[refs[manifest.tokens_chunk].digest] if manifest.tokens_chunk is not None else None
        write_descriptor(self.target, session.descriptor)
        nodes = self.nodes(new_uses)
        write_nodes(self.target, manifest.ns, nodes, self._whole)
        hmac_of = bytes.fromhex(manifest.token_hmac)
        if self.keys is not None:
            hmac_of = token_hmac(self.secret, self.keys.tokens)
        generations = sessions.list_generations(self.target, self.name.prefix)
        parent = generations[-1].generation if generations else None
        copied = make_manifest(
            self.name, parent, session.descriptor, manifest.tokens, hmac_of, new_uses, [node.key for node in nodes],
            tokens_ref, producer=manifest.producer, labels={**manifest.labels, **self.request.labels},
            codecs=manifest.codecs, created=manifest.created,
        )  # fmt: skip
        generation, new = self._commit(copied, parent)
        fill(report, self.stats, self.writing, self.clock.busy(), 1, seconds=watch.since_ready)
        report.transport = transports_of(self.reading, self.writing)
        report.paths = [lane.report() for lane in (*self.reading.lanes, *self.writing.lanes)]
        report.target = f"{self.name}@{generation} in repo {self.target.id[:8]}"
        report.bytes = sum(ref.size for ref in refs)
        report.needed = report.fetched = self.fetched
        report.written = self.writer.written
        report.objects = self.writer.chunks
        report.verified = Verification("full", "", self.fetched)
        report.extra |= {
            "session": str(self.name),
            "generation": generation,
            "new_generation": new,
            "tokens": manifest.tokens,
            "leased": session.hold is not None,
            "keys": "travel" if self.keys is None else "made anew",
            "new_chunks": self.writer.chunks,
            "shared_chunks": len(refs) - self.writer.chunks,
        }
        if session.hold is None:
            report.notes.append(UNLEASED)
        report.notes.append(
            "block keys and token HMACs travel with the packs"
            if self.keys is None
            else "no key travels: every block was keyed anew under the target's secret"
        )

    def _whole(self, refs: Sequence[ChunkRef]) -> bool:
        return self.push.adopt(refs) == {ref.name for ref in refs}

    def _commit(self, manifest: SessionManifest, parent: int | None) -> tuple[int, bool]:
        if parent is not None:
            known = sessions.read_session(self.target, self.name.key(parent))
            if same_content(known, manifest):
                self.report.notes.append(f"generation {parent} holds exactly this already")
                return parent, False
        generation = sessions.commit_generation(
            self.push, self.target, self.name, lambda number: replace(manifest, generation=number).to_bytes()
        )
        return generation, True

    # -- chunks as they are --------------------------------------------------------------------------------

    def _copy_all(self, refs: Sequence[ChunkRef]) -> dict[str, ChunkRef]:
        """Digest -> chunk of the target."""
        found: dict[str, ChunkRef] = {}
        for few in _batches(refs, lambda _: 0):
            found |= self.push.find({ref.digest: ref.size for ref in few}, one_by_one=True)
        missing = [ref for ref in refs if ref.digest not in found]
        self.ctx.progress.begin("copying", sum(ref.size for ref in missing))
        try:
            for batch in _batches(missing, lambda ref: ref.size):
                datas = self._read(batch)
                found |= self.writer.store({ref.digest: (datas[ref.name],) for ref in batch})
                self.ctx.progress.advance(sum(ref.size for ref in batch))
        finally:
            self.ctx.progress.end()
        return found

    def _read(self, refs: Sequence[ChunkRef]) -> dict[str, memoryview]:
        """Whole chunks of the source in our buffer, verified by digest; good until the next call."""
        self.ctx.cancel.check("copying")
        self.session.keep()
        nbytes = sum(ref.size for ref in refs)
        if self.buffer.nbytes < nbytes:
            self.buffer.close()
            self.buffer = HostBuffer(nbytes)
        tasks: list[Task] = []
        datas: dict[str, memoryview] = {}
        at = 0
        for ref in refs:
            members = self.session.repo.locate(ref.digest)
            places = tuple(Place(member.index, ref.key) for member in members if member.down is None)
            if not places:
                raise MemberDownError(
                    f"pack {ref.name} cannot be read: member {members[0].name} is down", cause=str(members[0].down)
                )
            task = Task(places, 0, ref.size, object_size=ref.size, buffer=self.buffer, buffer_offset=at)
            tasks.append(replace(task, on_bytes=self._verifier(ref)))
            datas[ref.name] = self.buffer.view[at : at + ref.size]
            at += ref.size
        executor = Executor(self.reading.lanes, self.ctx.quiet(), max_rate=self.request.max_rate)
        try:
            executor.run(tasks)
        except NotFoundError as error:
            raise IntegrityError(
                f"{self.session.found} cannot be copied: one of its packs is missing",
                cause=str(error),
                hint="`kvctl repo check` lists the holes",
            ) from error
        finally:
            self.stats.add(executor.stats)
        self.fetched += nbytes
        return datas

    def _verifier(self, ref: ChunkRef) -> Callable[[Task, memoryview], None]:
        def verify(_: Task, view: memoryview) -> None:
            with self.clock.timed("digest"):
                got = digest_of(view)
            if got != ref.digest:
                raise IntegrityError(f"{ref.key}: the pack is damaged", cause=f"its digest is {got}")

        return verify

    # -- new keys ------------------------------------------------------------------------------------------

    def _rekey_all(self, uses: Sequence[PackUse], keys: _Keys) -> list[PackUse]:
        size = self.session.descriptor.block_tokens
        made: list[PackUse] = []
        self.ctx.progress.begin("copying", sum(use.chunk.size for use in uses))
        try:
            for batch in _batches(uses, lambda use: use.chunk.size):
                datas = self._read([use.chunk for use in batch])
                packs: list[tuple[PackUse, str, memoryview]] = []
                for use in batch:
                    recurrent = self.session.descriptor.groups[use.group].recurrent
                    begin = len(keys.blocks) - 1 if recurrent else use.first // size
                    blocks = keys.blocks[begin : begin + use.blocks]
                    with self.clock.timed("encode"):
                        data = rewrite_pack(
                            datas[use.chunk.name], self.session.manifest.ns, blocks, use.blocks, use.chunk.key
                        )
                    packs.append((use, digest_of(data), data))
                refs = self.writer.store({digest: (data,) for _, digest, data in packs})
                for use, digest, data in packs:
                    header = int.from_bytes(data[12:16], "little")
                    made.append(replace(use, chunk=refs[digest], total=use.blocks, header=header))
                self.ctx.progress.advance(sum(use.chunk.size for use in batch))
        finally:
            self.ctx.progress.end()
        return made

    def nodes(self, uses: Sequence[PackUse]) -> list[Node]:
        """The index nodes at the target: the source's, naming the target's packs; made anew with new keys."""
        session, manifest = self.session, self.session.manifest
        if self.keys is not None:
            return make_nodes(self.secret, self.keys.blocks, token_bytes(self.keys.tokens), uses, session.descriptor)

        def read(key: str) -> Node | None:
            where = node_key(manifest.ns, bytes.fromhex(key))
            try:
                node = Node.parse(read_once(session.repo, where), where)
            except (NotFoundError, FormatError, IncompatibleError):
                return None
            return replace(node, packs=packs_of(uses, node.tokens, session.descriptor))

        return [node for node in session.repo.each(read, manifest.index) if node is not None]


def _batches(items: Sequence[_T], size_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    batch: list[_T] = []
    size = 0
    for item in items:
        if batch and (size + size_of(item) > BATCH or len(batch) == FEW):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


def same_content(a: SessionManifest, b: SessionManifest) -> bool:
    """Whether two generations hold the same blocks, whichever incarnations of packs they lie in."""

    def content(manifest: SessionManifest) -> object:
        rows = [(row.group, manifest.chunks[row.chunk][0][:64], row.first, row.tokens) for row in manifest.packs]
        tokens = manifest.tokens_chunk is not None
        return manifest.ns, manifest.tokens, manifest.token_hmac, rows, tokens, dict(manifest.labels)

    return content(a) == content(b)
