"""Very many small sessions: objects per session are bounded, listing and gc ask in proportion to what there is."""

from __future__ import annotations

import pytest

from kvctl.core.context import Context
from kvctl.kv.evict import EvictRequest, evict_sessions
from kvctl.kv.identity import Group
from kvctl.kv.inspecting import list_sessions
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.repacking import repack_sessions
from kvctl.kv.seams import MemorySource
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.repo import Repo
from tests.kv.counting import Calls
from tests.kv.world import descriptor, layer_kv, make_repo, mem_stores, objects, push, some_tokens

SMALL = Group("full", (0,), 1, 4, 4)


def fill(ctx: Context, count: int, calls: Calls) -> tuple[object, ...]:
    repo = make_repo(mem_stores(1), ctx)
    meaning = descriptor(SMALL)
    for number in range(count):
        tokens = some_tokens(32, seed=number)
        made = MemorySource(meaning, tokens, {(0, 0): layer_kv(meaning, tokens, 0, 0, 0)})
        push_session(PushSession(repo, f"tenant{number % 10}/chat{number}", made), ctx)
    per_session = {prefix: len(objects(repo, prefix)) for prefix in ("sessions/", "chunks/", "index/", "state/", "ns/")}
    assert per_session == {"sessions/": count, "chunks/": count, "index/": count, "state/": 0, "ns/": 1}
    calls.reset()
    assert len(list_sessions(repo, ctx).entries) == count
    listing = calls.total
    calls.reset()
    with Repo.open(repo, ctx) as opened:
        run_gc(opened, GcOptions(grace=0))
    collecting = calls.total
    calls.reset()
    evict_sessions(EvictRequest(repo, ("tenant1/*",)), ctx)
    evicting = calls.total
    return listing, collecting, evicting


def test_requests_are_proportional(ctx: Context, calls: Calls) -> None:  # K21
    small, large = (fill(ctx, count, calls) for count in (50, 250))
    for few, many in zip(small, large, strict=True):
        assert isinstance(few, int)
        assert isinstance(many, int)
        assert many <= 5 * few  # what does not grow only helps
    assert large[0] == 250 + LISTING


LISTING = 5  # opening the repo, two lists, the namespace


def test_a_long_sessions_manifest_is_small() -> None:
    """438,764 tokens of 430 KB each, as 189 GB of KV are."""
    from kvctl.kv.cutting import cut, pack_target
    from kvctl.kv.index import PackUse, points
    from kvctl.kv.names import SessionName
    from kvctl.kv.writing import make_manifest
    from kvctl.repo.chunks import ChunkRef

    tokens = 438_764
    meaning = descriptor(Group("full", tuple(range(105)), 8, 128, 128))
    cuts = cut(meaning, 0, 0, tokens, pack_target(meaning, tokens, None))
    size = 16 * 105 * 8 * 256 * 2
    uses = [
        PackUse(0, c.first, c.end - c.first, (c.end - c.begin) // 16 or 1, (c.end - c.begin) // 16 or 1, 4096,
                ChunkRef(f"{number:064x}", "0" * 8, size * (c.end - c.begin) // 16 + 4096))
        for number, c in enumerate(cuts)
    ]  # fmt: skip
    nodes = points(tokens, 16)
    manifest = make_manifest(
        SessionName("t", "s"), None, meaning, tokens, bytes(32), uses, [bytes(32)] * len(nodes), None,
        producer={}, labels={}, codecs=("none",),
    )  # fmt: skip
    assert not manifest.fault()
    assert len(manifest.to_bytes()) < 1 << 20
    assert len(uses) < 5_000
    assert len(nodes) <= tokens // 1_024 + 11


@pytest.mark.parametrize("sessions", [2, 8])
def test_gc_asks_for_each_manifest_and_index_node_and_lists_the_rest(ctx: Context, calls: Calls, sessions: int) -> None:
    """The numbers in `kvctl help repos`."""
    repo = make_repo(mem_stores(1), ctx)
    for number in range(sessions):
        push(repo, f"alice/chat{number}", some_tokens(1_200, seed=number), ctx)
    nodes = len(objects(repo, "index/"))
    assert nodes == 4 * sessions
    with Repo.open(repo, ctx) as opened:
        calls.reset()
        run_gc(opened)
        assert len(calls.control) == 10 + sessions
        calls.reset()
        run_gc(opened, GcOptions(repacker=repack_sessions))
        assert len(calls.control) == 14 + 4 * sessions + nodes
    assert not calls.bulk
