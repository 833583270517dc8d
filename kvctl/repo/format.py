"""`repo.json` and `member.json`: what they hold, parsed strictly. Pure.

`generation` grows with every rewrite of `repo.json`; whoever sees a higher one has the newer view. An epoch is a
set of members. While chunks and metadata move to a new epoch, `earlier` names the epochs whose places still
count, and `phase` says how far the move is:
    settled     the epoch is alone
    moving      readers try the epoch's places, then earlier ones; homes of metadata are the oldest epoch's
    switching   no commits for the moment: homes are about to become the epoch's own
`dead` are members that a `repair --replace` declared gone: nothing of theirs counts any more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvctl.core.errors import ConfigError, FormatError, IncompatibleError
from kvctl.repo.chunks import LEAF

SCHEMA: Final = "kvctl.repo/1"
MEMBER_SCHEMA: Final = "kvctl.member/1"
VERSION: Final = 1
HASHES: Final[Mapping[str, object]] = {"digest": "blake3-256", "leaf": "xxh3-64", "leaf_size": LEAF}
STRIPE: Final = 16 << 20
KNOWN_FEATURES: Final[Mapping[str, frozenset[str]]] = {
    "read": frozenset(),
    "write": frozenset(),
    "gc": frozenset(),
}
PHASES: Final = ("settled", "moving", "switching")
_ID = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True, slots=True)
class Epoch:
    number: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RepoFormat:
    """Everything in `repo.json`. Sizes in bytes. `names` are labels for people, by member id."""

    id: str
    members: tuple[str, ...]
    epoch: Epoch
    replicas: int = 1
    stripe_size: int = STRIPE
    generation: int = 1
    earlier: tuple[Epoch, ...] = ()
    dead: tuple[str, ...] = ()
    phase: str = "settled"
    names: Mapping[str, str] | None = None
    key_id: str | None = None
    features: Mapping[str, tuple[str, ...]] | None = None

    leaf_size = LEAF

    @property
    def authority(self) -> tuple[str, ...]:
        """The members among which a metadata key has its home now."""
        oldest = self.earlier[0] if self.earlier else self.epoch
        return tuple(member for member in oldest.members if member not in self.dead)

    @property
    def settled(self) -> bool:
        return self.phase == "settled"

    @property
    def live(self) -> tuple[str, ...]:
        """Members of any epoch that counts, but for the dead ones."""
        return tuple(member for member in self.members if member not in self.dead)

    def name(self, member: str) -> str:
        return (self.names or {}).get(member) or member[:8]

    def check_can(self, what: str) -> None:
        """Raises IncompatibleError when the repo uses a feature that this kvctl does not know how to `what`."""
        unknown = sorted(set((self.features or {}).get(what, ())) - KNOWN_FEATURES[what])
        if unknown:
            raise IncompatibleError(
                f"this kvctl cannot {what} repo {self.id[:8]}",
                cause=f"it uses {', '.join(unknown)}",
                hint="install a newer kvctl",
            )

    def to_bytes(self) -> bytes:
        document = {
            "schema": SCHEMA,
            "version": VERSION,
            "id": self.id,
            "generation": self.generation,
            "hashes": dict(HASHES),
            "stripe_size": self.stripe_size,
            "replicas": self.replicas,
            "members": [{"id": member, "name": self.name(member)} for member in self.members],
            "epoch": {"number": self.epoch.number, "members": list(self.epoch.members)},
            "earlier": [{"number": item.number, "members": list(item.members)} for item in self.earlier],
            "dead": list(self.dead),
            "phase": self.phase,
            "key_id": self.key_id,
            "features": {kind: list((self.features or {}).get(kind, ())) for kind in KNOWN_FEATURES},
        }
        return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"

    def next(self, **changes: Any) -> RepoFormat:  # Any: fields of this class
        return replace(self, generation=self.generation + 1, **changes)


def check_shape(stripe_size: int, replicas: int, members: int) -> None:
    """Raises ConfigError for numbers that no repo can have."""
    if members < 1:
        raise ConfigError("a repo needs at least one store")
    if not 1 <= replicas <= members:
        raise ConfigError(
            f"{replicas} replicas cannot lie on different members",
            cause=f"the repo has {members} member{'s' if members != 1 else ''}",
            hint=f"use --replicas 1 to {members}",
        )
    if stripe_size % LEAF or not LEAF <= stripe_size <= 1 << 32:
        raise ConfigError(
            f"{stripe_size} bytes cannot be the stripe size",
            hint=f"use a multiple of {LEAF} (256 KiB), at most 4 GiB",
        )


def parse_repo(data: bytes, where: str) -> RepoFormat:
    """Raises FormatError for what is no repo.json, IncompatibleError for one of a newer kvctl."""
    document = _object(data, where)
    if document.get("schema") != SCHEMA:
        raise IncompatibleError(
            f"{where} is not a repo that this kvctl knows",
            cause=f"schema {document.get('schema')!r}, expected {SCHEMA!r}",
        )
    if document.get("version") != VERSION or document.get("hashes") != dict(HASHES):
        raise IncompatibleError(
            f"{where} is of another format version",
            cause=f"version {document.get('version')}, hashes {document.get('hashes')}; "
            f"this kvctl knows version {VERSION}, {dict(HASHES)}",
            hint="install a newer kvctl",
        )
    try:
        members = tuple(_id(item["id"]) for item in document["members"])
        found = RepoFormat(
            id=_id(document["id"]),
            members=members,
            epoch=_epoch(document["epoch"], members),
            replicas=_positive(document["replicas"]),
            stripe_size=_positive(document["stripe_size"]),
            generation=_positive(document["generation"]),
            earlier=tuple(_epoch(item, members) for item in document["earlier"]),
            dead=tuple(_member(item, members) for item in document["dead"]),
            phase=document["phase"],
            names={item["id"]: str(item["name"]) for item in document["members"]},
            key_id=document["key_id"],
            features={str(kind): tuple(map(str, flags)) for kind, flags in document["features"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise FormatError(f"{where} is malformed", cause=f"{type(problem).__name__}: {problem}") from problem
    if found.phase not in PHASES or found.settled == bool(found.earlier):
        raise FormatError(f"{where} is malformed", cause=f"phase {found.phase!r}, {len(found.earlier)} earlier epochs")
    found.check_can("read")
    return found


@dataclass(frozen=True, slots=True)
class MemberFile:
    """`member.json`: this store is member `member` of repo `repo`."""

    repo: str
    member: str

    def to_bytes(self) -> bytes:
        document = {"schema": MEMBER_SCHEMA, "repo": self.repo, "member": self.member}
        return json.dumps(document, indent=2).encode() + b"\n"


def parse_member(data: bytes, where: str) -> MemberFile:
    document = _object(data, where)
    if document.get("schema") != MEMBER_SCHEMA:
        raise IncompatibleError(f"{where} is not of this kvctl", cause=f"schema {document.get('schema')!r}")
    try:
        return MemberFile(_id(document["repo"]), _id(document["member"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise FormatError(f"{where} is malformed", cause=str(problem)) from problem


def _object(data: bytes, where: str) -> dict[str, Any]:  # Any: JSON from outside, checked by the callers
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise FormatError(f"{where} is not JSON", cause=str(problem)) from problem
    if not isinstance(document, dict):
        raise FormatError(f"{where} is not a JSON object")
    return document


def _id(value: object) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError(f"{value!r} is not an id")
    return value


def _member(value: object, members: tuple[str, ...]) -> str:
    member = _id(value)
    if member not in members:
        raise ValueError(f"{member} is not among the members")
    return member


def _positive(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a positive number")
    return value


def _epoch(value: Mapping[str, Any], members: tuple[str, ...]) -> Epoch:  # Any: JSON
    found = Epoch(_positive(value["number"]), tuple(_member(item, members) for item in value["members"]))
    if not found.members or len(set(found.members)) != len(found.members):
        raise ValueError(f"epoch {found.number} names no member, or one twice")
    return found
