"""What an engine loads by the index alone takes no lease: an eviction and a collection at any point of such a load may
shorten it, and never make it wrong. The load is one thread of calls; at each two of them (in order) something happens.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from typing import Any

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.evict import EvictRequest, evict_sessions
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.prefix import Want, find_prefix, pull_prefix
from kvctl.kv.repacking import repack_sessions
from kvctl.kv.seams import LayerKv, Layout, MemorySink
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.repo import Repo
from kvctl.transports.api import Op
from kvctl.transports.mem import MemStore, MemTransport, space
from tests.kv.world import FULL, check_sink, descriptor, make_repo, mem_stores, push, some_tokens

Stores = tuple[StoreConfig, ...]
SLIDING = Group("sliding", (2,), 2, 8, 8, 48)
BATCH = 1 << 14  # bytes: a layer at a time, so that there are points between layers
TOKENS = 1_100  # an anchor, and a tail behind it


class Points:
    """Counts what the load asks of its stores, and does `at[n]` before call n."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: dict[int, list[Callable[[], object]]] = {}
        self.count = 0
        self._on = self._acting = False
        self._lock = threading.RLock()  # of the threads of a load one goes on at a time
        self._inside = threading.local()
        for cls, name in ((MemStore, "stat"), (MemStore, "get"), (MemStore, "put"), (MemTransport, "perform")):
            self._wrap(monkeypatch, cls, name)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, cls: type, name: str) -> None:
        real: Callable[..., Any] = getattr(cls, name)  # Any: whatever the call takes and gives

        def hooked(own: Any, what: str | Op, *args: Any, **more: Any) -> Any:  # Any: passed on
            # what an action does is no point, nor what a bulk read asks its store
            if not self._on or self._acting or getattr(self._inside, "yes", False):
                return real(own, what, *args, **more)
            with self._lock:
                self._point()
                self._inside.yes = True
                try:
                    return real(own, what, *args, **more)
                finally:
                    self._inside.yes = False

        monkeypatch.setattr(cls, name, hooked)

    def _point(self) -> None:
        self._acting = True
        for action in self.at.pop(self.count, ()):
            action()
        self._acting = False
        self.count += 1

    def load(self, at: dict[int, list[Callable[[], object]]], run: Callable[[], int]) -> int:
        self.at, self.count, self._on = at, 0, True
        try:
            return run()
        finally:
            self._on = False


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Points:
    return Points(monkeypatch)


class Batches(MemorySink):
    """Compares each batch of layers as it comes, before the next one takes its place."""

    def __init__(self, meaning: Descriptor, tokens: array[int]) -> None:
        super().__init__()
        self._meaning, self._tokens = meaning, tokens
        self._end = len(tokens)

    def prepare(self, descriptor: Descriptor, layout: Layout) -> Sequence[LayerKv]:
        self._end = min(self._end, layout.tokens)  # what was lost in a layer stays lost
        return super().prepare(descriptor, layout)

    def invalid(self, from_token: int) -> None:
        super().invalid(from_token)
        self._end = min(self._end, from_token)

    def layer_ready(self, layer: int) -> None:
        super().layer_ready(layer)
        self.usable = self._end
        if self._end:
            check_sink(self, self._meaning, self._tokens, self._end)


class World:
    """Two sessions of one beginning: `alice/long`, and `alice/short` of its first 1,024 tokens."""

    def __init__(self, ctx: Context, groups: Sequence[Group]) -> None:
        self.ctx, self.groups = ctx, tuple(groups)
        self.tokens = some_tokens(TOKENS)
        self.meaning = descriptor(*groups)
        self.stores = make_repo(mem_stores(2), ctx)
        self.push()
        push(self.stores, "alice/short", self.tokens[:1_024], ctx, *self.groups)
        self._spaces = [space(config.url.removeprefix("mem://")) for config in self.stores]
        self._first = [dict(found.objects) for found in self._spaces]

    def reset(self) -> None:
        for found, first in zip(self._spaces, self._first, strict=True):
            found.objects = dict(first)

    def push(self) -> None:
        push(self.stores, "alice/long", self.tokens, self.ctx, *self.groups)

    def evict(self) -> None:
        evict_sessions(EvictRequest(self.stores, ("alice/long",)), self.ctx)

    def evict_all(self) -> None:
        evict_sessions(EvictRequest(self.stores, ("*/*",), allow_empty=True), self.ctx)

    def collect(self) -> None:
        with Repo.open(self.stores, self.ctx) as repo:
            run_gc(repo, GcOptions(grace=0, repacker=repack_sessions))

    def load(self) -> int:
        """Tokens that were found by the index and loaded, all of them compared."""
        want = Want(self.meaning, self.tokens, "alice")
        sink = Batches(self.meaning, self.tokens)
        try:
            with Repo.open(self.stores, self.ctx, workers=1) as repo:
                found = find_prefix(repo, want, self.ctx)
                if not found.tokens:
                    return 0
                report, tokens = pull_prefix(repo, want, found, sink, self.ctx, batch=BATCH)
            assert report.extra["leased"] is False
            assert tokens <= found.tokens
            return tokens
        finally:
            sink.close()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)], ids=["full", "sliding"])
@pytest.mark.parametrize("what", ["one goes", "all goes", "all goes and comes back"])
def test_evictions_and_collections_only_shorten_a_load(
    ctx: Context, points: Points, groups: tuple[Group, ...], what: str
) -> None:
    world = World(ctx, groups)
    assert points.load({}, world.load) == TOKENS
    calls = points.count
    assert calls > 10
    ends: dict[int, int] = {}
    for first, second in combinations_with_replacement(range(calls), 2):
        world.reset()
        at: dict[int, list[Callable[[], object]]] = {first: [world.evict if what == "one goes" else world.evict_all]}
        at.setdefault(second, []).append(world.collect)
        if what == "all goes and comes back":
            at[second].append(world.push)
        tokens = points.load(at, world.load)
        ends[tokens] = ends.get(tokens, 0) + 1
    assert TOKENS in ends, ends  # too late to harm it
    assert len(ends) > 1, ends
