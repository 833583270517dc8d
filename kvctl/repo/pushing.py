"""Writing into a repo: declare, write chunks, commit a manifest. Interrupted anywhere, nothing half is visible,
and running it again writes only what is missing.

    push = Push.begin(repo, label)
    have = push.find({digest: size, ..})       complete on all their replicas, and safe to rely on
    refs = push.new_many({digest: size, ..})   declared before any byte is written
    for ref in refs: write its bytes to push.targets(ref), then push.placed(ref, member)
    push.commit(key, manifest)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from kvctl.core.errors import (
    ConflictError,
    IntegrityError,
    MemberDownError,
    NotFoundError,
    TransientError,
)
from kvctl.repo import manifests
from kvctl.repo.chunks import ChunkRef, name_of_key
from kvctl.repo.condemned import Condemned, read_condemned
from kvctl.repo.layout import CHUNKS, INTENTS
from kvctl.repo.leases import TTL, Hold
from kvctl.repo.members import RepoMember
from kvctl.transports.api import ObjectInfo

if TYPE_CHECKING:
    from kvctl.core.context import Context
    from kvctl.repo.repo import Repo

# Up to this many digests of a push are looked up one by one, more by one list of all chunks.
FEW: Final = 32


@dataclass(frozen=True, slots=True)
class _Seen:
    """The condemned set, and the chunks listed after it was read: digest -> name -> member id -> size."""

    condemned: Condemned
    chunks: Mapping[str, Mapping[str, Mapping[str, int]]]


class Push:
    """One writer's run. Calls come from one thread; the bytes may be written by others."""

    def __init__(self, repo: Repo, hold: Hold, ctx: Context, *, allow_degraded: bool, few: int) -> None:
        self.repo = repo
        self.ctx = ctx
        self._hold = hold
        self._allow_degraded = allow_degraded
        self._few = few
        self._epoch = repo.format.epoch
        self._present: dict[str, set[str]] = {}  # chunk name -> ids of members known to have it
        self._partial: dict[str, ChunkRef] = {}
        self._own: dict[str, ChunkRef] = {}  # what this push writes, by digest
        self._asked = 0
        self._index: _Seen | None = None
        self._done = False

    @classmethod
    def begin(
        cls,
        repo: Repo,
        label: str,
        ctx: Context | None = None,
        *,
        ttl: float = TTL,
        allow_degraded: bool = False,
        few: int = FEW,
    ) -> Push:
        """Start a push; `label` says what of, for people. Its intent expires `ttl` seconds after its last sign of
        life. `allow_degraded`: replicas whose member is down are left to `repair` instead of failing. `few`: up to
        so many digests are looked up one by one.
        """
        return cls(
            repo,
            Hold.begin(repo, INTENTS, label, ttl=ttl),
            ctx or repo.ctx,
            allow_degraded=allow_degraded,
            few=few,
        )

    @property
    def id(self) -> str:
        return self._hold.id

    def find(
        self, wanted: Mapping[str, int] | Iterable[tuple[str, int]], *, one_by_one: bool = False
    ) -> dict[str, ChunkRef]:
        """Digest -> chunk for those (digest, size) that are complete on every replica and not condemned. They are
        declared: gc leaves them alone until this push ends. Chunks that only some replicas have are remembered,
        and completed by `new`. `one_by_one`: a request for each digest, so that the cost does not follow what else
        the repo holds; else many digests are looked up by one list of all chunks.
        """
        sizes = dict(wanted)
        self._asked += 0 if one_by_one else len(sizes)
        while True:
            seen = self._see(sizes)
            whole, partial = self._look(sizes, seen)
            if not whole and not partial:
                return {}
            self._hold.declare(ref.name for ref in [*whole.values(), *partial.values()])
            # an unchanged set: nothing was condemned, deleted and forgotten since we listed
            if read_condemned(self.repo).seq == seen.condemned.seq:
                self._partial.update(partial)
                for ref in (*whole.values(), *partial.values()):
                    self._present[ref.name] = self._holders(seen, ref)
                return whole
            self._index = None

    def adopt(self, refs: Iterable[ChunkRef]) -> set[str]:
        """The names of those of these very incarnations that are whole on every replica and not condemned; they are
        declared, as by `find`. One look at each copy, whatever else the repo holds.
        """
        wanted = {ref.name: ref for ref in refs}
        if not wanted:
            return set()
        self._hold.declare(wanted)
        condemned = read_condemned(self.repo).names
        usable = [ref for name, ref in wanted.items() if name not in condemned]
        # there after it was declared, and not condemned by then: no gc can have left the hold out
        asks = [(ref, member) for ref in usable for member in self.targets(ref)]

        def is_whole(ask: tuple[ChunkRef, RepoMember]) -> bool:
            try:
                return ask[1].store.stat(ask[0].key).size == ask[0].size
            except NotFoundError:
                return False

        for (ref, member), there in zip(asks, self.repo.each(is_whole, asks), strict=True):
            if there:
                self.placed(ref, member)
        return {ref.name for ref in usable if not self.targets(ref)}

    def _see(self, sizes: Mapping[str, int]) -> _Seen:
        """The chunks that may serve, as listed after the condemned set was read: a few digests one by one; all
        chunks once, when there are more in this push."""
        if self._index is not None:
            return self._index
        condemned = read_condemned(self.repo)
        if self._asked > self._few:
            self._index = _Seen(condemned, self._list([(member, CHUNKS) for member in self.repo.up]))
            return self._index
        asks = [(member, f"{CHUNKS}{digest[:2]}/{digest}.") for digest in sizes for member in self.required(digest)]
        return _Seen(condemned, self._list(asks))

    def _list(self, asks: Sequence[tuple[RepoMember, str]]) -> dict[str, dict[str, dict[str, int]]]:
        found: dict[str, dict[str, dict[str, int]]] = {}
        lists = self.repo.each(lambda ask: [(i.key, i.size) for i in ask[0].store.list(ask[1])], asks)
        for (member, _), items in zip(asks, lists, strict=True):
            for key, size in items:
                name = name_of_key(key)
                if name is not None:
                    found.setdefault(name[:64], {}).setdefault(name, {})[member.id] = size
        return found

    def _look(self, sizes: Mapping[str, int], seen: _Seen) -> tuple[dict[str, ChunkRef], dict[str, ChunkRef]]:
        whole: dict[str, ChunkRef] = {}
        partial: dict[str, ChunkRef] = {}
        for digest, size in sizes.items():
            required = {member.id for member in self.required(digest)}
            own = self._own.get(digest)
            if own is not None and own.size == size and required <= self._present[own.name]:
                whole[digest] = own
            for name in sorted(seen.chunks.get(digest, ())):
                ref = ChunkRef.parse(name, size)
                have = self._holders(seen, ref)
                if have and name not in seen.condemned.names and digest not in whole:
                    (whole if required <= have else partial).setdefault(digest, ref)
        return whole, {digest: ref for digest, ref in partial.items() if digest not in whole}

    def _holders(self, seen: _Seen, ref: ChunkRef) -> set[str]:
        """Ids of the members that have the chunk in the right size."""
        copies = seen.chunks.get(ref.digest, {}).get(ref.name, {})
        return {member for member, size in copies.items() if size == ref.size} | self._present.get(ref.name, set())

    def required(self, digest: str) -> list[RepoMember]:
        """The members that must have the chunk. Raises MemberDownError when one of them is down, unless the
        push may be degraded and another one is up.
        """
        members = self.repo.places(digest)
        up = [member for member in members if member.down is None]
        if len(up) < len(members) and not (self._allow_degraded and up):
            down = next(member for member in members if member.down is not None)
            raise MemberDownError(
                f"cannot write all replicas: member {down.name} is down",
                cause=str(down.down),
                hint="bring it back, or replace it with `kvctl repo repair --replace`",
            )
        return up

    def new(self, digest: str, size: int) -> ChunkRef:
        """See `new_many`."""
        return self.new_many({digest: size})[digest]

    def new_many(self, wanted: Mapping[str, int] | Iterable[tuple[str, int]]) -> dict[str, ChunkRef]:
        """Digest -> chunk to write, declared before this returns; one request for any number. A chunk that
        `find` saw on some replicas is taken up again: `targets` names only the members that lack it. Asked twice
        for one digest, it gives one chunk.
        """
        refs: dict[str, ChunkRef] = {}
        for digest, size in dict(wanted).items():
            self.required(digest)
            ref = self._own.get(digest) or self._partial.pop(digest, None) or ChunkRef.fresh(digest, size)
            self._own[digest] = ref
            self._present.setdefault(ref.name, set())
            refs[digest] = ref
        self._hold.declare(ref.name for ref in refs.values())
        return refs

    def targets(self, ref: ChunkRef) -> list[RepoMember]:
        """The members that still lack the chunk, as far as this push knows."""
        have = self._present.get(ref.name, set())
        return [member for member in self.required(ref.digest) if member.id not in have]

    def placed(self, ref: ChunkRef, member: RepoMember) -> None:
        """The chunk's bytes are durable on `member`."""
        self._present.setdefault(ref.name, set()).add(member.id)

    def keep(self) -> None:
        """Sign of life for long writes; cheap. Raises TransientError when the push waited too long."""
        self._hold.keep()

    def commit(self, key: str, manifest: bytes, *, if_absent: bool = True, if_version: str | None = None) -> ObjectInfo:
        """Make the manifest visible under `key`, and end the push. Everything it names is there and stays.

        Raises ConflictError when `key` is taken by another manifest or gc condemned a chunk meanwhile,
        IntegrityError when a chunk is missing or short, TransientError when the push was too slow for its intent
        or the members changed: run it again. Nothing is visible after an error, except that a MemberDownError
        or TransientError from the put itself leaves open whether it happened; the next run finds out.
        """
        refs = manifests.chunk_refs(manifests.parse(manifest, key), key)
        stray = [ref.name for ref in refs if ref.name not in self._hold.names]
        if stray:
            raise IntegrityError(
                f"manifest {key} names a chunk that this push neither found nor wrote",
                cause=f"{stray[0]} ({len(stray)} of {len(refs)})",
            )
        if self.repo.format.epoch != self._epoch:
            self._present.clear()
            self._epoch = self.repo.format.epoch
        self._check_present(refs)
        condemned = read_condemned(self.repo).names
        gone = [ref.name for ref in refs if ref.name in condemned]
        if gone:
            raise ConflictError(
                f"gc condemned {len(gone)} of the {len(refs)} chunks of {key} during the push",
                cause=gone[0],
                hint="run it again: they are written anew",
            )
        self._hold.keep()
        existed = self._exists(key, manifest)
        before = self.repo.read_meta(key) if if_version is not None else None
        info = self.repo.commit_meta(key, manifest, if_absent=if_absent and if_version is None, if_version=if_version)
        try:
            self._hold.check_open()
        except TransientError:
            if before is not None:
                self.repo.commit_meta(key, before, if_version=info.version)
            elif not existed:
                self.repo.delete_meta(key)
            raise
        self._end()
        return info

    def _exists(self, key: str, manifest: bytes) -> bool:
        try:
            return self.repo.read_meta(key) == manifest
        except NotFoundError:
            return False

    def _check_present(self, refs: Iterable[ChunkRef]) -> None:
        asks = [(ref, member) for ref in refs for member in self.targets(ref)]

        def size_of(ask: tuple[ChunkRef, RepoMember]) -> int | None:
            try:
                return ask[1].store.stat(ask[0].key).size
            except NotFoundError:
                return None

        for (ref, member), size in zip(asks, self.repo.each(size_of, asks), strict=True):
            if size != ref.size:
                raise IntegrityError(
                    f"chunk {ref.name} is not whole on member {member.name}",
                    cause="it is missing" if size is None else f"{size} bytes, expected {ref.size}",
                    hint="run the push again",
                )
            self.placed(ref, member)

    def abort(self) -> None:
        """End the push without a manifest; what it wrote is garbage for gc. Harmless after a commit."""
        if not self._done:
            self._end()

    def _end(self) -> None:
        self._done = True
        self._hold.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
