"""Clients at work while members are added, drained and replaced, in every order we can draw: no commit is lost or
undone, no key is decided twice, and a reader with a lease finds every chunk."""

from __future__ import annotations

import json

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import ConflictError, MemberDownError, NotFoundError
from kvctl.repo import maintain, manifests
from kvctl.repo.check import Share, check
from kvctl.repo.chunks import digest_of
from kvctl.repo.layout import INTENTS, LEASES, model_key
from kvctl.repo.leases import lease_manifest, read_holds
from kvctl.repo.members import AbsentStore
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.repo.state import read_state, update_state
from kvctl.transports.api import Store
from kvctl.transports.mem import space
from tests.repo.steps import Actor, hooked, run_random
from tests.repo.world import blob, manifest_of, mem_stores, push_blobs, read_blobs

OLD = [blob(f"old{number}", 40) for number in range(4)]


class World:
    """Three members and a fourth store; each actor opens the repo for itself. 'replace': the third member is
    dead. 'partition': the operator and client b cannot reach it and declare it dead, the others can and do not.
    """

    def __init__(self, ctx: Context, change: str) -> None:
        self.ctx = ctx
        self.change = change
        stores = mem_stores(4)
        self.before = stores[:3]
        self.new = stores[3]
        with Repo.init(self.before, ctx=ctx, replicas=2) as repo:
            push_blobs(repo, "old", OLD)
            update_state(repo, "latest", "old", lambda _: {"n": 0})
        if change == "replace":
            space(stores[2].url[6:]).objects.clear()
        self.after = {
            "add": stores,
            "drain": stores[:2],
            "replace": [*stores[:2], stores[3]],
            "partition": [*stores[:2], stores[3]],
        }[change]
        self.committed: dict[str, bytes] = {}
        self.counted = 0

    def open(self, actor: Actor, *, extras: bool = False) -> Repo:
        """As the actor sees it."""
        stores = [*self.before, self.new] if self.change == "add" and extras else self.before
        reach = hooked(actor.hook)

        def cut(config: StoreConfig) -> Store:
            if config == self.before[2]:
                return AbsentStore(config.url, MemberDownError("no route to host"))
            return reach(config)

        far = self.change == "partition" and actor.name in {"partition", "b"}
        if far and actor.name == "b":
            stores, extras = self.after, True
        return Repo.open(stores, self.ctx, opener=cut if far else reach, workers=1, allow_extras=extras)

    def mover(self) -> Actor:
        def run(actor: Actor) -> None:
            with self.open(actor, extras=True) as repo:
                self.move(repo)

        return Actor(self.change, run)

    def move(self, repo: Repo) -> None:
        if self.change == "add":
            maintain.rebalance(repo)
        elif self.change == "drain":
            maintain.drain(repo, self.before[2].url)
        else:
            maintain.replace_member(repo, self.before[2].url, self.new)

    def pusher(self, name: str, key: str) -> Actor:
        data = blob(name, 40)

        def run(actor: Actor) -> None:
            with self.open(actor) as repo, Push.begin(repo, name, allow_degraded=True) as push:
                refs = push.find({digest_of(item): len(item) for item in (OLD[0], data)})
                for item in (OLD[0], data):
                    ref = refs.setdefault(digest_of(item), push.new(digest_of(item), len(item)))
                    for member in push.targets(ref):
                        member.store.put(ref.key, item)
                        push.placed(ref, member)
                manifest = manifest_of(list(refs.values()), by=name)
                push.commit(key, manifest)
                assert key not in self.committed, "one key was committed twice"
                self.committed[key] = manifest

        return Actor(name, run)

    def counter(self) -> Actor:
        def run(actor: Actor) -> None:
            with self.open(actor) as repo:
                for _ in range(2):
                    update_state(repo, "latest", "old", lambda old: {"n": (old or {"n": -100})["n"] + 1})
                    self.counted += 1

        return Actor("counter", run)

    def reader(self) -> Actor:
        def run(actor: Actor) -> str:
            with self.open(actor) as repo:
                held, data = lease_manifest(repo, model_key("old", "1"))
                for ref in manifests.chunk_refs(manifests.parse(data, "old")):
                    assert self.read(repo, ref.digest, ref.key) is not None
                held.check_open()
                held.release()
                return "read"

        return Actor("reader", run)

    def read(self, repo: Repo, digest: str, key: str) -> bytes | None:
        for member in repo.locate(digest):
            if member.down is None:
                try:
                    return member.store.get(key)
                except NotFoundError:
                    continue
        return None

    def check(self, actors: list[Actor], trace: list[str]) -> None:
        story = "\n".join(trace)
        for actor in actors:
            assert actor.error is None or actor.error.exit_code in {2, 6}, f"{actor.name}: {actor.error!r}\n{story}"
        stores = list({config.url: config for config in [*self.before, self.new]}.values())
        listed = {"add": stores, "partition": self.before[:2]}.get(self.change, self.before)
        with Repo.open(listed, self.ctx, workers=1, allow_extras=True) as repo:
            for prefix in (INTENTS, LEASES):
                for hold in read_holds(repo, prefix):
                    hold.member.store.delete([hold.key])
            try:
                self.move(repo)
            except NotFoundError:
                assert self.change == "drain"
        with Repo.open(self.after, self.ctx, workers=1) as repo:
            maintain.repair(repo)
            result = check(repo, read_data=Share())
            assert result.problems == [], story
            assert read_blobs(repo, "old") == OLD
            for key, manifest in self.committed.items():
                assert repo.read_meta(key) == manifest, story
                for ref in manifests.chunk_refs(json.loads(manifest)):
                    assert self.read(repo, ref.digest, ref.key) is not None
            value = read_state(repo, "latest", "old")
            # an update that asked to be run again may have happened
            assert value is not None
            assert self.counted <= value["n"] <= self.counted + 1, story


def play(ctx: Context, change: str, seed: int) -> tuple[World, list[Actor], list[str]]:
    world = World(ctx, change)
    key = model_key("raced", "1")
    actors = [world.mover(), world.pusher("a", key), world.pusher("b", key), world.counter(), world.reader()]
    return world, actors, run_random(actors, seed)


def many(ctx: Context, change: str, seeds: range) -> set[str]:
    ends: set[str] = set()
    for seed in seeds:
        world, actors, trace = play(ctx, change, seed)
        for actor in actors[1:3]:
            if isinstance(actor.error, ConflictError):
                ends.add("lost a race")
        world.check(actors, trace)
        ends.update(actor.name for actor in actors if actor.error is None)
    return ends


CHANGES = pytest.mark.parametrize("change", ["add", "drain", "replace", "partition"])


@CHANGES
def test_random_interleavings_with_a_change_of_members(ctx: Context, change: str) -> None:
    ends = many(ctx, change, range(25))
    assert ends >= {change, "counter"}
    assert "reader" in ends or change == "partition"
    assert ends & {"a", "b"}


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
@CHANGES
def test_many_interleavings_with_a_change_of_members(ctx: Context, change: str, block: int) -> None:
    many(ctx, change, range(1000 + 250 * block, 1250 + 250 * block))
