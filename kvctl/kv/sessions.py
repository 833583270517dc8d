"""Sessions in a repo: their generations, in order; the next one's commit; what people attach to them.

Everything is read from the store, nothing is remembered: a listing of `sessions/` tells which generations there are,
and `state/session/<TENANT/NAME>.json` holds pins, labels, expiry, the last use (by the hour) and the highest
generation that was ever evicted, so that no number comes twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from kvctl.core.errors import ConflictError, FormatError, KvctlError, NotFoundError
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.names import Pattern, SessionAddress, SessionName, parse_key
from kvctl.repo import metadata
from kvctl.repo.layout import SESSIONS, state_key
from kvctl.repo.moments import parse_moment
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.repo.state import Value, list_state, read_state, update_state
from kvctl.transports.wrapper import innermost

STATE_KIND: Final = "session"
ALL: Final = "*"  # a pin or an expiry of all generations
_TRIES: Final = 64


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a session, from a listing alone. `modified` by the store's clock."""

    session: SessionName
    generation: int
    modified: datetime

    @property
    def key(self) -> str:
        return self.session.key(self.generation)

    def __str__(self) -> str:
        return f"{self.session}@{self.generation}"


def list_generations(repo: Repo, prefix: str = SESSIONS) -> list[Generation]:
    """What is committed under a prefix of manifests' keys, by session, oldest generation first."""
    found: list[Generation] = []
    for info in repo.list_meta(prefix):
        parsed = parse_key(info.key)
        if parsed is not None:
            found.append(Generation(*parsed, info.modified))
    return sorted(found, key=lambda item: (item.session, item.generation))


def matching(repo: Repo, patterns: Sequence[str], *, allow_empty: bool = False) -> list[Generation]:
    """The generations that the patterns name (none: all). Raises NotFoundError for one that matches nothing, unless
    `allow_empty`.
    """
    if not patterns:
        return list_generations(repo)
    found: dict[str, Generation] = {}
    for text in patterns:
        pattern = Pattern.parse(text)
        hits = [
            item for item in list_generations(repo, pattern.prefix) if pattern.matches(item.session, item.generation)
        ]
        if not hits and not allow_empty:
            raise NotFoundError(
                f"repo {repo.id[:8]} has no session {text!r}", hint="`kvctl kv ls` lists them; or --allow-empty"
            )
        found.update((item.key, item) for item in hits)
    return sorted(found.values(), key=lambda item: (item.session, item.generation))


def resolve(repo: Repo, address: SessionAddress) -> Generation:
    """The generation that is meant: the one named, or the latest. Raises NotFoundError that tells what is there."""
    generations = list_generations(repo, address.session.prefix)
    if not generations:
        raise NotFoundError(f"repo {repo.id[:8]} has no session {address.session}", hint="`kvctl kv ls` lists them")
    if address.generation is None:
        return generations[-1]
    for item in generations:
        if item.generation == address.generation:
            return item
    have = ", ".join(str(item.generation) for item in generations[-5:])
    raise NotFoundError(
        f"session {address.session} has no generation {address.generation} in repo {repo.id[:8]}",
        cause=f"it has {have}",
    )


def read_session(repo: Repo, key: str) -> SessionManifest:
    """Raises NotFoundError, FormatError, IncompatibleError and what the members raise."""
    return SessionManifest.parse(repo.read_meta(key), key)


def commit_generation(push: Push, repo: Repo, session: SessionName, manifest_of: Callable[[int], bytes]) -> int:
    """Commit under the next number; several pushes at once each get their own. `manifest_of` gives the manifest for
    a number. Raises ConflictError as `Push.commit`.
    """
    for _ in range(_TRIES):
        generation = 1 + highest(repo, session)
        try:
            push.commit(session.key(generation), manifest_of(generation))
        except ConflictError:
            if all(item.generation != generation for item in list_generations(repo, session.prefix)):
                raise  # the number was not taken: gc condemned a chunk
            continue
        return generation
    raise ConflictError(f"other pushes of {session} kept taking the next generation", hint="run it again")


def highest(repo: Repo, session: SessionName) -> int:
    """The highest generation that is, or ever was before an eviction; 0 when there was none."""
    generations = list_generations(repo, session.prefix)
    latest = generations[-1].generation if generations else 0
    return max(latest, read_attached(repo, session).highest)


@dataclass(frozen=True, slots=True)
class Attached:
    """What people and kvctl attach to a session. `pins`: '*' or generations as text. `expires`: the same -> time.
    `used`: start of the hour of the last pull. `highest`: see `highest`.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    expires: Mapping[str, datetime] = field(default_factory=dict)
    used: datetime | None = None
    highest: int = 0

    def pinned(self, generation: int) -> bool:
        return ALL in self.pins or str(generation) in self.pins

    def expiry(self, generation: int) -> datetime | None:
        times = [self.expires[name] for name in (ALL, str(generation)) if name in self.expires]
        return min(times, default=None)

    def to_value(self) -> dict[str, Any] | None:  # Any: JSON
        if self == Attached():
            return None
        return {
            "labels": dict(sorted(self.labels.items())),
            "pins": sorted(self.pins),
            "expires": {name: when.isoformat() for name, when in sorted(self.expires.items())},
            "used": None if self.used is None else self.used.isoformat(),
            "highest": self.highest,
        }


def _parse_attached(value: Value | None, what: str) -> Attached:
    if value is None:
        return Attached()
    try:
        used = value["used"]
        return Attached(
            {str(name): str(text) for name, text in value["labels"].items()},
            tuple(str(item) for item in value["pins"]),
            {str(name): parse_moment(when) for name, when in value["expires"].items()},
            None if used is None else parse_moment(used),
            int(value["highest"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as problem:
        raise FormatError(f"the state of session {what} is malformed", cause=str(problem)) from problem


def read_attached(repo: Repo, session: SessionName) -> Attached:
    return _parse_attached(read_state(repo, STATE_KIND, str(session)), str(session))


def all_attached(repo: Repo) -> dict[str, Attached]:
    """'TENANT/NAME' -> what is attached, for every session that has anything."""
    return {name: _parse_attached(value, name) for name, value in list_state(repo, STATE_KIND).items()}


def attach(repo: Repo, session: SessionName, change: Callable[[Attached], Attached]) -> Attached:
    """Change what is attached, by compare-and-swap. Raises as `update_state`."""

    def apply(value: Value | None) -> Value | None:
        return change(_parse_attached(value, str(session))).to_value()

    return _parse_attached(update_state(repo, STATE_KIND, str(session), apply), str(session))


def pin(repo: Repo, session: SessionName, generation: int | None, *, on: bool = True) -> Attached:
    """Pin or unpin a generation, or (None) all of them; unpinning all drops every pin."""
    name = ALL if generation is None else str(generation)

    def change(old: Attached) -> Attached:
        if on:
            return replace(old, pins=tuple(sorted({*old.pins, name})))
        return replace(old, pins=() if generation is None else tuple(item for item in old.pins if item != name))

    return attach(repo, session, change)


def set_expiry(repo: Repo, session: SessionName, generation: int | None, when: datetime | None) -> Attached:
    name = ALL if generation is None else str(generation)

    def change(old: Attached) -> Attached:
        kept = {key: value for key, value in old.expires.items() if key != name}
        return replace(old, expires=kept if when is None else {**kept, name: when})

    return attach(repo, session, change)


def set_labels(repo: Repo, session: SessionName, labels: Mapping[str, str | None]) -> Attached:
    """Set labels; None removes one."""

    def change(old: Attached) -> Attached:
        merged = {**old.labels, **labels}
        return replace(old, labels={name: text for name, text in merged.items() if text is not None})

    return attach(repo, session, change)


def note_use(repo: Repo, session: SessionName) -> None:
    """Remember this hour as the last use; at most one write an hour, and no error when it cannot be had."""
    with contextlib.suppress(KvctlError):
        # asked once, without the retries around it: a member that died meanwhile must not hold up a pull that is done
        home = metadata.require_home(repo, state_key(STATE_KIND, str(session)), "write").store
        hour = innermost(home).now().replace(minute=0, second=0, microsecond=0)
        known = read_attached(repo, session).used
        if known is None or hour - known >= timedelta(hours=1):
            attach(repo, session, lambda old: replace(old, used=max(hour, old.used or hour)))


def reserve(repo: Repo, session: SessionName, generation: int) -> None:
    """Before an eviction: numbers up to this one stay used, whatever becomes of it."""
    attach(repo, session, lambda old: replace(old, highest=max(old.highest, generation)))


def forget(repo: Repo, session: SessionName, generations: Iterable[int]) -> None:
    """After an eviction: pins and expiries of those generations go; the numbers stay used."""
    gone = {str(number) for number in generations}
    left = bool(list_generations(repo, session.prefix))

    def change(old: Attached) -> Attached:
        if not left:  # of the session nothing is left but that its numbers are used
            return Attached(highest=old.highest)
        return replace(
            old,
            pins=tuple(item for item in old.pins if item not in gone),
            expires={name: when for name, when in old.expires.items() if name not in gone},
        )

    attach(repo, session, change)


def now(repo: Repo) -> datetime:
    """The time by the clock of the first member that answers."""
    problem: KvctlError | None = None
    for member in repo.up:
        try:
            return member.store.now()
        except KvctlError as error:
            problem = error
    raise problem or repo.members[0].down or NotFoundError("the repo has no members")
