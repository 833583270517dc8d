"""Only what is needed is fetched: prefixes, windows, layers, shards; counted in bytes and requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import IncompatibleError, UsageError
from kvctl.kv.bundle import read_bundle
from kvctl.kv.exchange import pull_bundle
from kvctl.kv.identity import Group
from kvctl.kv.pull import PullSession, pull_from, pull_session, resolve_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import MemorySink
from kvctl.repo.repo import Repo
from tests.kv.counting import Calls
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, push, some_tokens, source

WIDE = Group("full", (0, 1), 8, 64, 64)


def test_a_longer_context_fetches_what_is_stored(ctx: Context) -> None:  # K17
    repo = make_repo(mem_stores(2), ctx)
    context = some_tokens(14_000)
    push(repo, "alice/chat", context[:12_288], ctx)
    verdict = resolve_session(PullSession(repo, "alice/chat", tokens=context), ctx)
    assert str(verdict) == "usable 12,288 of 14,000 tokens, because the session holds 12,288 tokens"
    sink = MemorySink()
    report = pull_session(PullSession(repo, "alice/chat", sink, tokens=context), ctx)
    assert report.needed == report.bytes == 12_288 * 2 * 2 * 32
    assert report.fetched == report.needed
    check_sink(sink, descriptor(), context, 12_288)
    sink.close()


def test_a_shorter_context_rounds_to_fragments(ctx: Context) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(4_096)
    push(repo, "alice/chat", tokens, ctx, WIDE)
    sink = MemorySink()
    report = pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens[:3_500]), ctx)
    assert report.extra["usable_tokens"] == 3_488
    assert 1.0 <= report.over_fetch < 1.08  # fragments of 512 tokens of a head
    check_sink(sink, descriptor(WIDE), tokens, 3_488)
    sink.close()


@pytest.mark.parametrize("count", [16, 100, 1_024, 2_900, 3_000])
def test_any_shorter_context_comes_back(ctx: Context, count: int) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(3_000)
    push(repo, "alice/chat", tokens, ctx)
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens[:count]), ctx)
    check_sink(sink, descriptor(), tokens, count if count == 3_000 else count // 16 * 16)
    sink.close()


MIXED = (
    Group("sliding", (0, 1, 2, 3, 4), 1, 16, 16, 512),
    Group("full", (5,), 1, 16, 16),
    Group("sliding", (6, 7), 1, 16, 16, 100),
)


def test_windows_are_stored_and_fetched_alone(ctx: Context) -> None:  # K18
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(5_003)
    meaning = descriptor(*MIXED)
    report = push_session(PushSession(repo, "alice/chat", source(meaning, tokens)), ctx)
    needed = 5 * 511 * 64 + 5_003 * 64 + 2 * 99 * 64
    sink = MemorySink()
    report = pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens), ctx)
    assert report.bytes == needed
    assert report.needed == needed
    assert 1.0 <= report.over_fetch < 1.02  # what fills the blocks at the ends of each window
    check_sink(sink, meaning, tokens, 5_003)
    assert sink.layout is not None
    assert {slot.layer: slot.start for slot in sink.layout.slots} == {
        **dict.fromkeys(range(5), 5_003 - 511),
        5: 0,
        **dict.fromkeys((6, 7), 5_003 - 99),
    }
    sink.close()


def test_a_prefix_without_its_window_is_not_usable(ctx: Context) -> None:  # K18
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(2_000)
    meaning = descriptor(*MIXED)
    push_session(PushSession(repo, "alice/chat", source(meaning, tokens)), ctx)
    verdict = resolve_session(PullSession(repo, "alice/chat", tokens=tokens[:1_800]), ctx)
    assert verdict.usable == 0
    assert "window of" in verdict.reason
    push_session(PushSession(repo, "alice/whole", source(meaning, tokens, whole_windows=True)), ctx)
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/whole", sink, tokens=tokens[:1_800]), ctx)
    check_sink(sink, meaning, tokens, 1_792)
    sink.close()


def test_generations_share_windows(ctx: Context) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(2_400)
    meaning = descriptor(*MIXED)
    for end in (1_600, 1_850, 2_075, 2_400):
        push_session(PushSession(repo, "alice/chat", source(meaning, tokens[:end])), ctx)
    for generation, end in enumerate((1_600, 1_850, 2_075, 2_400), 1):
        sink = MemorySink()
        pull_session(PullSession(repo, f"alice/chat@{generation}", sink, tokens=tokens[:end]), ctx)
        check_sink(sink, meaning, tokens, end)
        sink.close()


def test_mla_with_an_indexer_and_recurrent_states(ctx: Context) -> None:  # K18
    groups = (
        Group("mla", (0, 1), 1, 512, 64),
        Group("indexer", (0, 1), 1, 128, 0),
        Group("recurrent", (2, 3), 1, 6_000, 0),
    )
    meaning = descriptor(*groups)
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(1_205)
    push_session(PushSession(repo, "alice/chat", source(meaning, tokens)), ctx)
    sink = MemorySink()
    report = pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens), ctx)
    check_sink(sink, meaning, tokens, 1_205)
    assert report.bytes == 1_205 * 2 * (576 + 128) * 2 + 2 * 6_000
    sink.close()
    verdict = resolve_session(PullSession(repo, "alice/chat", tokens=tokens[:1_200]), ctx)
    assert verdict.usable == 0
    assert "a recurrent state is stored after token 1,205 only" in verdict.reason
    second = push_session(PushSession(repo, "alice/chat", source(meaning, some_tokens(1_205) + tokens[:40])), ctx)
    assert second.extra["tokens_shared"] == 1_200
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat", sink), ctx)
    check_sink(sink, meaning, some_tokens(1_205) + tokens[:40], 1_245)
    sink.close()


@pytest.mark.parametrize(("writer", "size"), [(4, 2), (4, 8), (4, 16), (4, 1)])
def test_any_reader_takes_its_heads(ctx: Context, writer: int, size: int, calls: Calls) -> None:  # K19
    """The store is canonical: whatever the writer's TP was, a rank reads its heads, and no byte of others."""
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(1_024)
    push(repo, "alice/chat", tokens, ctx, WIDE)
    whole = 1_024 * 2 * 8 * 256
    for rank in range(size):
        sink = MemorySink()
        calls.reset()
        report = pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens, tp_rank=rank, tp_size=size), ctx)
        heads = max(1, 8 // size)
        first = rank * 8 // size
        check_sink(sink, descriptor(WIDE), tokens, 1_024, heads=(first, first + heads))
        assert report.fetched == report.needed == whole * heads // 8
        assert len(calls.reads("chunks/")) == (1 if size == 1 else 4)  # a range for each K and V of a layer
        sink.close()


def test_heads_that_do_not_divide_are_refused(ctx: Context) -> None:
    repo = make_repo(mem_stores(1), ctx)
    push(repo, "alice/chat", some_tokens(100), ctx, WIDE)
    with pytest.raises(IncompatibleError, match="cannot be divided"):
        resolve_session(PullSession(repo, "alice/chat", tp_rank=0, tp_size=3), ctx)
    with pytest.raises(UsageError):
        resolve_session(PullSession(repo, "alice/chat", tp_size=2), ctx)
    with pytest.raises(UsageError, match="no layer 7"):
        resolve_session(PullSession(repo, "alice/chat", layers=(1, 7)), ctx)


def test_one_layer_is_one_range_per_pack(ctx: Context, calls: Calls) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(3_072)
    push(repo, "alice/chat", tokens, ctx, WIDE)
    sink = MemorySink()
    calls.reset()
    report = pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens, layers=(1,)), ctx)
    assert calls.reads("chunks/") == [1_024 * 8 * 256] * 3
    assert report.fetched == report.needed == 3_072 * 8 * 256
    check_sink(sink, descriptor(WIDE), tokens, 3_072)
    sink.close()


@pytest.mark.parametrize("codec", ["zstd", "fp8"])
def test_codecs_do_not_break_ranges(ctx: Context, codec: str) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(2_048)
    meaning = descriptor(WIDE)
    try:
        push_session(PushSession(repo, "alice/chat", source(meaning, tokens), codec=codec), ctx)
    except IncompatibleError:
        assert codec == "fp8"  # random bits are not all finite numbers
        return
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens[:1_500], tp_rank=1, tp_size=2), ctx)
    check_sink(sink, meaning, tokens, 1_488, heads=(4, 8))
    sink.close()


@pytest.mark.parametrize("others", [3, 30])
def test_requests_of_a_pull_do_not_follow_the_store(ctx: Context, calls: Calls, others: int) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(2_500)
    push(repo, "alice/chat", tokens, ctx)
    for number in range(others):
        push(repo, f"bob/chat{number}", tokens[:200] + some_tokens(100, seed=number + 1), ctx)
    calls.reset()
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens), ctx)
    assert len(calls.bulk) == 3
    assert len(calls.control) == 18, calls.control
    calls.reset()
    report = push(repo, "alice/chat", tokens + some_tokens(16, seed=999), ctx)
    assert report.extra["tokens_shared"] == 2_496
    assert len(calls.control) == 58, calls.control
    sink.close()


def test_a_bundle_is_made_under_one_lease(ctx: Context, calls: Calls, tmp_path: Path) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(1_000)
    push(repo, "alice/chat", tokens, ctx, with_tokens=True)
    calls.reset()
    pull_bundle(PullSession(repo, "alice/chat"), str(tmp_path / "chat.safetensors"), ctx)
    assert calls.count("put", "leases/") == 1, "keys, values and tokens are of one generation"
    assert calls.count("get", "member.json") == 1, "the repo is opened once"
    with read_bundle(tmp_path / "chat.safetensors") as bundle:
        assert bundle.token_ids == tokens


def test_pulls_that_share_a_repo_do_not_open_it_again(ctx: Context, calls: Calls) -> None:
    stores = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(1_000)
    push(stores, "alice/chat", tokens, ctx)
    sink = MemorySink()
    with Repo.open(stores, ctx) as repo:
        for _ in range(2):
            calls.reset()
            pull_from(repo, PullSession((), "alice/chat", sink), ctx)
            check_sink(sink, descriptor(), tokens, 1_000)
        assert calls.count("get", "member.json") == 0
    sink.close()
