"""Eviction: what goes, what stays, what is freed and when; and gc, repacking, leases and clocks around it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import CapacityError, IncompatibleError, NotFoundError, PartialError, UsageError
from kvctl.kv import sessions
from kvctl.kv.catalog import Filter, Stale
from kvctl.kv.evict import Eviction, EvictRequest, evict_sessions, pin_sessions, unpin_sessions
from kvctl.kv.identity import Descriptor
from kvctl.kv.inspecting import list_sessions
from kvctl.kv.names import parse_session
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.reading import StoredSession
from kvctl.kv.repacking import repack_sessions
from kvctl.kv.seams import KvSink, LayerKv, Layout, MemorySink
from kvctl.repo.gc import GcOptions, GcResult, run_gc
from kvctl.repo.repo import Repo
from kvctl.transports.mem import space
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, objects, push, some_tokens, source

Stores = tuple[StoreConfig, ...]


def evict(repo: Stores, ctx: Context, *patterns: str, **options: object) -> Eviction:
    return evict_sessions(EvictRequest(repo, patterns, **options), ctx)  # type: ignore[arg-type]


def collect(repo: Stores, ctx: Context, *, repack: float | None = None) -> GcResult:
    with Repo.open(repo, ctx) as opened:
        repacker = None if repack is None else repack_sessions
        return run_gc(opened, GcOptions(grace=0, repacker=repacker, live_ratio=repack or 0.5))


def names(repo: Stores, ctx: Context) -> list[str]:
    return [str(entry.found) for entry in list_sessions(repo, ctx).entries]


def chunk_bytes(repo: Stores) -> int:
    return sum(map(len, objects(repo, "chunks/").values()))


def skip(repo: Stores, seconds: float) -> None:
    for config in repo:
        space(config.url.removeprefix("mem://")).clock_skew += timedelta(seconds=seconds)


def check_pull(repo: Stores, ctx: Context, address: str, count: int, seed: int = 0) -> None:
    tokens = some_tokens(count, seed)
    sink = MemorySink()
    pull_session(PullSession(repo, address, sink, tokens=tokens), ctx)
    check_sink(sink, descriptor(), tokens, count)
    sink.close()


@pytest.fixture
def repo(ctx: Context) -> Stores:
    return make_repo(mem_stores(1), ctx)


def test_shared_blocks_stay_until_the_last_owner_goes(repo: Stores, ctx: Context) -> None:  # K12
    push(repo, "alice/chat", some_tokens(2_048), ctx)
    push(repo, "bob/chat", some_tokens(2_048) + some_tokens(1_000, seed=5), ctx)
    before = chunk_bytes(repo)
    plan = evict(repo, ctx, "alice/chat")
    assert (plan.evicted, plan.freed_bytes, plan.repack_bytes, plan.nodes) == (True, 0, 0, 0)
    collect(repo, ctx, repack=0.99)
    assert chunk_bytes(repo) == before
    sink = MemorySink()
    pull_session(PullSession(repo, "bob/chat", sink), ctx)
    check_sink(sink, descriptor(), some_tokens(2_048) + some_tokens(1_000, seed=5), 3_048)
    sink.close()
    with pytest.raises(NotFoundError):
        pull_session(PullSession(repo, "alice/chat", MemorySink()), ctx)
    plan = evict(repo, ctx, "bob/*")
    assert plan.freed_bytes == before
    result = collect(repo, ctx)
    assert result.deleted_bytes == before
    assert not objects(repo, "chunks/")
    assert not objects(repo, "index/")
    assert not objects(repo, "sessions/")


def test_unique_bytes_are_what_an_eviction_frees(repo: Stores, ctx: Context) -> None:  # K12
    push(repo, "alice/chat", some_tokens(2_048), ctx)
    push(repo, "alice/chat", some_tokens(2_048) + some_tokens(1_500, seed=1), ctx)
    listed = {str(entry.found): entry for entry in list_sessions(repo, ctx).entries}
    plan = evict(repo, ctx, "alice/chat@2")
    assert plan.freed_bytes == listed["alice/chat@2"].unique_bytes > 0
    assert collect(repo, ctx).deleted_bytes == plan.freed_bytes
    check_pull(repo, ctx, "alice/chat", 2_048)


def test_a_pack_of_which_a_part_is_used_is_repacked(repo: Stores, ctx: Context) -> None:
    long = some_tokens(1_000)
    push(repo, "alice/long", long, ctx)
    push(repo, "bob/short", long[:256] + some_tokens(700, seed=1), ctx)
    assert push(repo, "carol/short", long[:256], ctx).extra["packs_written"] == 0
    plan = evict(repo, ctx, "alice/long", dry_run=True)
    assert plan.freed_bytes == 0
    assert plan.repack_bytes == pytest.approx(chunk_bytes_of(repo, ctx, "alice/long") * 47 / 63, rel=0.01)
    evict(repo, ctx, "alice/long")
    assert collect(repo, ctx).deleted_bytes == 0
    result = collect(repo, ctx, repack=0.5)
    assert result.repacked_packs == 1
    assert result.deleted_bytes > 0
    assert result.repacked_bytes == pytest.approx(plan.repack_bytes, rel=0.15)
    check_pull(repo, ctx, "carol/short", 256)
    sink = MemorySink()
    pull_session(PullSession(repo, "bob/short", sink), ctx)
    check_sink(sink, descriptor(), long[:256] + some_tokens(700, seed=1), 956)
    sink.close()
    assert push(repo, "dave/more", long, ctx).extra["tokens_shared"] == 256  # the index names the new pack
    assert collect(repo, ctx, repack=0.5).repacked_packs == 0


def chunk_bytes_of(repo: Stores, ctx: Context, name: str) -> int:
    return next(entry.bytes for entry in list_sessions(repo, ctx, [name]).entries)


def test_leased_is_skipped_pinned_is_kept(repo: Stores, ctx: Context) -> None:  # K12
    for number, name in enumerate(("held", "pinned", "free")):
        push(repo, f"alice/{name}", some_tokens(200, seed=number), ctx)
    pin_sessions(repo, ["alice/pinned"], ctx)
    with (
        Repo.open(repo, ctx) as opened,
        StoredSession.open(opened, parse_session("alice/held"), ctx),
    ):
        plan = evict(repo, ctx, "alice/*")
        assert [str(entry.found) for entry in plan.evict] == ["alice/free@1"]
        assert [str(entry.found) for entry in plan.leased] == ["alice/held@1"]
        assert [str(entry.found) for entry in plan.pinned] == ["alice/pinned@1"]
        collect(repo, ctx)
        check_pull(repo, ctx, "alice/held", 200, 0)
    unpin_sessions(repo, ["alice/pinned"], ctx)
    evict(repo, ctx, "alice/*")
    assert names(repo, ctx) == []


def test_a_lease_on_one_generation_does_not_hold_another(repo: Stores, ctx: Context) -> None:
    push(repo, "alice/chat", some_tokens(1_024), ctx)
    push(repo, "alice/chat", some_tokens(1_024) + some_tokens(100, seed=1), ctx)
    with Repo.open(repo, ctx) as opened, StoredSession.open(opened, parse_session("alice/chat@2"), ctx):
        plan = evict(repo, ctx, "alice/chat")
    assert [str(entry.found) for entry in plan.evict] == ["alice/chat@1"]


class Evictor(MemorySink):
    """Somebody evicts the session, and gc runs, once the pull has its verdict."""

    def __init__(self, repo: Stores, ctx: Context) -> None:
        super().__init__()
        self.repo, self.ctx = repo, ctx

    def prepare(self, meaning: Descriptor, layout: Layout) -> list[LayerKv]:
        with Repo.open(self.repo, self.ctx) as opened:
            sessions.list_generations(opened)
            opened.delete_meta(parse_session("alice/chat").session.key(1))  # as an evictor that saw no lease
        collect(self.repo, self.ctx)
        return list(super().prepare(meaning, layout))


def test_eviction_during_a_pull(repo: Stores, ctx: Context) -> None:  # K11
    tokens = some_tokens(1_500)
    push(repo, "alice/chat", tokens, ctx)
    sink: KvSink = Evictor(repo, ctx)
    pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens), ctx)
    assert isinstance(sink, Evictor)
    check_sink(sink, descriptor(), tokens, 1_500)
    sink.close()
    collect(repo, ctx)
    assert not objects(repo, "chunks/")


def test_without_a_lease_a_pull_fails_cleanly(repo: Stores, ctx: Context) -> None:  # K11
    tokens = some_tokens(1_500)
    push(repo, "alice/chat", tokens, ctx)

    class Late(Evictor):
        def prepare(self, meaning: Descriptor, layout: Layout) -> list[LayerKv]:
            skip(self.repo, 7 * 3600)  # the lease runs out: its holder was away for too long
            for config in self.repo:
                found = space(config.url.removeprefix("mem://")).objects
                for key in [key for key in found if key.startswith("leases/")]:
                    del found[key]
            return super().prepare(meaning, layout)

    sink = Late(repo, ctx)
    with pytest.raises(PartialError):
        pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens), ctx)
    assert sink.usable == 0
    sink.close()


def test_a_vanished_holder_expires_by_the_stores_clock(repo: Stores, ctx: Context) -> None:  # K20
    push(repo, "alice/chat", some_tokens(200), ctx)
    with Repo.open(repo, ctx) as opened:
        session = StoredSession.open(opened, parse_session("alice/chat"), ctx)  # never given back
        assert [str(e.found) for e in evict(repo, ctx, "alice/chat").leased] == ["alice/chat@1"]
        skip(repo, 7 * 3600)
        assert [str(e.found) for e in evict(repo, ctx, "alice/chat").evict] == ["alice/chat@1"]
        collect(repo, ctx)
        assert not objects(repo, "chunks/")
        assert session.hold is not None
        from kvctl.core.errors import TransientError

        with pytest.raises(TransientError, match="ran out"):  # the late owner finds out, whatever its own clock says
            session.hold.check_open()


def test_writers_with_other_clocks(ctx: Context) -> None:  # K20
    repo = make_repo(mem_stores(2), ctx)
    space(repo[1].url.removeprefix("mem://")).clock_skew = timedelta(hours=-5)
    for number in range(4):
        push(repo, f"alice/chat{number}", some_tokens(300, seed=number), ctx)
        collect(repo, ctx)
    for number in range(4):
        check_pull(repo, ctx, f"alice/chat{number}", 300, number)


def test_policies(repo: Stores, ctx: Context) -> None:
    push(repo, "alice/old", some_tokens(300), ctx, labels={"team": "red"})
    skip(repo, 3 * 86_400)
    push(repo, "alice/new", some_tokens(300, seed=1), ctx)
    push(repo, "bob/new", some_tokens(300, seed=2), ctx, expires=3_600.0)

    def would(**fields: object) -> list[str]:
        chosen = Filter(**fields)  # type: ignore[arg-type]  # fields by name
        return [str(entry.found) for entry in evict(repo, ctx, filter=chosen, dry_run=True).evict]

    assert would(older_than=86_400.0) == ["alice/old@1"]
    assert would(idle=86_400.0) == ["alice/old@1"]
    assert would(tenant="bob") == ["bob/new@1"]
    assert would(labels={"team": "r*"}) == ["alice/old@1"]
    assert would(model="tin*", tenant="alice") == ["alice/new@1", "alice/old@1"]
    assert would(model="other") == []
    assert would(weights="aaaaaaaa") == ["alice/new@1", "alice/old@1", "bob/new@1"]
    assert would(expired=True) == []
    skip(repo, 3_700)
    assert would(expired=True) == ["bob/new@1"]
    check_pull(repo, ctx, "alice/old", 300)
    assert would(idle=86_400.0) == []  # it was used just now
    with pytest.raises(UsageError, match="nothing says"):
        evict(repo, ctx)
    with pytest.raises(NotFoundError):
        evict(repo, ctx, "carol/*")
    assert not evict(repo, ctx, "carol/*", allow_empty=True).evict
    with pytest.raises(UsageError, match="not TENANT/NAME"):
        evict(repo, ctx, "alice")
    assert len(names(repo, ctx)) == 3


def test_stale_for_purges_what_the_model_left_behind(repo: Stores, ctx: Context) -> None:  # K1
    tokens = some_tokens(100)
    for name, weights, label in (("a", "aa", "tiny"), ("b", "dd", "tiny"), ("c", "ee", "another")):
        meaning = descriptor(weights=weights * 32)
        pushed = source(meaning, tokens, producer={"model": label})
        push_session(PushSession(repo, f"alice/{name}", pushed), ctx)
    for digest in (None, ""):
        with pytest.raises(IncompatibleError, match="not known"):
            evict(repo, ctx, filter=Filter(stale_for=Stale(digest, "tiny")))
    assert len(names(repo, ctx)) == 3
    stale = Filter(stale_for=Stale("dd" * 32, "tiny"))
    assert [str(e.found) for e in list_sessions(repo, ctx, chosen=stale).entries] == ["alice/a@1"]
    evict(repo, ctx, filter=stale)
    assert names(repo, ctx) == ["alice/b@1", "alice/c@1"]


def test_size_budget_and_limit(repo: Stores, ctx: Context) -> None:
    for number in range(4):
        push(repo, f"alice/chat{number}", some_tokens(512, seed=number), ctx)
        skip(repo, 7_200)
    one = chunk_bytes(repo) // 4
    check_pull(repo, ctx, "alice/chat0", 512)  # used last now
    plan = evict(repo, ctx, max_bytes=2 * one, dry_run=True)
    assert [str(entry.found) for entry in plan.evict] == ["alice/chat1@1", "alice/chat2@1"]
    assert not evict(repo, ctx, max_bytes=4 * one).evict
    plan = evict(repo, ctx, "alice/*", limit_bytes=one + one // 2)
    assert (len(plan.evict), plan.limited, plan.freed_bytes) == (1, True, one)


def test_confirmation_comes_before_anything_goes(repo: Stores, ctx: Context) -> None:
    push(repo, "alice/chat", some_tokens(200), ctx)
    seen: list[Eviction] = []

    def refuse(plan: Eviction) -> None:
        seen.append(plan)
        raise UsageError("no terminal")

    before = objects(repo)
    with pytest.raises(UsageError):
        evict_sessions(EvictRequest(repo, ("alice/chat",)), ctx, confirm=refuse)
    assert [str(entry.found) for entry in seen[0].evict] == ["alice/chat@1"]
    assert seen[0].due
    assert objects(repo) == before


def test_pins_have_a_budget(repo: Stores, ctx: Context) -> None:
    for number in range(3):
        push(repo, f"alice/chat{number}", some_tokens(300, seed=number), ctx)
    one = chunk_bytes(repo) // 3
    pin_sessions(repo, ["alice/chat0"], ctx, budget=2 * one)
    with pytest.raises(CapacityError, match="would keep"):
        pin_sessions(repo, ["alice/*"], ctx, budget=2 * one)
    assert [entry.pinned for entry in list_sessions(repo, ctx).entries] == [True, False, False]


def test_a_generations_number_never_comes_twice(repo: Stores, ctx: Context) -> None:
    for seed in range(3):
        push(repo, "alice/chat", some_tokens(100, seed), ctx)
    evict(repo, ctx, "alice/chat@3")
    evict(repo, ctx, "alice/chat@2")
    assert push(repo, "alice/chat", some_tokens(100, 9), ctx).extra["generation"] == 4
    evict(repo, ctx, "alice/chat")
    assert push(repo, "alice/chat", some_tokens(100, 9), ctx).extra["generation"] == 5


def test_the_longest_goes_first(repo: Stores, ctx: Context) -> None:  # K13
    tokens = some_tokens(3_000)
    for end in (1_024, 2_048, 3_000):
        push(repo, "alice/chat", tokens[:end], ctx)
    plan = evict(repo, ctx, "alice/chat", dry_run=True)
    assert [entry.found.generation for entry in plan.evict] == [3, 2, 1]
    evict(repo, ctx, "alice/chat@1")  # its blocks are those of the others: their index stays
    assert push(repo, "bob/chat", tokens, ctx).extra["tokens_shared"] == 3_000
