"""Addresses in an engine's settings: the user's configuration, repos and sources as kvctl's use cases take them."""

from __future__ import annotations

import logging
import os
import time
from typing import Final
from urllib.parse import urlencode

from kvctl.core.addresses import PathOrUrl, RepoModel, StoreConfig, parse_store, parse_weights
from kvctl.core.config import Config, load_config
from kvctl.core.context import Context
from kvctl.core.errors import ConfigError
from kvctl.core.events import NullProgress
from kvctl.core.units import format_size
from kvctl.kv.tokens import parse_key
from kvctl.weights.request import LoadRequest

log = logging.getLogger("vllm.kvctl")
EVERY: Final = 5.0  # seconds between lines of progress


def config(path: str | None = None) -> Config:
    """The user's configuration, as `kvctl` reads it. Raises ConfigError."""
    return load_config(explicit=path, environ=os.environ, cwd=os.getcwd())


def repo_stores(settings: Config, text: str | None) -> tuple[StoreConfig, ...]:
    """The member stores of a configured repo, of the default one (None), or of paths and URLs between commas. Raises
    ConfigError.
    """
    if not text:
        if settings.default_repo is None:
            raise ConfigError("no repo was named", hint='say "repo" in the settings, or default_repo in the config')
        return settings.repo(str(settings.default_repo.value)).stores
    if text in settings.repos or not ("://" in text or "/" in text or text.startswith((".", "~"))):
        return settings.repo(text).stores
    return tuple(
        parse_store(part if "://" in part else os.path.expanduser(part)) for part in text.split(",") if part.strip()
    )


def repo_key(settings: Config, text: str | None, key_file: str | None) -> bytes | None:
    """The master secret of a repo's KV; None without one. Raises ConfigError."""
    name = text or (str(settings.default_repo.value) if settings.default_repo is not None else "")
    path = key_file or (settings.repos[name].kv_key_file if name in settings.repos else None)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return parse_key(file.read(4096), path)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read", cause=error.strerror) from error


def weights_request(settings: Config, address: str, repo: str | None, **options: object) -> LoadRequest:
    """What to load for a weights address: ./path, URL, slot:NAME, or REPO:NAME[@VERSION] (`repo`: where a bare one
    is). An absolute or relative folder's name is taken for a path, as vLLM does. Raises UsageError, ConfigError.
    """
    found = PathOrUrl(parse_store(address)) if os.path.exists(address) else parse_weights(address)
    chosen: dict[str, object] = {"into": "memory", **options}
    if isinstance(found, PathOrUrl):
        return LoadRequest(url_of(found.store), **chosen)  # type: ignore[arg-type]
    if isinstance(found, RepoModel):
        stores = repo_stores(settings, found.repo or repo)
        return LoadRequest(found.name, repo=stores, version=found.version, **chosen)  # type: ignore[arg-type]
    return LoadRequest(found.url, **chosen)  # type: ignore[arg-type]


def url_of(store: StoreConfig) -> str:
    """The store as one text, endpoints and options as its query."""
    query = urlencode([*(("endpoint", way) for way in store.endpoints), *store.options.items()])
    return f"{store.url}?{query}" if query else store.url


class LogProgress(NullProgress):
    """Progress as lines of the engine's log, a few seconds apart."""

    def __init__(self) -> None:
        self._label, self._total, self._done, self._next = "", 0, 0, 0.0

    def begin(self, label: str, total_bytes: int | None) -> None:
        self._label, self._total, self._done = label, total_bytes or 0, 0
        self._next = time.monotonic() + EVERY

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            log.info("%s: %s of %s", self._label, format_size(self._done), format_size(self._total))

    def note(self, message: str) -> None:
        log.info("%s", message)


def context(settings: Config) -> Context:
    return Context(progress=LogProgress(), config=settings)
