"""Where index nodes lie, and that the longest prefix they lead to is found: by property, and through pushes of more
than 32,768 tokens, from where on anchors lie farther and farther apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.copying import CopySession, copy_session
from kvctl.kv.evict import EvictRequest, evict_sessions
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.index import Finder, Node, PackUse, make_nodes, node_key, write_nodes
from kvctl.kv.places import anchor_before, anchors, points, spacing, steps
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.seams import MemorySink
from kvctl.kv.tokens import PUBLIC_SECRET, BlockKey, chain, token_bytes
from kvctl.repo.chunks import ChunkRef
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.repo import Repo
from tests.kv.counting import Calls
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, objects, push, some_ids

THIN = Group("full", (0,), 1, 4, 4)
BLOCKS = st.sampled_from([1, 4, 16, 64, 256, 1024])

# -- where they lie -----------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 26))
def test_anchors_are_the_multiples_of_a_spacing_that_follows_from_the_place(tokens: int) -> None:
    found = anchors(tokens)
    assert all(place % spacing(place) == 0 == place % 1024 for place in found)
    assert [right - left for left, right in zip([0, *found], found, strict=False)] == [
        spacing(place) for place in [0, *found][:-1]
    ]
    assert found == sorted(set(found))
    assert tokens - (found[-1] if found else 0) < spacing(tokens)
    doublings = max(0, (max(tokens, 1) // 32_768).bit_length() - 1)
    assert len(found) <= 32 + 16 * (doublings + 1)
    if tokens:
        assert anchor_before(tokens) == max((place for place in found if place < tokens), default=0)


def test_how_many_anchors_there_are() -> None:
    assert anchors(32_768) == list(range(1_024, 32_769, 1_024))
    assert [len(anchors(tokens)) for tokens in (438_764, 1 << 20, 4_000_000, 4 << 20)] == [90, 112, 142, 144]
    assert [spacing(place) for place in (0, 1, 32_767, 32_768, 65_535, 65_536, 1 << 20)] == [
        *(1_024, 1_024, 1_024, 2_048, 2_048, 4_096, 65_536)
    ]


@given(st.integers(1, 1 << 23), BLOCKS)
def test_nodes_behind_the_last_anchor_end_at_the_end_and_are_few(tokens: int, size: int) -> None:
    found = points(tokens, size)
    assert found == sorted(set(found))
    assert found[-1] == tokens
    assert all(place % size == 0 for place in found[:-1])
    assert len(found) - len(anchors(tokens)) <= 3 * spacing(tokens).bit_length()
    assert tokens % size == 0 or len(found) == 1 or found[-2] == tokens // size * size


@given(st.integers(1, 1 << 23), st.data())
def test_what_a_divergence_costs_is_bounded(tokens: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, tokens))
    lost = at - max((place for place in points(tokens, 16) if place <= at), default=0)
    assert lost < 1_024 if at < 32_768 else lost * 16 < at
    last = max(anchors(tokens), default=0)
    if at >= last:
        assert lost < spacing(last) // 8
    if at == tokens:
        assert lost == 0


@given(st.integers(0, 1 << 23), BLOCKS)
def test_steps_divide_each_other_and_are_blocks(place: int, size: int) -> None:
    found = list(steps(max(anchors(place), default=0), size))
    assert found[-4:] == [8 * size, 4 * size, 2 * size, size]
    for coarse, fine in pairwise(found):
        assert coarse % fine == 0
        assert coarse // fine <= 8


# -- what is found ------------------------------------------------------------------------------------------


def one_pack(meaning: Descriptor, tokens: int, number: int) -> PackUse:
    blocks = -(-tokens // meaning.block_tokens)
    return PackUse(0, 0, tokens, blocks, blocks, 4096, ChunkRef(f"{number:064x}", "0" * 8, 4096 + blocks))


def keys_of(meaning: Descriptor, tokens: array[int]) -> list[BlockKey]:
    return chain(PUBLIC_SECRET, meaning.digest, tokens, meaning.block_tokens)


def nodes_of(meaning: Descriptor, tokens: array[int], number: int = 0) -> list[Node]:
    uses = [one_pack(meaning, len(tokens), number)]
    return make_nodes(PUBLIC_SECRET, keys_of(meaning, tokens), token_bytes(tokens), uses, meaning)


def finder(repo: Repo, meaning: Descriptor, tokens: array[int]) -> Finder:
    return Finder(repo, PUBLIC_SECRET, keys_of(meaning, tokens), token_bytes(tokens), meaning)


def common(left: array[int], right: array[int]) -> int:
    """How many tokens two texts begin with alike."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


def predicted(stored: Sequence[array[int]], wanted: array[int], size: int) -> int:
    """The last place of any session's nodes that the wanted tokens reach: whole blocks, or all of them."""
    return max(
        (
            place
            for session in stored
            for place in points(len(session), size)
            if place <= common(session, wanted) and (place % size == 0 or place == len(wanted))
        ),
        default=0,
    )


@st.composite
def texts(draw: st.DrawFn, most: int) -> list[array[int]]:
    """Texts of at most so many tokens, each of which begins as one of the others does, for some while."""
    found: list[array[int]] = []
    edges = [length for length in (1_024, 32_768, 34_816, 65_536) if length <= most]
    for seed in range(draw(st.integers(2, 4))):
        tokens = some_ids(draw(st.one_of(st.integers(1, most), st.sampled_from(edges))), seed=seed)
        if found:
            other = draw(st.sampled_from(found))
            kept = draw(st.integers(1, len(other)))
            tokens = other[:kept] + tokens[: draw(st.sampled_from([0, 1_000, most]))]
        found.append(tokens)
    return found


@settings(max_examples=60)
@given(st.data(), st.sampled_from([(16, 80_000), (64, 200_000), (1_024, 3_000_000)]))
def test_the_longest_prefix_that_nodes_lead_to_is_found(data: st.DataObject, kind: tuple[int, int]) -> None:
    """Any sessions, any common prefixes."""
    size, most = kind
    meaning = descriptor(THIN, block_tokens=size)
    *stored, wanted = data.draw(texts(most))
    ctx = Context()
    with Repo.open(make_repo(mem_stores(1), ctx), ctx) as repo:
        for number, tokens in enumerate(stored):
            write_nodes(repo, meaning.digest, nodes_of(meaning, tokens, number), lambda _: True)
        found = finder(repo, meaning, wanted).find()
        assert found.tokens == predicted(stored, wanted, size)
        assert found.problems == ()
        assert found.requests <= len(anchors(found.tokens)) + 2 * len(wanted).bit_length() + 8
        assert [node.tokens for node in found.nodes][: len(anchors(found.tokens))] == anchors(found.tokens)
        if found.tokens:
            assert max(use.end for use in found.uses(meaning)) == found.tokens


def test_a_node_that_does_not_prove_is_passed_over_for_the_one_before(ctx: Context) -> None:
    meaning = descriptor(THIN)
    tokens = some_ids(1_000)
    *nodes, last = nodes_of(meaning, tokens)
    with Repo.open(make_repo(mem_stores(1), ctx), ctx) as repo:
        write_nodes(repo, meaning.digest, [*nodes, replace(last, token_hmac=bytes(16))], lambda _: True)
        assert finder(repo, meaning, tokens).find().tokens == nodes[-1].tokens == 992


def test_a_node_that_goes_back_to_another_place_is_replaced(ctx: Context) -> None:
    """Such as one that was written when anchors lay elsewhere: its key is the same, and it proves nothing."""
    meaning = descriptor(THIN)
    tokens = some_ids(34_816)
    nodes = nodes_of(meaning, tokens)
    keys = {block.end: block.key for block in keys_of(meaning, tokens)}
    strange = replace(nodes[-1], previous=keys[33_792])
    with Repo.open(make_repo(mem_stores(1), ctx), ctx) as repo:
        write_nodes(repo, meaning.digest, [*nodes[:-1], strange], lambda _: True)
        found = finder(repo, meaning, tokens).find()
        assert (found.tokens, found.problems) == (32_768, ("the index has a hole at token 34816",))
        write_nodes(repo, meaning.digest, nodes, lambda _: True)
        assert finder(repo, meaning, tokens).find().tokens == 34_816
        where = node_key(meaning.digest, nodes[-1].key)
        assert Node.parse(repo.read_meta(where), where) == nodes[-1]


# -- pushes beyond 32,768 tokens ----------------------------------------------------------------------------


def pulled(repo: tuple[StoreConfig, ...], address: str, tokens: array[int], ctx: Context) -> None:
    sink = MemorySink()
    pull_session(PullSession(repo, address, sink, tokens=tokens), ctx)
    check_sink(sink, descriptor(THIN), tokens, len(tokens))
    sink.close()


def test_a_generation_of_a_tenth_more_writes_a_tenth(ctx: Context, calls: Calls) -> None:  # K16
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_ids(40_000)
    first = push(repo, "alice/chat", tokens[:36_000], ctx, THIN)
    before = set(objects(repo, "index/"))
    calls.reset()
    second = push(repo, "alice/chat", tokens, ctx, THIN)
    assert (second.extra["tokens_shared"], second.extra["blocks_written"]) == (36_000, 250)
    assert second.bytes * 9 == first.bytes
    assert first.extra["objects_of_session"] == first.extra["packs_written"] + len(points(36_000, 16)) + 1
    assert second.extra["index_requests"] <= len(anchors(36_000)) + 16
    new = set(points(40_000, 16)) - set(points(36_000, 16))
    assert second.extra["nodes_written"] == len(new) == len(set(objects(repo, "index/")) - before)
    pulled(repo, "alice/chat@2", tokens, ctx)


@pytest.mark.parametrize(
    ("leaves", "shared"),
    [(32_000, 31_744), (34_815, 32_768), (34_816, 34_816), (39_500, 39_424), (39_999, 39_936), (40_000, 40_000)],
)
def test_a_fork_shares_up_to_an_index_node(ctx: Context, leaves: int, shared: int) -> None:
    """Anchors at 32,768, 34,816, .., 38,912; behind that, nodes at 39,168, .., 39,936 and 40,000."""
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_ids(40_000)
    push(repo, "alice/chat", tokens, ctx, THIN)
    fork = tokens[:leaves] + some_ids(600, seed=1)
    assert push(repo, "bob/fork", fork, ctx, THIN).extra["tokens_shared"] == shared
    pulled(repo, "bob/fork", fork, ctx)


def test_what_is_left_after_eviction_and_a_copy_is_found(ctx: Context) -> None:
    repo, other = make_repo(mem_stores(1), ctx), make_repo(mem_stores(1), ctx)
    tokens = some_ids(40_000)
    fork = tokens[:34_900] + some_ids(3_000, seed=1)
    push(repo, "alice/chat", tokens, ctx, THIN)
    push(repo, "bob/fork", fork, ctx, THIN)
    copy_session(CopySession(repo, "alice/chat", other), ctx)
    own = set(points(40_000, 16)) - set(points(len(fork), 16)) | {place for place in anchors(40_000) if place > 34_816}
    assert evict_sessions(EvictRequest(repo, ("alice/chat",)), ctx).nodes == len(own)
    with Repo.open(repo, ctx) as opened:
        run_gc(opened, GcOptions(grace=0))
        run_gc(opened, GcOptions(grace=0))
        assert finder(opened, descriptor(THIN), tokens).find().tokens == 34_816
    pulled(repo, "bob/fork", fork, ctx)
    with Repo.open(other, ctx) as opened:
        assert finder(opened, descriptor(THIN), tokens).find().tokens == 40_000
    pulled(other, "alice/chat", tokens, ctx)
