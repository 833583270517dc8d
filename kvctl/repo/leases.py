"""Holds: chunk names that gc must leave alone for a while. Readers hold leases, writers hold intents.

A hold is an object `<id>.json` on one member (any: gc reads all) with the names it began with, and parts
`<id>/<n>.json` with those that came later. It has an expiry by that member's clock, but a hold ends only when gc
*closes* it by a conditional put. A holder that finds its hold still open therefore knows that no gc has ever left it
out, whatever the clocks say.

The rule that makes a held chunk safe: declare the name first, then read the condemned set. gc publishes that set
before it reads holds for its last look, so either gc sees the hold or the holder sees the condemned name. A name
leaves the set once its objects are deleted, so the holder also needs proof that the chunk was there after it
declared: writers compare the set with the one they read before they listed chunks, readers look whether the
manifest is still there.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from kvctl.core.errors import (
    ConflictError,
    FormatError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    TransientError,
)
from kvctl.repo import manifests
from kvctl.repo.layout import INTENTS, LEASES
from kvctl.repo.members import RepoMember
from kvctl.repo.moments import parse_moment
from kvctl.repo.process import identity, is_gone

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo

TTL: Final = 6 * 3600.0
SCHEMA: Final = "kvctl.hold/1"
_LET_GO: Final = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class HoldInfo:
    """A hold as gc sees it: on which member, until when (that member's clock), what it names."""

    member: RepoMember
    key: str
    version: str
    label: str
    expires: datetime
    open: bool
    names: frozenset[str]
    parts: tuple[str, ...]
    owner: str

    def over(self) -> bool:
        """Whether the hold may be closed: it expired, or its process is known to be gone."""
        return is_gone(self.owner) or self.expires <= self.member.store.now()


class Hold:
    """One hold of ours. Not thread-safe: its owner calls it."""

    def __init__(
        self, member: RepoMember, prefix: str, hold_id: str, label: str, ttl: float, names: Sequence[str] = ()
    ) -> None:
        self.member = member
        self.id = hold_id
        self.key = f"{prefix}{hold_id}.json"
        self.names = set(names)
        self._first = names
        self._prefix = prefix
        self._label = label
        self._ttl = ttl
        self._version = ""
        self._parts: list[str] = []
        self._renewed = 0.0
        self._due = 0.0

    @classmethod
    def begin(cls, repo: Repo, prefix: str, label: str, *, ttl: float = TTL, names: Iterable[str] = ()) -> Hold:
        """A hold of `names`, on the first member that takes it. `ttl` in seconds.

        Raises MemberDownError when none does, AuthError with read-only credentials.
        """
        repo.format.check_can("write")
        hold_id = secrets.token_hex(16)
        first = sorted(set(names))
        problem: TransientError | None = None
        for member in repo.up:
            hold = cls(member, prefix, hold_id, label, ttl, first)
            try:
                hold._put()  # nobody else has this id: no condition, which some stores must first be asked about
            except TransientError as error:
                problem = error
                continue
            return hold
        raise MemberDownError("no member of the repo takes a lease", cause=str(problem), hint="see `kvctl repo status`")

    def _put(self, *, if_version: str | None = None) -> None:
        started = time.monotonic()
        expires = self.member.store.now() + timedelta(seconds=self._ttl)
        document = _document(self.id, self._label, expires, "open", identity(), self._first)
        info = self.member.store.put(self.key, document, if_version=if_version)
        self._version = info.version
        self._renewed = started
        self._due = started + self._ttl / 3

    def declare(self, names: Iterable[str]) -> None:
        """Hold these names too, from the moment this returns. Raises TransientError when gc closed the hold."""
        fresh = sorted(set(names) - self.names)
        if fresh:
            part = f"{self._prefix}{self.id}/{len(self._parts):06d}.json"
            self.member.store.put(part, json.dumps({"names": fresh}).encode())
            self._parts.append(part)
            self.names.update(fresh)
        self.keep()

    def keep(self) -> None:
        """Renew the hold when a third of its time is gone; cheap otherwise. Raises as `declare`."""
        now = time.monotonic()
        if now < self._due:
            return
        try:
            self.renew()
        except MemberDownError:
            if now - self._renewed > self._ttl:
                raise
            self._due = now + self._ttl / 30  # gc waits for this member too

    def renew(self) -> None:
        try:
            self._put(if_version=self._version)
        except (ConflictError, NotFoundError) as problem:
            raise _lost(self._label, problem) from problem

    def check_open(self) -> None:
        """Raises TransientError when gc closed the hold: what it names may be gone. Also when its member does not
        answer and the last renewal is too long ago to be sure without it.
        """
        try:
            document, _ = _parse(self.member.store.get(self.key), self.key)
        except NotFoundError as problem:
            raise _lost(self._label, problem) from problem
        except TransientError:
            # gc runs with all members only, and closes what has expired: a young hold was open when its member left
            if time.monotonic() - self._renewed < self._ttl / 2:
                return
            raise
        if document["state"] != "open":
            raise _lost(self._label, None)

    def release(self) -> None:
        """Give up the hold. Crashing half way leaves parts that gc sweeps."""
        self.member.store.delete([self.key])
        if self._parts:
            self.member.store.delete(self._parts)

    def let_go(self) -> None:
        """Give up the hold, at the end of what it was for: raises no KvctlError, and waits for its member for seconds
        only. A member that went away says so after its whole timeout, and holds left there end by themselves.
        """
        ended: list[BaseException] = []

        def release() -> None:
            try:
                self.release()
            except KvctlError:
                pass
            except BaseException as error:
                ended.append(error)

        releasing = threading.Thread(target=release, name="kvctl-let-go", daemon=True)
        releasing.start()
        releasing.join(_LET_GO)
        if ended:
            raise ended[0]


def lease_manifest(repo: Repo, key: str, *, label: str = "", ttl: float = TTL) -> tuple[Hold, bytes]:
    """A reader's lease on every chunk of the manifest at `key`, and the manifest. Renew it by `keep`, give it back
    by `release`: until then its chunks stay, even when the manifest is deleted.

    Raises NotFoundError when the manifest is not there (any more), TransientError when a lease cannot be had just
    now, AuthError with read-only credentials: such readers may go unleased, and have gc's grace period.
    """
    from kvctl.repo.condemned import read_condemned

    data = repo.read_meta(key)
    named = [ref.name for ref in manifests.chunk_refs(manifests.parse(data, key), key)]
    hold = Hold.begin(repo, LEASES, label or key, ttl=ttl, names=named)
    try:
        condemned = read_condemned(repo).names
        if any(condemned.get(name) is not None for name in hold.names):
            raise TransientError(f"no lease on {key} just now", cause="gc is about to look at its chunks again")
        # still there after the chunks were declared: whoever deletes it now, gc sees the lease
        if repo.read_meta(key) != data:
            raise TransientError(f"{key} was replaced just now", hint="run it again")
        # a rebalance that has not seen the lease is in the newest repo.json, so we look where it put the chunks
        repo.refresh()
    except BaseException:
        hold.let_go()
        raise
    return hold, data


def read_holds(repo: Repo, prefix: str) -> list[HoldInfo]:
    """Every hold under `prefix` on the members that answer, open or closed."""
    lists = repo.each(lambda member: _member_holds(member, prefix), repo.up)
    return [hold for holds in lists for hold in holds]


def _member_holds(member: RepoMember, prefix: str) -> list[HoldInfo]:
    heads: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    for item in member.store.list(prefix):
        rest = item.key.removeprefix(prefix)
        if "/" in rest:
            parts.setdefault(rest.partition("/")[0], []).append(item.key)
        else:
            heads[rest.removesuffix(".json")] = item.key
    found = []
    for hold_id in heads.keys() | parts.keys():
        keys = tuple(sorted(parts.get(hold_id, ())))
        key = heads.get(hold_id, f"{prefix}{hold_id}.json")
        version, document, first = _head(member, key)
        names = set(first)
        for part in keys if document["state"] == "open" else ():
            try:
                names.update(json.loads(member.store.get(part))["names"])
            except NotFoundError:
                continue  # released meanwhile: whatever it led to is committed already
            except (ValueError, KeyError, TypeError, RecursionError) as problem:
                raise FormatError(f"{part} on {member.name} is malformed", cause=str(problem)) from problem
        expires = parse_moment(document["expires"])
        is_open = document["state"] == "open"
        found.append(
            HoldInfo(
                member, key, version, document["label"], expires, is_open, frozenset(names), keys, document["owner"]
            )
        )
    return found


def _head(member: RepoMember, key: str) -> tuple[str, dict[str, str], list[str]]:
    while True:
        try:
            version = member.store.stat(key).version
            document, names = _parse(member.store.get(key), key)
            if member.store.stat(key).version == version:
                return version, document, names if document["state"] == "open" else []
        except NotFoundError:
            gone = {"state": "released", "expires": "1970-01-01T00:00:00+00:00", "label": "", "owner": ""}
            return "", gone, []


def close_hold(hold: HoldInfo) -> bool:
    """End an expired hold. False when its owner renewed it meanwhile: it counts on."""
    try:
        document = _document(hold.key, hold.label, hold.expires, "closed", hold.owner)
        hold.member.store.put(hold.key, document, if_version=hold.version)
    except ConflictError:
        return False
    return True


def sweep_hold(hold: HoldInfo) -> None:
    """Remove what is left of a hold that is not open."""
    hold.member.store.delete([hold.key, *hold.parts])


def leased(repo: Repo, names: Sequence[str] | frozenset[str]) -> list[HoldInfo]:
    """The readers' leases, open and not expired, that name any of `names`."""
    wanted = frozenset(names)
    return [hold for hold in read_holds(repo, LEASES) if hold.open and hold.names & wanted and not hold.over()]


def _document(hold_id: str, label: str, expires: datetime, state: str, owner: str, names: Sequence[str] = ()) -> bytes:
    # the nonce: two writers of the same words must not look like one (a lost answer is read back and compared)
    document = {
        "schema": SCHEMA, "id": hold_id, "label": label, "expires": expires.isoformat(), "state": state,
        "owner": owner, "nonce": secrets.token_hex(4), "names": list(names),
    }  # fmt: skip
    return json.dumps(document).encode()


def _parse(data: bytes, key: str) -> tuple[dict[str, str], list[str]]:
    """The fields, and the names it began with."""
    try:
        document = json.loads(data)
        names = [str(name) for name in document.get("names", ())]
        parse_moment(document["expires"])
        return {name: str(document[name]) for name in ("state", "expires", "label", "owner")}, names
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise FormatError(f"{key} is malformed", cause=str(problem)) from problem


def _lost(label: str, problem: Exception | None) -> TransientError:
    return TransientError(
        f"the claim on the chunks of {label} ran out",
        cause=str(problem) if problem else "gc closed it after it had expired",
        hint="run it again; what is still there is not written twice",
    )


__all__ = [
    "INTENTS",
    "TTL",
    "Hold",
    "HoldInfo",
    "close_hold",
    "lease_manifest",
    "leased",
    "read_holds",
    "sweep_hold",
]
