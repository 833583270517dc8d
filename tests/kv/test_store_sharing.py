"""Blocks are stored once: what a push shares, writes and asks for, counted."""

from __future__ import annotations

import json
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import IncompatibleError
from kvctl.kv.catalog import Stale
from kvctl.kv.identity import Group, Lora
from kvctl.kv.inspecting import InspectRequest, inspect_session, list_sessions
from kvctl.kv.pull import PullSession, pull_session, resolve_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import MemorySink
from kvctl.kv.tokens import Extra, salt_id
from kvctl.repo.repo import Repo
from tests.kv.counting import Calls
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, objects, push, some_tokens, source


def test_second_generation_writes_what_is_new(ctx: Context, calls: Calls) -> None:  # K16
    """Nine tenths are shared: a tenth of the bytes is written, and the requests are counted."""
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(10_240)
    first = push(repo, "alice/chat", tokens[:9_216], ctx)
    calls.reset()
    second = push(repo, "alice/chat", tokens, ctx)
    assert (first.extra["generation"], second.extra["generation"], second.extra["parent"]) == (1, 2, 1)
    assert second.extra["tokens_shared"] == 9_216
    assert second.extra["blocks_written"] == 64
    assert second.extra["packs_written"] == 1
    assert second.extra["packs_shared"] == 9
    assert second.extra["index_requests"] <= 9 + 4 + 2 * 4  # anchors read back, gallop and bisection, the tail
    assert second.written * 9 == pytest.approx(first.written, rel=0.05)
    assert calls.count("put", "chunks/") == 0  # bulk bytes go through a transport, and only the new pack's
    assert calls.written("chunks/") == second.written
    assert calls.count("stat", "chunks/") == 9
    assert calls.count("list", "chunks/") == 1  # the new pack, by its digest
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat@2", sink, tokens=tokens), ctx)
    check_sink(sink, descriptor(), tokens, 10_240)
    sink.close()


@pytest.mark.parametrize(("length", "shared"), [(1_000, 992), (2_048, 2_048), (3_005, 2_992), (16, 16), (15, 0)])
def test_a_longer_push_shares_every_whole_block(ctx: Context, length: int, shared: int) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(4_000)
    push(repo, "alice/chat", tokens[:length], ctx)
    report = push(repo, "bob/other", tokens, ctx)
    assert report.extra["tokens_shared"] == shared
    sink = MemorySink()
    pull_session(PullSession(repo, "bob/other", sink, tokens=tokens), ctx)
    check_sink(sink, descriptor(), tokens, 4_000)
    sink.close()


def test_a_fork_shares_up_to_an_index_node(ctx: Context) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(3_000)
    push(repo, "alice/chat", tokens, ctx)
    fork = tokens[:2_400] + some_tokens(600, seed=1)
    report = push(repo, "alice/fork", fork, ctx)
    assert report.extra["tokens_shared"] == 2_304  # 2,048 and two times 128
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/fork", sink, tokens=fork), ctx)
    check_sink(sink, descriptor(), fork, 3_000)
    sink.close()


def test_the_same_push_again_makes_no_generation(ctx: Context) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(500)
    push(repo, "alice/chat", tokens, ctx)
    before = objects(repo)
    report = push(repo, "alice/chat", tokens, ctx)
    assert report.extra["generation"] == 1
    assert not report.extra["new_generation"]
    assert objects(repo) == before


def test_pushes_at_once_get_a_generation_each(ctx: Context) -> None:  # K8
    repo = make_repo(mem_stores(2), ctx)
    sessions = [some_tokens(300 + n, seed=n) for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        reports = list(pool.map(lambda tokens: push(repo, "alice/chat", tokens, ctx), sessions))
    assert sorted(report.extra["generation"] for report in reports) == [1, 2, 3, 4, 5, 6]
    for tokens, report in zip(sessions, reports, strict=True):
        sink = MemorySink()
        pull_session(PullSession(repo, f"alice/chat@{report.extra['generation']}", sink, tokens=tokens), ctx)
        check_sink(sink, descriptor(), tokens, len(tokens))
        sink.close()


def test_other_weights_are_another_namespace(ctx: Context) -> None:  # K1
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(200)
    old, new = descriptor(), descriptor(weights="dd" * 32)
    push_session(PushSession(repo, "alice/chat", source(old, tokens)), ctx)
    with pytest.raises(IncompatibleError, match="another model run") as caught:
        resolve_session(PullSession(repo, "alice/chat", descriptor=new), ctx)
    assert f"weights is {'dd' * 32} here and {'aa' * 32} there" in str(caught.value)
    report = push_session(PushSession(repo, "alice/chat", source(new, tokens)), ctx)
    assert report.extra["tokens_shared"] == 0
    details = inspect_session(InspectRequest(repo, "alice/chat@1", new, new.weights), ctx)
    assert (details.stale, details.compatible) == (True, False)
    assert inspect_session(InspectRequest(repo, "alice/chat@2", new, new.weights), ctx).stale is False
    with pytest.raises(IncompatibleError, match="not known"):
        Stale(None, "tiny").check()


@pytest.mark.parametrize(
    "change",
    [
        {"lora": (Lora("ee" * 32, "2"),)},
        {"dtype": "F16"},
        {"scales": "ee" * 32},
        {"tokenizer": "ee" * 32},
        {"block_tokens": 32},
        {"groups": (Group("full", (0, 1), 4, 4, 4),)},
    ],
    ids=["lora", "dtype", "scales", "tokenizer", "block", "heads"],
)
def test_a_run_that_differs_shares_nothing_and_is_refused(ctx: Context, change: dict[str, object]) -> None:  # K2, K3
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(200)
    push_session(PushSession(repo, "alice/chat", source(descriptor(), tokens)), ctx)
    other = descriptor(**change)
    with pytest.raises(IncompatibleError) as caught:
        pull_session(PullSession(repo, "alice/chat", MemorySink(), descriptor=other), ctx)
    assert next(iter(change)) in str(caught.value)
    assert push_session(PushSession(repo, "bob/chat", source(other, tokens)), ctx).extra["tokens_shared"] == 0


def test_two_adapters_of_one_name(ctx: Context) -> None:  # K2
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(100)
    for name, digest in (("alice/one", "11" * 32), ("alice/two", "22" * 32)):
        meaning = descriptor(lora=(Lora(digest, "1"),))
        pushed = source(meaning, tokens, producer={"model": "tiny", "lora": "helper"})
        report = push_session(PushSession(repo, name, pushed), ctx)
        assert report.extra["tokens_shared"] == 0


def test_salts_divide_and_stay_out(ctx: Context) -> None:  # K4
    master = b"\1" * 32
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(100)
    from kvctl.kv.tokens import domain_secret

    secret = domain_secret(master, "alice")
    keys: list[set[str]] = []
    for name, salt in (("alice/one", b"first raw salt"), ("alice/two", b"second raw salt")):
        meaning = descriptor(salt=salt_id(secret, salt))
        before = set(objects(repo, "index/"))
        report = push_session(PushSession(repo, name, source(meaning, tokens), key=master), ctx)
        keys.append({key.rpartition("/")[2] for key in set(objects(repo, "index/")) - before})
        everything = b"".join(objects(repo).values()) + json.dumps(report.to_json()).encode()
        assert salt not in everything
        assert master not in everything
    assert not keys[0] & keys[1]


def test_images_count_in_keys(ctx: Context) -> None:  # K5
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(100)
    meaning = descriptor()
    first, second = (Extra(32, 16, "image", bytes([n]) * 32) for n in (1, 2))
    made = source(meaning, tokens)
    made.extras = (first,)
    push_session(PushSession(repo, "alice/chat", made), ctx)
    sink = MemorySink()
    assert pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens, extras=(first,)), ctx).bytes
    check_sink(sink, meaning, tokens, 100)
    verdict = resolve_session(PullSession(repo, "alice/chat", tokens=tokens, extras=(second,)), ctx)
    assert (verdict.usable, verdict.reason) == (32, "the tokens differ from token 32 on")
    sink.close()


def test_a_key_of_other_tokens_is_a_miss(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:  # K7
    """Keys that collide: every block gets the key of its place, whatever its tokens are."""
    from kvctl.kv import push as pushing
    from kvctl.kv import reading, tokens

    real = tokens.chain

    def colliding(secret: bytes, ns: str, ids: array[int], *args: object, **more: object) -> list[tokens.BlockKey]:
        fake = [bytes([number % 256]) * 32 for number in range(len(ids) // 16 + 2)]
        return [
            tokens.BlockKey(fake[n + 1], fake[n] if n else bytes(32), block.start, block.count, block.token_hmac)
            for n, block in enumerate(real(secret, ns, ids))
        ]

    monkeypatch.setattr(pushing, "chain", colliding)
    monkeypatch.setattr(reading, "chain", colliding)
    repo = make_repo(mem_stores(1), ctx)
    push(repo, "alice/chat", some_tokens(160), ctx)
    other = some_tokens(160, seed=1)
    verdict = resolve_session(PullSession(repo, "alice/chat", tokens=other), ctx)
    assert verdict.usable == 0
    assert "under the key of other tokens" in verdict.reason
    report = push(repo, "bob/chat", other, ctx)  # the index node is there, of other tokens: no link to it
    assert report.extra["tokens_shared"] == 0


def test_listing_is_rebuilt_from_the_store(repo: tuple[StoreConfig, ...], ctx: Context) -> None:  # K14
    tokens = some_tokens(400)
    push(repo, "alice/chat", tokens, ctx, labels={"kind": "test"})
    push(repo, "alice/chat", tokens + some_tokens(100, seed=2), ctx)
    push(repo, "bob/x y/z", tokens, ctx)
    listed = list_sessions(repo, ctx)
    assert [str(entry.found) for entry in listed.entries] == ["alice/chat@1", "alice/chat@2", "bob/x y/z@1"]
    one, two, three = listed.entries
    assert one.labels == {"kind": "test"}
    assert one.unique_bytes == 0 == three.unique_bytes
    assert 0 < two.unique_bytes < two.bytes
    assert listed.bytes == two.bytes
    with Repo.open(repo, ctx) as opened:
        assert len(opened.list_meta("ns/")) == 1


def test_what_follows_in_a_shared_pack_is_not_taken(ctx: Context) -> None:
    """The pack goes on with another session's blocks in the very fragment that is needed; the own ones are small, so
    that they arrive first.
    """
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(137)
    push(repo, "alice/chat", tokens, ctx)
    fork = tokens[:135] + some_tokens(60, seed=1)
    assert push(repo, "alice/fork", fork, ctx).extra["tokens_shared"] == 128
    for _ in range(10):
        sink = MemorySink()
        pull_session(PullSession(repo, "alice/fork", sink, tokens=fork), ctx)
        check_sink(sink, descriptor(), fork, 195)
        sink.close()
