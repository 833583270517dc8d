"""Very many small sessions: objects per session are bounded, listing and gc ask in proportion to what there is."""

from __future__ import annotations

from array import array

import pytest

from kvctl.core.context import Context
from kvctl.kv.cutting import cut, pack_target
from kvctl.kv.evict import EvictRequest, evict_sessions
from kvctl.kv.identity import Group
from kvctl.kv.index import Finder, PackUse, make_nodes, write_nodes
from kvctl.kv.inspecting import list_sessions
from kvctl.kv.names import SessionName
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.repacking import repack_sessions
from kvctl.kv.seams import MemorySource
from kvctl.kv.tokens import PUBLIC_SECRET, chain, token_bytes
from kvctl.kv.writing import make_manifest
from kvctl.repo.chunks import ChunkRef
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.repo import Repo
from tests.kv.counting import Calls
from tests.kv.world import descriptor, layer_kv, make_repo, mem_stores, objects, push, some_ids, some_tokens

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


def test_a_long_session_is_its_packs_and_a_constant(ctx: Context, calls: Calls) -> None:
    """438,764 tokens of 430 KB each, as 189 GB of KV are: objects, their sizes, and how many find it again."""
    tokens = some_ids(438_764)
    meaning = descriptor(Group("full", tuple(range(105)), 8, 128, 128))
    cuts = cut(meaning, 0, 0, len(tokens), pack_target(meaning, len(tokens), None))
    size = 16 * 105 * 8 * 256 * 2
    uses = [
        PackUse(0, c.first, c.end - c.first, (c.end - c.begin) // 16 or 1, (c.end - c.begin) // 16 or 1, 4096,
                ChunkRef(f"{number:064x}", "0" * 8, size * (c.end - c.begin) // 16 + 4096))
        for number, c in enumerate(cuts)
    ]  # fmt: skip
    blocks = chain(PUBLIC_SECRET, meaning.digest, tokens)
    nodes = make_nodes(PUBLIC_SECRET, blocks, token_bytes(tokens), uses, meaning)
    manifest = make_manifest(
        SessionName("t", "s"), None, meaning, len(tokens), bytes(32), uses, [node.key for node in nodes], None,
        producer={}, labels={}, codecs=("none",),
    )  # fmt: skip
    assert not manifest.fault()
    assert len(manifest.to_bytes()) < 1 << 20
    assert len(uses) == 428 * 8 + 4  # packs of 128 tokens, 55 MB
    objects_but_packs = len(nodes) + len(("manifest", "descriptor"))
    assert objects_but_packs == 103 < 120
    assert max(len(node.to_bytes()) for node in nodes) < 16 << 10
    assert sum(len(node.to_bytes()) for node in nodes) < 1 << 20
    with Repo.open(make_repo(mem_stores(1), ctx), ctx) as repo:
        assert write_nodes(repo, meaning.digest, nodes, lambda _: False) == len(nodes)

        def found(wanted: array[int]) -> tuple[int, int]:
            """(tokens of the stored prefix, requests for it)."""
            keys = chain(PUBLIC_SECRET, meaning.digest, wanted)
            calls.reset()
            stored = Finder(repo, PUBLIC_SECRET, keys, token_bytes(wanted), meaning).find()
            assert calls.count("get", "index/") == len(calls.control)
            return stored.tokens, len(calls.control)

        more = some_ids(40_000, seed=1)
        assert found(tokens) == (len(tokens), 90 + 8)  # all its anchors, and steps behind the last one
        assert found(tokens + more) == (438_752, 102)
        assert found(tokens[:300_000] + more) == (294_912, 93)
        assert found(more) == (0, 7)


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
