"""Opening a stored session for reading: lease, manifest, descriptor, packs' headers, and the verdict from them."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from kvctl.core.context import Context
from kvctl.core.errors import (
    AuthError,
    IncompatibleError,
    IntegrityError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    TransientError,
)
from kvctl.kv import sessions
from kvctl.kv.access import read_chunk, read_descriptor, secret_of
from kvctl.kv.identity import Descriptor, check_compatible
from kvctl.kv.manifest import PackRow, SessionManifest
from kvctl.kv.names import SessionAddress
from kvctl.kv.packs import PackHeader, parse_pack_header
from kvctl.kv.tokens import BlockKey, Extra, chain, same_tokens, token_ids
from kvctl.kv.verdict import GroupVerdict, Limit, Search, Verdict, needed_rows, window_start
from kvctl.repo.chunks import ChunkRef
from kvctl.repo.leases import Hold, lease_manifest
from kvctl.repo.repo import Repo

UNLEASED: Final = "unleased: the credentials are read-only; gc's grace period must outlast this"
_TRIES: Final = 5
_FAST: Final = 0.001  # seconds


@dataclass(slots=True)
class StoredSession:
    """A generation under lease (`hold`; None with read-only credentials), what it means, what is known of its packs.
    A context manager that gives the lease back.
    """

    repo: Repo
    found: sessions.Generation
    manifest: SessionManifest
    descriptor: Descriptor
    hold: Hold | None
    refs: list[ChunkRef]
    headers: dict[PackRow, PackHeader] = field(default_factory=dict)
    bad: dict[PackRow, str] = field(default_factory=dict)
    header_bytes: int = 0
    requests: int = 0
    _keeping: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, repo: Repo, address: SessionAddress, ctx: Context) -> Self:
        """Raises NotFoundError, FormatError, IncompatibleError, and TransientError when no lease can be had."""
        found = sessions.resolve(repo, address)
        hold, data = _lease(repo, found, ctx)
        try:
            manifest = SessionManifest.parse(data, found.key)
            descriptor = read_descriptor(repo, manifest.ns)
            groups = {row.group for row in manifest.packs}
            if not groups <= set(range(len(descriptor.groups))):
                raise IntegrityError(f"{found.key} has packs of groups that its namespace lacks", cause=f"{groups}")
        except BaseException:
            if hold is not None:
                hold.let_go()
            raise
        return cls(repo, found, manifest, descriptor, hold, manifest.refs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.hold is not None:
            self.hold.let_go()

    def keep(self) -> None:
        """Renew the lease when a part of its term is over: call it now and then, from any thread; cheap otherwise.
        Raises TransientError when gc closed it: what is still to be read may be gone.
        """
        if self.hold is not None:
            with self._keeping:
                self.hold.keep()

    def ref(self, row: PackRow) -> ChunkRef:
        return self.refs[row.chunk]

    def read_headers(self, rows: Iterable[PackRow]) -> None:
        """Make `headers` or `bad` know these packs; one small read each, another replica where one is damaged."""
        wanted = [row for row in rows if row not in self.headers and row not in self.bad]
        answers: list[PackHeader | str] = []
        # from a local store a header is there sooner than another thread would be
        fast = True
        while fast and len(answers) < len(wanted):
            started = time.monotonic()
            answers.append(self._header(wanted[len(answers)]))
            fast = time.monotonic() - started < _FAST
        answers += self.repo.each(self._header, wanted[len(answers) :])
        for row, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, PackHeader):
                self.headers[row] = answer
            else:
                self.bad[row] = answer
            self.header_bytes += row.header_size

    def _header(self, row: PackRow) -> PackHeader | str:
        """The header, or why there is none. Raises MemberDownError when members that may have it are down."""
        ref = self.ref(row)
        problem = "no member has it"
        down: KvctlError | None = None
        for member in self.repo.locate(ref.digest):
            if member.down is not None:
                down = member.down
                continue
            try:
                self.requests += 1
                header = parse_pack_header(member.store.get(ref.key, 0, row.header_size), f"pack {ref.name[:16]}..")
            except NotFoundError:
                continue
            except (IntegrityError, IncompatibleError) as error:
                problem = str(error)
                continue
            fault = self._fault(row, header)
            if not fault:
                return header
            problem = fault
        if down is not None:
            raise MemberDownError(
                f"pack {ref.name} of {self.found} cannot be read", cause=str(down), hint="bring the member back"
            )
        what = "missing" if problem == "no member has it" else "damaged"
        return f"the pack of group {row.group} at token {row.first:,} is {what} ({ref.name[:16]}..: {problem})"

    def _fault(self, row: PackRow, header: PackHeader) -> str:
        geometry = header.geometry
        if header.ns != self.manifest.ns or geometry.index != row.group:
            return "it belongs to another namespace or group"
        if geometry.group != self.descriptor.groups[row.group] or geometry.dtype != self.descriptor.dtype:
            return "its geometry is not the descriptor's"
        if header.pack_size != self.ref(row).size or geometry.blocks != row.total:
            return f"it is of {header.pack_size} bytes, the manifest says {self.ref(row).size}"
        last = header.blocks[row.blocks - 1]
        if last.end != row.end or (not geometry.group.recurrent and header.first != row.first):
            return f"it holds tokens [{header.first}, {last.end}), the manifest says [{row.first}, {row.end})"
        return ""


def _lease(repo: Repo, found: sessions.Generation, ctx: Context) -> tuple[Hold | None, bytes]:
    problem: TransientError | None = None
    for attempt in range(_TRIES):
        try:
            return lease_manifest(repo, found.key, label=f"kv pull {found}")
        except AuthError:
            return None, repo.read_meta(found.key)
        except MemberDownError:
            raise
        except TransientError as error:  # gc looks at its chunks just now, or the manifest was repacked
            problem = error
            if ctx.cancel.wait(ctx.retry.base * 2**attempt):
                ctx.cancel.check("waiting for a lease")
    assert problem is not None
    raise problem


@dataclass(slots=True)
class Wish:
    """What a caller wants of a session. `tokens`: its transcript; None: all of it, whatever its tokens are.
    `descriptor`: the caller's own, which must be the session's.
    """

    tokens: array[int] | None = None
    extras: Sequence[Extra] = ()
    descriptor: Descriptor | None = None
    key: bytes | None = None


class Resolver:
    """Finds the usable prefix of an open session; again when a pack turns out to be damaged."""

    def __init__(self, session: StoredSession, wish: Wish, what: str) -> None:
        self.session = session
        manifest = session.manifest
        if wish.descriptor is not None:
            check_compatible(wish.descriptor, session.descriptor, f"the KV of {what}")
        secret = secret_of(session.repo, wish.key, manifest.tenant)
        tokens = wish.tokens
        self.compared = tokens is not None
        blocks: Sequence[BlockKey] | None = None
        if tokens is not None:
            blocks = chain(secret, manifest.ns, tokens, session.descriptor.block_tokens, wish.extras)
        self.search = Search(
            manifest,
            session.descriptor,
            manifest.tokens if tokens is None else len(tokens),
            blocks,
            session.headers,
            session.bad,
        )

    def resolve(self) -> Limit:
        """Reads the headers that the answer depends on, and no other."""
        session = self.session
        full = [
            number
            for number, group in enumerate(session.descriptor.groups)
            if group.kind != "sliding" and not group.recurrent
        ]
        known = -1
        limit = self.search.usable()
        while True:
            rows = [row for group in full for row in needed_rows(session.manifest, group, 0, limit.tokens)]
            session.read_headers(rows)
            limit = self.search.usable()
            session.read_headers(self.search.wanted_rows(limit.tokens))
            limit = self.search.usable()
            if limit.tokens == known:
                return limit
            known = limit.tokens

    def verdict(self, limit: Limit, nbytes: int = 0) -> Verdict:
        session, manifest = self.session, self.session.manifest
        groups = []
        for number, group in enumerate(session.descriptor.groups):
            start = window_start(group, limit.tokens)
            rows = needed_rows(manifest, number, start, limit.tokens)
            groups.append(GroupVerdict(number, group.kind, start, limit.tokens, len(rows)))
        return Verdict(
            str(session.found.session),
            session.found.generation,
            manifest.tokens,
            self.search.wanted,
            limit.tokens,
            limit.reason,
            limit.damaged,
            tuple(groups),
            nbytes,
            session.header_bytes,
            self.compared,
            tuple(session.bad.values()),
        )


def stored_tokens(session: StoredSession, secret: bytes) -> array[int] | None:
    """The token ids, when they are stored. Raises IntegrityError when they are not those that the manifest says."""
    manifest = session.manifest
    if manifest.tokens_chunk is None:
        return None
    data = read_chunk(session.repo, session.refs[manifest.tokens_chunk])
    if not same_tokens(secret, data, bytes.fromhex(manifest.token_hmac)):
        raise IntegrityError(f"the token ids of {session.found} are not those that its manifest says")
    return token_ids(data, f"the tokens of {session.found}")
