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
from urllib.parse import parse_qsl, urlsplit

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


def parse_store(text: str, *, endpoints: tuple[str, ...] = (), options: Mapping[str, str] | None = None) -> StoreConfig:
    """The store behind a URL or a path. A path becomes `file:///absolute`. Query parameters are options;
    `endpoint` may repeat. Raises UsageError for credentials in the URL and for an empty address.
    """
    if not text:
        raise UsageError("an empty store address")
    match = _SCHEME.match(text)
    if match is None:
        return StoreConfig(f"file://{os.path.abspath(text)}", endpoints, dict(options or {}))
    parts = urlsplit(text)
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
