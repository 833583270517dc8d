"""Repos for the tests: members in memory and in folders, a context that retries at once, a tiny pusher."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import NotFoundError
from kvctl.repo import manifests
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.layout import model_key
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transports.mem import space

_NAMES = itertools.count()


Stores = Callable[[int], list[StoreConfig]]


def mem_stores(count: int) -> list[StoreConfig]:
    return [StoreConfig(f"mem://repo-test-{next(_NAMES)}") for _ in range(count)]


def file_stores(count: int, folder: Path) -> list[StoreConfig]:
    return [StoreConfig(f"file://{folder}/store{number}") for number in range(count)]


def skip_time(configs: Sequence[StoreConfig], seconds: float) -> None:
    """Move the clocks of memory stores forward."""
    for config in configs:
        space(config.url.removeprefix("mem://")).clock_skew += timedelta(seconds=seconds)


def blob(seed: str, size: int = 1000) -> bytes:
    """Bytes that differ for every seed."""
    return (hashlib.sha256(seed.encode()).digest() * (size // 32 + 1))[:size]


def manifest_of(refs: Sequence[ChunkRef], **extra: object) -> bytes:
    return json.dumps({"schema": "test.model/1", "chunks": [[ref.name, ref.size] for ref in refs], **extra}).encode()


def push_blobs(repo: Repo, name: str, blobs: Sequence[bytes], *, version: str = "1", degraded: bool = False) -> int:
    """Push a model of these chunks; returns how many objects it wrote."""
    by_digest: Mapping[str, bytes] = {digest_of(data): data for data in blobs}
    written = 0
    with Push.begin(repo, name, allow_degraded=degraded) as push:
        refs = push.find({digest: len(data) for digest, data in by_digest.items()})
        refs |= push.new_many({digest: len(data) for digest, data in by_digest.items() if digest not in refs})
        for ref in refs.values():
            for member in push.targets(ref):
                member.store.put(ref.key, by_digest[ref.digest])
                push.placed(ref, member)
                written += 1
        push.commit(model_key(name, version), manifest_of([refs[digest] for digest in by_digest]))
    return written


def read_blobs(repo: Repo, name: str, version: str = "1") -> list[bytes]:
    """The chunks of a model, each from the first of its places that has it, verified by digest."""
    refs = manifests.chunk_refs(json.loads(repo.read_meta(model_key(name, version))))
    out = []
    for ref in refs:
        data = None
        for member in repo.locate(ref.digest):
            if member.down is None:
                try:
                    data = member.store.get(ref.key)
                except NotFoundError:
                    continue
                break
        assert data is not None
        assert digest_of(data) == ref.digest
        out.append(data)
    return out
