"""A fresh prefix of a user's own store for objects of tests and measurements, and removing it again."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.transports.api import Store
from kvctl.transports.registry import open_store

_BATCH: Final = 500


def fresh_prefix(purpose: str) -> str:
    """A folder of keys that nobody else uses: '.kvctl-bench-1f3a5c7e'."""
    return f".kvctl-{purpose}-{secrets.token_hex(4)}"


def below(config: StoreConfig, prefix: str) -> StoreConfig:
    """The same store under `prefix`."""
    return replace(config, url=f"{config.url.rstrip('/')}/{prefix}")


def sweep(config: StoreConfig, wrap: Callable[[Store], Store] | None = None) -> list[str]:
    """Remove every object and unfinished upload of `config`; the keys that are still listed afterwards.

    `wrap` puts retries around the store. Raises what the store raises.
    """
    opened = open_store(config)
    store = opened if wrap is None else wrap(opened)
    try:
        for upload in list(store.uploads()):
            store.abort(upload)
        keys = [item.key for item in store.list()]
        for start in range(0, len(keys), _BATCH):
            store.delete(keys[start : start + _BATCH])
        left = [item.key for item in store.list()]
    finally:
        store.close()
    if config.scheme == "file" and not left:
        _drop_folders(config.url.removeprefix("file://"))
    return left


def _drop_folders(root: str) -> None:
    """Empty folders are all that a file store leaves; elsewhere there are none."""
    for folder, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
