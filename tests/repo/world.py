"""Repos for the tests: members in memory and in folders, a tiny pusher, a repo that is filled and what it must hold."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import NotFoundError
from kvctl.repo import manifests
from kvctl.repo.check import Share, check
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.layout import model_key
from kvctl.repo.marking import list_chunks
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transports.mem import space

_NAMES = itertools.count()


Stores = Callable[[int], list[StoreConfig]]


def mem_stores(count: int) -> list[StoreConfig]:
    # a repo orders its members by URL: with numbers of one width, members are in the order of these
    return [StoreConfig(f"mem://repo-test-{next(_NAMES):06}") for _ in range(count)]


def file_stores(count: int, folder: Path) -> list[StoreConfig]:
    return [StoreConfig(f"file://{folder}/store{number}") for number in range(count)]


def skip_time(configs: Sequence[StoreConfig], seconds: float) -> None:
    """Move the clocks of memory stores forward."""
    for config in configs:
        space(config.url.removeprefix("mem://")).clock_skew += timedelta(seconds=seconds)


def blob(seed: str, size: int = 1000) -> bytes:
    """Bytes that differ for every seed."""
    return (hashlib.sha256(seed.encode()).digest() * (size // 32 + 1))[:size]


HOUR = 3600.0
BLOBS = [blob(f"m{number}", 50 + number) for number in range(6)]
OTHER = [*BLOBS[:3], *(blob(f"o{number}", 60) for number in range(2))]


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


def filled(configs: list[StoreConfig], ctx: Context, *, replicas: int = 2) -> None:
    with Repo.init(configs, ctx=ctx, replicas=replicas) as repo:
        push_blobs(repo, "m", BLOBS)
        push_blobs(repo, "other", OTHER)


def assert_good(configs: list[StoreConfig], ctx: Context, *, members: int, replicas: int = 2) -> None:
    """Everything is readable, complete, where it belongs and nowhere else."""
    with Repo.open(configs, ctx) as repo:
        assert read_blobs(repo, "m") == BLOBS
        assert read_blobs(repo, "other") == OTHER
        result = check(repo, read_data=Share())
        assert result.problems == []
        assert result.garbage["misplaced"] == 0
        assert len(repo.members) == members
        assert repo.format.settled
        assert all(len(c.sizes) >= min(replicas, members) for c in list_chunks(repo).values())


def assert_readable(configs: list[StoreConfig], ctx: Context) -> None:
    with Repo.open(configs, ctx, allow_extras=True) as repo:
        assert read_blobs(repo, "m") == BLOBS
        assert read_blobs(repo, "other") == OTHER


def wipe(config: StoreConfig) -> None:
    space(config.url.removeprefix("mem://")).objects.clear()
