"""Names of sessions: TENANT/NAME[@GENERATION], their keys in a repo, globs over them. Pure.

A tenant is one part without '/', a name may have several ('alice/work/chat1' is session 'work/chat1' of alice).
Generations are numbers, 1 and up; without one the latest is meant, by a glob all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from kvctl.core.errors import UsageError
from kvctl.repo.layout import SESSIONS, check_name, quote_part, unquote_part

_REPO_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
_GLOB: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True, order=True)
class SessionName:
    """A session, not one of its generations."""

    tenant: str
    name: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"

    @property
    def prefix(self) -> str:
        """The prefix of the keys of its generations."""
        return f"{SESSIONS}{quote_part(self.tenant)}/{quote_part(self.name)}/"

    def key(self, generation: int) -> str:
        return f"{self.prefix}{generation}.json"


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """`[REPO:]TENANT/NAME[@GENERATION]`; `repo` empty: the default one. `generation` None: the latest."""

    repo: str
    session: SessionName
    generation: int | None = None

    def __str__(self) -> str:
        at = "" if self.generation is None else f"@{self.generation}"
        return f"{self.repo}:{self.session}{at}" if self.repo else f"{self.session}{at}"


def parse_session(text: str) -> SessionAddress:
    """Raises UsageError, which says what is wrong with the name, for anything that is not one session."""
    repo, rest = split_repo(text)
    body, at, generation = rest.partition("@")
    tenant, slash, name = body.partition("/")
    if not slash:
        raise UsageError(
            f"{text!r} does not name a session", cause="there is no '/'", hint="write [REPO:]TENANT/NAME[@GENERATION]"
        )
    if _GLOB & set(body):
        raise UsageError(f"{text!r} is a glob, and one session is wanted", hint="write TENANT/NAME[@GENERATION]")
    session = SessionName(check_name("tenant", tenant), check_name("session", name))
    return SessionAddress(repo, session, _generation(generation, text) if at else None)


def split_repo(text: str) -> tuple[str, str]:
    """(repo or '', the rest). Raises UsageError for a repo's name that cannot be one."""
    head, colon, rest = text.partition(":")
    if not colon or "/" in head:
        return "", text
    if not _REPO_NAME.fullmatch(head) or rest.startswith("/"):
        raise UsageError(f"{text!r} is not a session", hint="write [REPO:]TENANT/NAME[@GENERATION]")
    return head, rest


def _generation(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1 or text.startswith("0"):
        raise UsageError(f"{where!r}: {text!r} is not a generation", hint="a generation is a number, 1 or more")
    return int(text)


def parse_key(key: str) -> tuple[SessionName, int] | None:
    """The session and generation of a manifest's key; None for any other key."""
    parts = key.split("/")
    if len(parts) != 4 or f"{parts[0]}/" != SESSIONS or not parts[3].endswith(".json"):
        return None
    number = parts[3].removesuffix(".json")
    if not (number.isascii() and number.isdigit()):
        return None
    return SessionName(unquote_part(parts[1]), unquote_part(parts[2])), int(number)


@dataclass(frozen=True, slots=True)
class Pattern:
    """One TENANT/NAME[@GENERATION], each part a glob; 'alice' alone is no pattern, 'alice/*' is."""

    text: str
    tenant: str
    name: str
    generation: str

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Raises UsageError."""
        body, _, generation = text.partition("@")
        tenant, slash, name = body.partition("/")
        if not slash or not tenant or not name:
            raise UsageError(
                f"{text!r} does not name sessions",
                cause="it is not TENANT/NAME",
                hint=f"for all sessions of a tenant write '{body or 'TENANT'}/*'",
            )
        if generation and not set(generation) <= set("0123456789*?[]-"):
            raise UsageError(f"{text!r}: {generation!r} is not a generation", hint="a number, or a glob of numbers")
        return cls(text, tenant, name, generation)

    @property
    def literal(self) -> bool:
        """Whether it names one session, all of whose generations may be meant."""
        return not (_GLOB & set(self.tenant + self.name))

    @property
    def prefix(self) -> str:
        """The longest prefix of keys that is sure to hold all that it matches: what a list has to look at."""
        if self.literal:
            return SessionName(self.tenant, self.name).prefix
        if not _GLOB & set(self.tenant):
            return f"{SESSIONS}{quote_part(self.tenant)}/"
        return SESSIONS

    def matches(self, session: SessionName, generation: int) -> bool:
        return (
            fnmatchcase(session.tenant, self.tenant)
            and fnmatchcase(session.name, self.name)
            and fnmatchcase(str(generation), self.generation or "*")
        )
