"""A prefix copied to another repo, as a cache in front of it takes it: exact bytes, only what is missing."""

from __future__ import annotations

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.evict import EvictRequest, evict_sessions
from kvctl.kv.identity import Group
from kvctl.kv.inspecting import list_sessions
from kvctl.kv.prefix import Want, find_prefix, pull_prefix
from kvctl.kv.promoting import PROMOTED, copy_prefix
from kvctl.kv.seams import MemorySink
from kvctl.repo.repo import Repo
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, objects, push, some_tokens

Stores = tuple[StoreConfig, ...]
WINDOWED = (Group("full", (0,), 2, 8, 8), Group("sliding", (1,), 2, 8, 8, 100))


@pytest.fixture
def repos(ctx: Context) -> tuple[Stores, Stores]:
    return make_repo(mem_stores(2), ctx), make_repo(mem_stores(1), ctx)


def admit(nbytes: int, tokens: int) -> bool:
    return True


def check(repo: Stores, want: Want, tokens: int, ctx: Context, *groups: Group) -> None:
    with Repo.open(repo, ctx) as opened:
        found = find_prefix(opened, want, ctx)
        assert found.tokens == tokens
        if not tokens:
            return
        sink = MemorySink()
        _, usable = pull_prefix(opened, want, found, sink, ctx)
    assert usable == tokens
    check_sink(sink, descriptor(*groups), want.tokens, tokens)
    sink.close()


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_a_prefix_of_a_longer_session_becomes_a_session(
    ctx: Context, repos: tuple[Stores, Stores], key: bytes | None
) -> None:
    a, b = repos
    tokens = some_tokens(3_000)
    push(a, "alice/chat", tokens, ctx, key=key)
    want = Want(descriptor(), tokens[:2_600] + some_tokens(500, 1), "alice", key)
    asked: list[tuple[int, int]] = []

    def note(nbytes: int, count: int) -> bool:
        asked.append((nbytes, count))
        return True

    report = copy_prefix(a, b, want, ctx, note)
    assert report is not None
    reached = report.extra["tokens"]
    assert 2_048 <= reached <= 2_600
    assert asked == [(report.fetched, reached)]
    assert report.written == report.fetched == sum(map(len, objects(b, "chunks/").values()))
    check(b, want, reached, ctx)
    (entry,) = list_sessions(b, ctx).entries
    assert list(entry.labels) == [PROMOTED]
    assert copy_prefix(a, b, want, ctx, note) is None  # it is there
    assert len(asked) == 1
    evict_sessions(EvictRequest(b, (str(entry.found),)), ctx)
    check(b, want, 0, ctx)


def test_windows_come_along(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, b = repos
    tokens = some_tokens(1_504)
    push(a, "alice/chat", tokens, ctx, *WINDOWED)
    want = Want(descriptor(*WINDOWED), tokens + some_tokens(20, 1), "alice")
    assert copy_prefix(a, b, want, ctx, admit) is not None
    check(b, want, 1_504, ctx, *WINDOWED)


def test_what_is_not_admitted_moves_nothing(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, b = repos
    push(a, "alice/chat", some_tokens(500), ctx)
    before = objects(b)
    assert copy_prefix(a, b, Want(descriptor(), some_tokens(500), "alice"), ctx, lambda *_: False) is None
    assert copy_prefix(a, b, Want(descriptor(), some_tokens(500, 3), "alice"), ctx, admit) is None
    assert objects(b) == before


def test_what_is_spared_is_not_evicted_and_late_uses_count(ctx: Context) -> None:
    repo = make_repo(mem_stores(1), ctx)
    for number in range(3):
        push(repo, f"alice/chat{number}", some_tokens(512, seed=number), ctx)
    entries = {entry.found.session.name: entry for entry in list_sessions(repo, ctx).entries}
    one = entries["chat0"].bytes
    used = {name: entries["chat2"].used.replace(year=9_999) for name in entries["chat1"].chunks}
    spare = {"alice/chat0@1"}
    plan = evict_sessions(EvictRequest(repo, max_bytes=2 * one, spare=spare, used=used), ctx)
    assert [str(entry.found) for entry in plan.evict] == ["alice/chat2@1"]
    assert not evict_sessions(EvictRequest(repo, max_bytes=one, spare={"alice/chat0@1", "alice/chat1@1"}), ctx).evict
    assert len(list_sessions(repo, ctx).entries) == 2
