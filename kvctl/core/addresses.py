"""The one grammar of addresses: weights, stores, repos, sessions, live targets. Pure.

    weights   ./path   scheme://..   REPO:NAME[@VERSION]   slot:NAME   peer://HOST/SLOT
    stores    scheme://..   or a path

Credentials are refused wherever a URL is parsed: they would end up in logs and reports.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvctl.core.errors import UsageError

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """One store as a user configures it.

    `url` has no credentials, no query and no trailing slash. `endpoints` are several ways to the same objects
    (gateways, NICs), empty for the scheme's default. `options` are the scheme's own, by name.
    """

    url: str
    endpoints: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]


def expand_home(path: str) -> str:
    """`path` with the home directory for a `~` at its start. Raises UsageError for a user who is not known, or has no
    home: a folder called '~' is what nobody means.
    """
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise UsageError(f"{path!r} names no home directory that is known here", hint=f"for a path write ./{path}")
    return found


def split_url(text: str, *, port: bool = False) -> SplitResult:
    """The parts of a URL; with `port` its port is a number, or none is there. Raises UsageError for what has no parts:
    brackets that do not close, a port that is none.
    """
    try:
        parts = urlsplit(text)
        if port:
            parts.port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise UsageError(
            f"{text.rpartition('@')[2]!r} is not a URL", cause=str(error), hint="write scheme://HOST:PORT/PATH"
        ) from None
    return parts


def parse_store(text: str, *, endpoints: tuple[str, ...] = (), options: Mapping[str, str] | None = None) -> StoreConfig:
    """The store behind a URL or a path. A path becomes `file:///absolute`. Query parameters are options;
    `endpoint` may repeat. Raises UsageError for credentials in the URL and for an empty address.
    """
    if not text:
        raise UsageError("an empty store address")
    match = _SCHEME.match(text)
    if match is None:
        return StoreConfig(f"file://{os.path.abspath(text)}", endpoints, dict(options or {}))
    parts = split_url(text)
    if "@" in parts.netloc:
        raise UsageError(
            "a store URL with credentials in it is refused",
            cause=f"{match.group(1)}://***@{parts.netloc.rpartition('@')[2]}{parts.path}",
            hint="use the environment, a profile or the config file for credentials",
        )
    merged = dict(options or {})
    ways = list(endpoints)
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "endpoint":
            ways.append(value)
        else:
            merged[name] = value
    scheme = match.group(1).lower()
    path = text[match.end() :].partition("?")[0].rstrip("/")
    if scheme == "file":
        path = os.path.abspath(f"/{path.lstrip('/')}") if path.startswith("/") or not path else os.path.abspath(path)
    return StoreConfig(f"{scheme}://{path}", tuple(ways), merged)


@dataclass(frozen=True, slots=True)
class PathOrUrl:
    """Weights outside a repo: a file, a folder, an S3 prefix."""

    store: StoreConfig


@dataclass(frozen=True, slots=True)
class RepoModel:
    """`REPO:NAME[@VERSION]`; `repo` empty means the default repo (or `-r`)."""

    repo: str
    name: str
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """`slot:NAME`: memory of the agent on this host."""

    name: str

    @property
    def url(self) -> str:
        """The store that it is."""
        return f"slot://{self.name}"


@dataclass(frozen=True, slots=True)
class Peer:
    """`peer://HOST/SLOT`: a slot of another host's agent."""

    host: str
    slot: str

    @property
    def url(self) -> str:
        """The store that it is."""
        return f"peer://{self.host}/{self.slot}"


Weights = PathOrUrl | RepoModel | Slot | Peer

_REPO_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")


def parse_weights(text: str, *, endpoints: tuple[str, ...] = (), options: Mapping[str, str] | None = None) -> Weights:
    """The one meaning of a weights address; `endpoints` and `options` apply to a store URL. A bare word is a
    model of the default repo, never a path. Raises UsageError that says how to write what was meant.
    """
    if not text:
        raise UsageError("an empty weights address", hint="see `kvctl help addresses`")
    if text.startswith("peer://"):
        host, _, slot = text.removeprefix("peer://").partition("/")
        if not host or not slot or "@" in host:
            raise UsageError(f"{text!r} is not peer://HOST/SLOT")
        return Peer(host, slot)
    if _SCHEME.match(text):
        return PathOrUrl(parse_store(text, endpoints=endpoints, options=options))
    if text.startswith(("/", "./", "../", "~")) or text in {".", ".."}:
        return PathOrUrl(parse_store(expand_home(text)))
    if re.match(r"^[A-Za-z]:[\\/]", text) or "\\" in text:
        raise UsageError(
            f"{text!r} looks like a Windows path",
            hint="write a path with '/', starting with ./ or /",
        )
    head, colon, rest = text.partition(":")
    if colon and head == "slot":
        if not rest or "/" in rest:
            raise UsageError(f"{text!r} is not slot:NAME")
        return Slot(rest)
    if colon and rest.startswith("/"):
        raise UsageError(
            f"{text!r} is neither a URL nor a model of a repo",
            cause="a scheme needs '://', a model's name does not start with '/'",
            hint=f"write {head}://{rest.lstrip('/')} or {head}:{rest.lstrip('/')}",
        )
    if colon and not _REPO_NAME.fullmatch(head):
        raise UsageError(
            f"{text!r} is ambiguous",
            cause=f"{head!r} cannot be a repo's name",
            hint=f"for a path write ./{text}; for a model REPO:NAME[@VERSION]",
        )
    if not colon:
        head, rest = "", text
        if "/" in text or text.endswith(".safetensors"):
            raise UsageError(
                f"{text!r} is ambiguous: a path or a model's name?",
                hint=f"for a path write ./{text}; for a model REPO:NAME[@VERSION]",
            )
    name, at, version = rest.rpartition("@")
    if not at:
        name, version = rest, ""
    if not name or (at and not version):
        raise UsageError(f"{text!r} is not REPO:NAME[@VERSION]", hint="see `kvctl help addresses`")
    return RepoModel(head, name, version or None)


@dataclass(frozen=True, slots=True)
class Target:
    """Where weights go. `kind` is 'none', 'dir', 'shm', 'slot' or 'engine'; `value` what follows the colon."""

    kind: str
    value: str = ""


def parse_target(text: str) -> Target:
    """`none`, `dir:PATH`, `shm:NAME`, `slot:NAME`, `engine:URL`. Raises UsageError."""
    if text == "none":
        return Target("none")
    kind, colon, value = text.partition(":")
    if not colon or kind not in {"dir", "shm", "slot", "engine"}:
        path = text.startswith((".", "/", "~"))
        raise UsageError(
            f"{text!r} is not a target",
            hint=f"write dir:{text}" if path else "one of none, dir:PATH, shm:NAME, slot:NAME, engine:URL",
        )
    if not value:
        raise UsageError(
            f"{text!r} names nothing after the colon", hint="write dir:PATH, shm:NAME, slot:NAME or engine:URL"
        )
    if kind == "engine" and "@" in split_url(value).netloc:
        raise UsageError("an engine URL with credentials in it is refused")
    return Target(kind, value)
