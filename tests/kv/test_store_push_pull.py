"""What was pushed comes back, byte for byte, and only what is needed moves."""

from __future__ import annotations

from array import array

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import VersionChangedError
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import MemorySink
from kvctl.repo.repo import Repo
from tests.kv.world import check_sink, descriptor, push, some_tokens, source


def test_a_session_comes_back(repo: tuple[StoreConfig, ...], ctx: Context) -> None:
    tokens = some_tokens(3000)
    report = push(repo, "alice/chat1", tokens, ctx)
    assert report.extra["generation"] == 1
    sink = MemorySink()
    report = pull_session(PullSession(repo, "alice/chat1", sink, tokens=tokens), ctx)
    check_sink(sink, descriptor(), tokens, 3000)
    assert report.fetched >= report.needed == report.bytes == 3000 * 2 * 2 * 32
    sink.close()


def test_tokens_of_the_caller_decide(repo: tuple[StoreConfig, ...], ctx: Context) -> None:
    tokens = some_tokens(200)
    push(repo, "alice/chat1", tokens, ctx)
    other = array("I", tokens)
    other[100] += 1
    sink = MemorySink()
    report = pull_session(PullSession(repo, "alice/chat1", sink, tokens=other), ctx)
    assert report.extra["usable_tokens"] == 96
    check_sink(sink, descriptor(), tokens, 96)
    sink.close()


def test_a_source_that_changed_meanwhile_is_not_stored(repo: tuple[StoreConfig, ...], ctx: Context) -> None:
    tokens = some_tokens(200)
    changed = source(descriptor(), tokens)

    def check() -> None:
        raise VersionChangedError("it changed")

    changed.check = check
    with pytest.raises(VersionChangedError):
        push_session(PushSession(repo, "alice/chat1", changed), ctx)
    with Repo.open(repo, ctx) as opened:
        assert [item.key for prefix in ("sessions/", "index/") for item in opened.list_meta(prefix)] == []
    assert push(repo, "alice/chat1", tokens, ctx).extra["generation"] == 1
