"""What was pushed comes back, byte for byte, and only what is needed moves."""

from __future__ import annotations

from array import array

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.seams import MemorySink
from tests.kv.world import check_sink, descriptor, push, some_tokens


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
