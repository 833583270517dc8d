"""A push, a copy or an eviction that dies at any store call: nothing half is visible, running it again ends it, and
what it left behind goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, KvctlError
from kvctl.kv.copying import CopySession, copy_session
from kvctl.kv.evict import EvictRequest, evict_sessions
from kvctl.kv.inspecting import list_sessions
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.repacking import repack_sessions
from kvctl.kv.seams import MemorySink
from kvctl.kv.sessions import list_generations, read_session
from kvctl.repo.check import check
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.leases import TTL
from kvctl.repo.repo import Repo
from kvctl.transports.mem import MemStore
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, objects, push, skip, some_tokens

Stores = tuple[StoreConfig, ...]


class Died(BaseException):
    """Not a KvctlError, and no Exception: nothing may catch it and go on."""


class Death:
    """Lets memory stores be changed `at` times more, then never again; None: for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: int | None = None
        self.dead = False
        put, delete = MemStore.put, MemStore.delete

        def check_life() -> None:
            if self.at is not None:
                self.at -= 1
                self.dead = self.dead or self.at < 0
            if self.dead and threading.current_thread().name.startswith("kvctl-mem"):
                raise EnvError("the process died")  # a transport's thread, whose end nobody would notice
            if self.dead:
                raise Died

        def mortal_put(store: MemStore, *args: object, **more: object) -> object:
            check_life()
            return put(store, *args, **more)  # type: ignore[arg-type]  # passed on

        def mortal_delete(store: MemStore, *args: object, **more: object) -> None:
            check_life()
            delete(store, *args, **more)  # type: ignore[arg-type]  # passed on

        monkeypatch.setattr(MemStore, "put", mortal_put)
        monkeypatch.setattr(MemStore, "delete", mortal_delete)

    def survives(self, action: Callable[[], object], at: int) -> bool:
        """Run it with so many changes left; whether it lived to its end."""
        self.at, self.dead = at, False
        try:
            try:
                action()
            except (Died, KvctlError):
                if not self.dead:
                    raise
            return not self.dead
        finally:
            self.at, self.dead = None, False

    def each(self, action: Callable[[], object], *, stride: int = 1) -> Iterator[int]:
        """Deaths after 0, 1, .. changes, until it outlives one."""
        at = 0
        while not self.survives(action, at):
            yield at
            at += stride


@pytest.fixture
def death(monkeypatch: pytest.MonkeyPatch) -> Death:
    return Death(monkeypatch)


def collect(repo: Stores, ctx: Context) -> None:
    with Repo.open(repo, ctx) as opened:
        run_gc(opened, GcOptions(grace=0, repacker=repack_sessions, live_ratio=0.9))


def names(repo: Stores, ctx: Context) -> list[str]:
    return [str(entry.found) for entry in list_sessions(repo, ctx).entries]


def is_sound(repo: Stores, ctx: Context) -> bool:
    with Repo.open(repo, ctx) as opened:
        return not check(opened).damaged


def test_a_push_that_dies(ctx: Context, death: Death) -> None:  # K8, K15
    tokens = some_tokens(1_200)
    repo = make_repo(mem_stores(1), ctx)
    push(repo, "alice/base", tokens[:1_024], ctx)
    for _ in death.each(lambda: push(repo, "alice/chat", tokens, ctx)):
        assert "alice/chat@2" not in names(repo, ctx)
        assert is_sound(repo, ctx)
    assert names(repo, ctx) == ["alice/base@1", "alice/chat@1"]
    packs = len(objects(repo, "chunks/"))
    assert packs <= 3  # what a death left is taken up, as far as its index nodes went
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens), ctx)
    check_sink(sink, descriptor(), tokens, 1_200)
    sink.close()


def test_what_a_dead_push_left_is_swept(ctx: Context, death: Death) -> None:  # K15
    tokens = some_tokens(1_200)
    repo = make_repo(mem_stores(1), ctx)
    push(repo, "bob/keeps", some_tokens(300, seed=1), ctx)
    before = set(objects(repo))
    for _ in death.each(lambda: push(repo, "alice/chat", tokens, ctx), stride=2):
        if names(repo, ctx) == ["bob/keeps@1"]:
            collect(repo, ctx)  # its process is alive (we are it), so its intent counts
            skip(repo, TTL + 60)
            collect(repo, ctx)
            collect(repo, ctx)  # the index nodes, once their chunks are gone
            left = {key for key in set(objects(repo)) - before if not key.startswith(("gc/", "ns/"))}
            assert not left


def test_an_eviction_that_dies(ctx: Context, death: Death) -> None:  # K13
    tokens = some_tokens(2_100)
    repo = make_repo(mem_stores(1), ctx)

    def evict() -> None:
        evict_sessions(EvictRequest(repo, ("alice/chat",), allow_empty=True), ctx)

    for end in (1_024, 2_100):
        push(repo, "alice/chat", tokens[:end], ctx)
    for _ in death.each(evict):
        assert is_sound(repo, ctx)
        for address in names(repo, ctx):
            sink = MemorySink()
            pull_session(PullSession(repo, address, sink), ctx)
            sink.close()
    collect(repo, ctx)
    assert not objects(repo, "chunks/")
    assert not objects(repo, "index/")
    assert push(repo, "alice/chat", tokens, ctx).extra["generation"] == 3


def test_a_copy_that_dies(ctx: Context, death: Death) -> None:
    tokens = some_tokens(1_100)
    a, b = make_repo(mem_stores(1), ctx), make_repo(mem_stores(1), ctx)
    push(a, "alice/chat", tokens, ctx)
    for _ in death.each(lambda: copy_session(CopySession(a, "alice/chat", b), ctx)):
        assert is_sound(b, ctx)
    assert names(b, ctx) == ["alice/chat@1"]
    sink = MemorySink()
    pull_session(PullSession(b, "alice/chat", sink, tokens=tokens), ctx)
    check_sink(sink, descriptor(), tokens, 1_100)
    sink.close()
    assert len(objects(b, "chunks/")) == 2


def test_a_repacking_that_dies(ctx: Context, death: Death) -> None:
    long = some_tokens(1_000)
    repo = make_repo(mem_stores(1), ctx)
    push(repo, "alice/long", long, ctx)
    push(repo, "carol/short", long[:256], ctx)
    push(repo, "dave/short", long[:128], ctx)
    evict_sessions(EvictRequest(repo, ("alice/long",)), ctx)
    for _ in death.each(lambda: collect(repo, ctx)):
        assert is_sound(repo, ctx)
        skip(repo, 700)  # the dead run's lock expires
        for address, count in (("carol/short", 256), ("dave/short", 128)):
            sink = MemorySink()
            pull_session(PullSession(repo, address, sink, tokens=long[:count]), ctx)
            check_sink(sink, descriptor(), long, count)
            sink.close()
    skip(repo, TTL + 60)
    for _ in range(3):
        collect(repo, ctx)
    assert len(objects(repo, "chunks/")) <= 2
    with Repo.open(repo, ctx) as opened:
        for item in list_generations(opened):
            (row,) = read_session(opened, item.key).packs
            assert row.total <= 16  # no more than what the longer one uses
