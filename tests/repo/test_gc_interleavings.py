"""Pusher, reader, evictor and collectors in every order we can draw: nothing committed is lost, nothing that a
lease holds goes away while it is read, and garbage is gone in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import NotFoundError
from kvctl.repo import manifests, owner
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import INTENTS, LEASES, model_key
from kvctl.repo.leases import TTL, lease_manifest, read_holds
from kvctl.repo.marking import list_chunks, manifest_refs
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from tests.repo.steps import Actor, hooked, run_random, run_switching
from tests.repo.world import blob, manifest_of, mem_stores, push_blobs, read_blobs

A, B, C, D = (blob(letter, 40) for letter in "abcd")


class World:
    """Two members; model 'old' (A, B) is there; each actor opens the repo for itself."""

    def __init__(self, ctx: Context, *, replicas: int, ttl: float, few: int = 32) -> None:
        self.ctx = ctx
        self.ttl = ttl
        self.few = few  # digests that a push looks up one by one
        self.stores = mem_stores(2)
        with Repo.init(self.stores, ctx=ctx, replicas=replicas) as repo:
            push_blobs(repo, "old", [A, B])
        self.committed: dict[str, list[bytes]] = {}

    def open(self, actor: Actor) -> Repo:
        return Repo.open(self.stores, self.ctx, opener=hooked(actor.hook), workers=1)

    def pusher(self, name: str, blobs: list[bytes]) -> Actor:
        def run(actor: Actor) -> None:
            with self.open(actor) as repo, Push.begin(repo, name, ttl=self.ttl, few=self.few) as push:
                sizes = {digest_of(data): data for data in blobs}
                refs: dict[str, ChunkRef] = {}
                for digest, data in sizes.items():
                    refs |= push.find({digest: len(data)})
                refs |= push.new_many({d: len(data) for d, data in sizes.items() if d not in refs})
                for digest, data in sizes.items():
                    for member in push.targets(refs[digest]):
                        member.store.put(refs[digest].key, data)
                        push.placed(refs[digest], member)
                push.commit(model_key(name, "1"), manifest_of([refs[digest] for digest in sizes]))
                self.committed[name] = blobs

        return Actor(name, run)

    def evictor(self) -> Actor:
        def run(actor: Actor) -> None:
            with self.open(actor) as repo:
                repo.delete_meta(model_key("old", "1"))

        return Actor("evictor", run)

    def reader(self) -> Actor:
        def run(actor: Actor) -> str:
            with self.open(actor) as repo:
                try:
                    held, data = lease_manifest(repo, model_key("old", "1"))
                except NotFoundError:
                    return "gone"
                refs = manifests.chunk_refs(manifests.parse(data, "old"))
                for ref in refs:
                    data = repo.locate(ref.digest)[0].store.get(ref.key)
                    assert digest_of(data) == ref.digest
                held.check_open()
                held.release()
                return "read"

        return Actor("reader", run)

    def collector(self, number: int) -> Actor:
        def run(actor: Actor) -> None:
            with self.open(actor) as repo:
                for _ in range(2):
                    run_gc(repo, GcOptions(grace=0))

        return Actor(f"gc{number}", run)

    def check(self, actors: list[Actor], trace: list[str]) -> None:
        story = "\n".join(trace)
        for actor in actors:
            # a run may give up and ask to be run again; a reader with a lease never misses a chunk
            assert actor.error is None or actor.error.exit_code == 6, f"{actor.error!r}\n{story}"
        with Repo.open(self.stores, self.ctx, workers=1) as repo:
            for name, blobs in self.committed.items():
                assert read_blobs(repo, name) == blobs, story
            for _ in range(2):
                for prefix in (INTENTS, LEASES):
                    for hold in read_holds(repo, prefix):
                        hold.member.store.delete([hold.key])  # as if their time had come
                run_gc(repo, GcOptions(grace=0))
            needed = {ref.name for refs in manifest_refs(repo).values() for ref in refs}
            chunks = list_chunks(repo)
            assert set(chunks) == needed, story
            assert all(len(chunk.sizes) == repo.format.replicas for chunk in chunks.values()), story


@pytest.fixture(autouse=True)
def _useless_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's lock is always expired: safety must not depend on it."""
    take = owner.Owner.take.__func__  # type: ignore[attr-defined]  # the function of a classmethod

    def expired(cls: Any, repo: Repo, label: str, *, ttl: float = 0) -> Any:  # Any: stands in for a classmethod
        return take(cls, repo, label, ttl=-1.0)

    monkeypatch.setattr(owner.Owner, "take", classmethod(expired))
    monkeypatch.setattr(owner.Owner, "keep", lambda self: None)


def play(ctx: Context, seed: int) -> tuple[World, list[Actor], list[str]]:
    world = World(ctx, replicas=1 + seed % 2, ttl=TTL if seed % 3 else -1.0, few=seed % 5 % 2)
    actors = [
        world.pusher("new", [A, C]),
        world.pusher("other", [B, C, D]),
        world.evictor(),
        world.reader(),
        world.collector(1),
        world.collector(2),
    ]
    return world, actors, run_random(actors, seed)


def test_random_interleavings_lose_nothing_and_leave_no_garbage(ctx: Context) -> None:
    ends: set[str] = set()
    for seed in range(100):
        world, actors, trace = play(ctx, seed)
        world.check(actors, trace)
        ends.add(str(actors[3].result))
        ends.update(f"{name} committed" for name in world.committed)
    assert ends >= {"read", "gone", "new committed", "other committed"}


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_interleavings(ctx: Context, block: int) -> None:
    for seed in range(1000 + 500 * block, 1500 + 500 * block):
        world, actors, trace = play(ctx, seed)
        world.check(actors, trace)


def pairs(ctx: Context, make: Callable[[World], list[Actor]], *, stride: int = 1) -> int:
    """Every way to interrupt the first actor once and the second once; how many there were."""
    count = 0
    first = 0
    while True:
        second = 0
        while True:
            world = World(ctx, replicas=1, ttl=TTL)
            actors = make(world)
            trace, _ = run_switching(actors, [first, second])
            world.check(actors, trace)
            count += 1
            second += stride
            if len(actors[1].steps) < second:
                break
        first += stride
        if len(actors[0].steps) < first:
            return count


def test_a_push_interrupted_anywhere_by_a_collection_interrupted_anywhere(ctx: Context) -> None:
    def make(world: World) -> list[Actor]:
        with Repo.open(world.stores, world.ctx) as repo:
            repo.delete_meta(model_key("old", "1"))  # A and B are garbage that the push wants
        return [world.pusher("new", [A, C]), world.collector(1)]

    assert pairs(ctx, make, stride=5) > 50


def test_a_read_interrupted_anywhere_by_eviction_and_collection(ctx: Context) -> None:
    def make(world: World) -> list[Actor]:
        def run(actor: Actor) -> None:
            with world.open(actor) as repo:
                repo.delete_meta(model_key("old", "1"))
                run_gc(repo, GcOptions(grace=0))

        return [world.reader(), Actor("evict and collect", run)]

    assert pairs(ctx, make, stride=2) > 50
