"""kv cp: verified, resumable, only what is missing, and keyed anew where secrets differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import ConfigError, IncompatibleError, IntegrityError, NotFoundError
from kvctl.kv.copying import CopySession, copy_session
from kvctl.kv.identity import Group
from kvctl.kv.inspecting import diff_sessions
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import MemorySink
from kvctl.kv.tokens import salt_id
from kvctl.transports.mem import space
from tests.kv.counting import Calls
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, objects, push, some_tokens, source

Stores = tuple[StoreConfig, ...]
MIXED = (
    Group("full", (0,), 2, 8, 8),
    Group("sliding", (1,), 2, 8, 8, 100),
    Group("recurrent", (2,), 1, 5_000, 0),
)


@pytest.fixture
def repos(ctx: Context) -> tuple[Stores, Stores]:
    return make_repo(mem_stores(2), ctx), make_repo(mem_stores(1), ctx)


def test_a_copy_is_the_same_session(ctx: Context, repos: tuple[Stores, Stores], calls: Calls) -> None:
    a, b = repos
    tokens = some_tokens(2_500)
    meaning = descriptor(*MIXED)
    push_session(PushSession(a, "alice/chat", source(meaning, tokens), with_tokens=True, labels={"x": "y"}), ctx)
    report = copy_session(CopySession(a, "alice/chat", b), ctx)
    assert (report.extra["keys"], report.extra["generation"], report.extra["new_generation"]) == ("travel", 1, True)
    assert report.fetched == report.written == sum(map(len, objects(a, "chunks/").values()))
    sink = MemorySink()
    pull_session(PullSession(b, "alice/chat", sink, tokens=tokens), ctx)
    check_sink(sink, meaning, tokens, 2_500)
    sink.close()
    diff = diff_sessions(a, "alice/chat", b, "alice/chat", ctx)
    assert diff.same
    assert (diff.a_bytes, diff.b_bytes) == (0, 0)
    calls.reset()
    again = copy_session(CopySession(a, "alice/chat", b), ctx)
    assert (again.extra["generation"], again.extra["new_generation"]) == (1, False)
    assert not calls.bulk
    assert push_session(PushSession(b, "bob/chat", source(meaning, tokens)), ctx).extra["packs_written"] == 0


def test_only_what_is_missing_moves(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, b = repos
    tokens = some_tokens(4_096)
    push(a, "alice/chat", tokens[:3_072], ctx)
    push(a, "alice/chat", tokens, ctx)
    copy_session(CopySession(a, "alice/chat@1", b), ctx)
    report = copy_session(CopySession(a, "alice/chat", b, "team/other"), ctx)
    assert (report.extra["new_chunks"], report.extra["shared_chunks"]) == (1, 3)
    sink = MemorySink()
    pull_session(PullSession(b, "team/other", sink, tokens=tokens), ctx)
    check_sink(sink, descriptor(), tokens, 4_096)
    sink.close()


def test_damage_is_not_copied(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, b = repos
    push(a, "alice/chat", some_tokens(300), ctx)
    for config in a:
        found = space(config.url.removeprefix("mem://")).objects
        for key in [key for key in found if key.startswith("chunks/")]:
            data = bytes(found[key].data)
            found[key] = replace(found[key], data=data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(IntegrityError):
        copy_session(CopySession(a, "alice/chat", b), ctx)
    assert not objects(b, "sessions/")
    for config in a:
        found = space(config.url.removeprefix("mem://")).objects
        for key in [key for key in found if key.startswith("chunks/")]:
            del found[key]
    with pytest.raises(IntegrityError, match="missing"):
        copy_session(CopySession(a, "alice/chat", b), ctx)
    with pytest.raises(NotFoundError):
        copy_session(CopySession(a, "alice/none", b), ctx)


def test_another_secret_needs_the_tokens(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, b = repos
    ours, theirs = b"\1" * 32, b"\2" * 32
    tokens = some_tokens(2_050)
    meaning = descriptor(*MIXED)
    push_session(PushSession(a, "alice/chat", source(meaning, tokens), key=ours), ctx)
    request = CopySession(a, "alice/chat", b, source_key=ours, target_key=theirs)
    with pytest.raises(IncompatibleError, match="under another secret") as caught:
        copy_session(request, ctx)
    assert caught.value.exit_code == 8
    with pytest.raises(IncompatibleError, match="not its own"):
        copy_session(replace(request, tokens=some_tokens(2_050, seed=1)), ctx)
    report = copy_session(replace(request, tokens=tokens), ctx)
    assert report.extra["keys"] == "made anew"
    sink = MemorySink()
    pull_session(PullSession(b, "alice/chat", sink, tokens=tokens, key=theirs), ctx)
    check_sink(sink, meaning, tokens, 2_050)
    sink.close()
    assert (
        push_session(PushSession(b, "alice/more", source(meaning, tokens), key=theirs), ctx).extra["packs_written"] == 0
    )
    keys = [{name.rpartition("/")[2] for name in objects(stores, "index/")} for stores in (a, b)]
    assert not keys[0] & keys[1]


def test_stored_tokens_are_enough_for_new_keys(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, b = repos
    ours, theirs = b"\1" * 32, b"\2" * 32
    tokens = some_tokens(500)
    push_session(PushSession(a, "alice/chat", source(descriptor(), tokens), key=ours, with_tokens=True), ctx)
    copy_session(CopySession(a, "alice/chat", b, "carol/chat", source_key=ours, target_key=theirs), ctx)
    sink = MemorySink()
    pull_session(PullSession(b, "carol/chat", sink, tokens=tokens, key=theirs), ctx)
    check_sink(sink, descriptor(), tokens, 500)
    sink.close()


def test_a_salted_session_cannot_be_keyed_anew(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, b = repos
    tokens = some_tokens(100)
    meaning = descriptor(salt=salt_id(b"\3" * 32, b"salt"))
    push_session(PushSession(a, "alice/chat", source(meaning, tokens), with_tokens=True), ctx)
    with pytest.raises(IncompatibleError, match="salted"):
        copy_session(CopySession(a, "alice/chat", b, target_key=b"\2" * 32), ctx)
    copy_session(CopySession(a, "alice/chat", b), ctx)


def test_the_repos_key_is_wanted(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, _ = repos
    push_session(PushSession(a, "alice/chat", source(descriptor(), some_tokens(50)), key=b"\1" * 32), ctx)
    with pytest.raises(ConfigError, match="none is configured"):
        pull_session(PullSession(a, "alice/chat", MemorySink()), ctx)
    with pytest.raises(IncompatibleError, match="another one"):
        pull_session(PullSession(a, "alice/chat", MemorySink(), key=b"\2" * 32), ctx)


def test_diff_finds_where_two_part(ctx: Context, repos: tuple[Stores, Stores]) -> None:
    a, b = repos
    tokens = some_tokens(2_000)
    push(a, "alice/chat", tokens, ctx)
    push(b, "alice/fork", tokens[:1_237] + some_tokens(900, seed=1), ctx)
    diff = diff_sessions(a, "alice/chat", b, "alice/fork", ctx)
    assert (diff.common_tokens, diff.same) == (1_232, False)
    push(a, "alice/short", tokens[:700], ctx)
    assert diff_sessions(a, "alice/chat", a, "alice/short", ctx).common_tokens == 688
    push_session(PushSession(a, "alice/other", source(descriptor(weights="dd" * 32), tokens)), ctx)
    other = diff_sessions(a, "alice/chat", a, "alice/other", ctx)
    assert other.common_tokens is None
    assert [item.field for item in other.identity] == ["weights"]
