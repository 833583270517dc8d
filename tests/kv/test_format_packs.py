"""Packs: what is encoded comes back; layers and tensor-parallel shards are ranges; damage raises our errors only."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.errors import IntegrityError, KvctlError, UsageError
from kvctl.kv import packs, tokens
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.landing import place_fragment
from kvctl.kv.packs import PackGeometry, PackHeader, TokenView
from kvctl.kv.pieces import STAGED, Want, plan

NS = "5a" * 32
SECRET = b"s" * 32
QUICK = settings(max_examples=40)


class Cache:
    """KV of one group in memory, with `start` the first token that it has."""

    def __init__(self, geometry: PackGeometry, first: int, end: int, seed: int) -> None:
        self.geometry, self.first, self.end = geometry, first, end
        made = random.Random(seed)
        size = 1 if geometry.group.recurrent else end - first
        self.parts = {
            (layer, part): made.randbytes(geometry.group.kv_heads * size * geometry.row(part) // 2)
            + bytes(
                geometry.group.kv_heads * size * geometry.row(part)
                - geometry.group.kv_heads * size * geometry.row(part) // 2
            )
            for layer in geometry.group.layers
            for part in geometry.parts
        }

    def __call__(self, layer: int, part: str) -> TokenView:
        return TokenView(memoryview(self.parts[layer, part]), self.first, self.end - self.first)


@st.composite
def geometries(draw: st.DrawFn) -> PackGeometry:
    kind = draw(st.sampled_from(["full", "sliding", "mla", "indexer", "recurrent"]))
    one = kind in {"mla", "indexer", "recurrent"}
    heads = 1 if one else draw(st.integers(1, 5))
    layers = tuple(sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=3))))
    k_dim = draw(st.sampled_from([1, 3, 8, 128]))
    v_dim = 0 if kind in {"indexer", "recurrent"} else draw(st.sampled_from([1, 5, 8, 64]))
    group = Group(kind, layers, heads, k_dim, v_dim, 24 if kind == "sliding" else None)
    blocks = 1 if kind == "recurrent" else draw(st.integers(1, 7))
    return PackGeometry(
        index=draw(st.integers(0, 3)),
        group=group,
        dtype=draw(st.sampled_from(["BF16", "F32", "F8_E4M3", "F16"])),
        blocks=blocks,
        head_step=draw(st.integers(1, heads)),
        run_blocks=draw(st.integers(1, blocks)),
        block_tokens=draw(st.sampled_from([1, 4, 16])),
    )


def chain_for(geometry: PackGeometry, skipped_blocks: int, tail: int) -> list[tokens.BlockKey]:
    count = (skipped_blocks + geometry.blocks) * geometry.block_tokens - tail
    ids = array("I", range(count))
    return tokens.chain(SECRET, NS, ids, geometry.block_tokens)[skipped_blocks:]


def read(
    header: PackHeader, pack: memoryview, cache: Cache, heads: tuple[int, int], tokens: tuple[int, int], longest: int
) -> dict[tuple[int, str], bytes]:
    """The pack's heads [first, end) and tokens [first, end) in memory that has room for just those."""
    geometry = header.geometry
    group = geometry.group
    begin = header.blocks[0].start
    count = 1 if group.recurrent else tokens[1] - tokens[0]
    got = {
        (layer, part): TokenView(
            memoryview(bytearray((heads[1] - heads[0]) * count * geometry.row(part))), tokens[0], count, heads[0]
        )
        for layer in group.layers
        for part in ("k", "v")
    }
    views = list(got.values())
    low, high = (0, 1) if group.recurrent else (tokens[0] - begin, tokens[1] - begin)
    want = Want(group.layers, heads[0], heads[1] - heads[0], low, high, count, longest=longest)
    at = 0
    for piece in plan(header, want):
        assert piece.offset >= at
        assert piece.length <= longest or sum(step.fragment >= 0 for step in piece.steps) == 1
        assert 0 <= piece.needed <= piece.length
        at = piece.offset
        for step in piece.steps:
            data = pack[at : at + step.nbytes]
            at += step.nbytes
            if step.fragment < 0:
                assert not any(data)
                continue
            fragment = header.fragments[step.fragment]
            packs.verify_fragment(header, fragment, data)
            assert (fragment.offset, fragment.end) == (at - step.nbytes, at)
            if step.view != STAGED:
                assert fragment.codec == "none"
                view = views[step.view]
                shift = 0 if group.recurrent else (begin - tokens[0]) * geometry.row(fragment.place.part)
                view.data[step.at + shift : step.at + shift + step.nbytes] = data
                continue
            raw = memoryview(bytearray(fragment.place.raw))
            packs.decode_fragment(header, fragment, data, raw)
            place_fragment(header, fragment, raw, got[fragment.place.layer, fragment.place.part])
        assert at == piece.offset + piece.length
    return {key: bytes(view.data) for key, view in got.items() if key in cache.parts}


@given(geometries(), st.sampled_from(["none", "zstd"]), st.integers(0, 3), st.data())
@QUICK
def test_what_is_encoded_is_decoded(geometry: PackGeometry, codec: str, skipped: int, data: st.DataObject) -> None:
    tail = data.draw(st.integers(0, geometry.block_tokens - 1))
    blocks = chain_for(geometry, skipped, tail)
    first = blocks[0].start
    if geometry.group.kind == "sliding":
        first += data.draw(st.integers(0, blocks[0].count - 1))
    cache = Cache(geometry, first, blocks[-1].end, data.draw(st.integers(0, 1 << 30)))
    pack = packs.encode_pack(geometry, NS, blocks, cache, codec, first=first)
    header = packs.parse_pack_header(pack, "pack")
    assert (header.geometry, header.ns, list(header.blocks)) == (geometry, NS, blocks)
    assert (header.pack_size, header.header_size) == (len(pack), packs.header_size(pack[:16], "pack"))
    assert (header.first, header.tokens) == (first, blocks[-1].end - first)
    if codec == "none":
        assert len(pack) == geometry.bound
    longest = data.draw(st.sampled_from([1, 5_000, 1 << 20]))
    assert read(header, pack, cache, (0, geometry.group.kv_heads), (first, blocks[-1].end), longest) == cache.parts
    # Used memory is written over, padding included: the bytes are the same.
    dirty = memoryview(bytearray(b"\xff" * geometry.bound))
    assert packs.encode_pack(geometry, NS, blocks, cache, codec, first=first, out=dirty) == pack


@given(geometries(), st.sampled_from(["none", "zstd"]))
@QUICK
def test_a_layer_is_one_range_and_a_shard_one_for_each_of_k_and_v(geometry: PackGeometry, codec: str) -> None:
    blocks = chain_for(geometry, 0, 0)
    cache = Cache(geometry, 0, blocks[-1].end, 1)
    header = packs.parse_pack_header(packs.encode_pack(geometry, NS, blocks, cache, codec), "pack")
    for layer in geometry.group.layers:
        (span,) = packs.ranges(header, [layer])
        assert len(span.fragments) == geometry.fragments // len(geometry.group.layers)
        for head in range(geometry.group.kv_heads):
            shard = packs.ranges(header, [layer], (head, head + 1))
            whole = geometry.head_step >= geometry.group.kv_heads
            assert len(shard) == (1 if whole else len(geometry.parts))
            assert {f.place.head // geometry.head_step for s in shard for f in s.fragments} == {
                head // geometry.head_step
            }
    assert len(packs.ranges(header)) == 1


@given(geometries(), st.sampled_from(["none", "zstd"]), st.data())
@QUICK
def test_any_part_comes_to_where_it_belongs(geometry: PackGeometry, codec: str, data: st.DataObject) -> None:
    if geometry.group.recurrent:
        return  # a state has no parts
    blocks = chain_for(geometry, 1, 0)
    cache = Cache(geometry, blocks[0].start, blocks[-1].end, 3)
    pack = packs.encode_pack(geometry, NS, blocks, cache, codec)
    header = packs.parse_pack_header(pack, "pack")
    first = data.draw(st.integers(blocks[0].start, blocks[-1].end - 1))
    end = data.draw(st.integers(first + 1, blocks[-1].end))
    head = data.draw(st.integers(0, geometry.group.kv_heads - 1))
    last = data.draw(st.integers(head + 1, geometry.group.kv_heads))
    got = read(header, pack, cache, (head, last), (first, end), 1 << 20)
    for (layer, part), whole in cache.parts.items():
        row, held = geometry.row(part), cache.end - cache.first
        wanted = b"".join(
            whole[(number * held + first - cache.first) * row : (number * held + end - cache.first) * row]
            for number in range(head, last)
        )
        assert got[layer, part] == wanted


@given(geometries(), st.data())
@QUICK
def test_some_blocks_are_read_without_the_others(geometry: PackGeometry, data: st.DataObject) -> None:
    blocks = chain_for(geometry, 0, 0)
    cache = Cache(geometry, 0, blocks[-1].end, 1)
    header = packs.parse_pack_header(packs.encode_pack(geometry, NS, blocks, cache), "pack")
    begin = data.draw(st.integers(0, geometry.blocks - 1))
    count = data.draw(st.integers(1, geometry.blocks - begin))
    got = {
        block
        for s in packs.ranges(header, None, None, begin, count)
        for f in s.fragments
        for block in range(f.place.block, f.place.end_block)
    }
    assert got >= set(range(begin, begin + count))
    assert min(got) > begin - geometry.run_blocks
    assert max(got) < begin + count + geometry.run_blocks - 1 + 1


@given(geometries(), st.data())
@QUICK
def test_damaged_headers_raise_errors_of_ours_only(geometry: PackGeometry, data: st.DataObject) -> None:
    blocks = chain_for(geometry, 0, 0)
    pack = bytearray(packs.encode_pack(geometry, NS, blocks, Cache(geometry, 0, blocks[-1].end, 1)))
    size = geometry.header_size
    fields = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 255)), min_size=1, max_size=6))
    before = bytes(pack)
    for at, value in fields:
        pack[at if data.draw(st.booleans()) else at % 192] = value
    if data.draw(st.booleans()):  # a forger knows the checksum too
        pack[24:32] = bytes(8)
        pack[24:32] = xxhash.xxh3_64_intdigest(pack[:size]).to_bytes(8, "little")
    cut = data.draw(st.sampled_from([len(pack), size, size - 1, 100, 16, 3, 0]))
    try:
        header = packs.parse_pack_header(bytes(pack[:cut]), "pack")
    except KvctlError:
        return
    assert header.pack_size == len(before)


def plain(blocks: int = 3, heads: int = 2, dtype: str = "BF16") -> PackGeometry:
    return PackGeometry(0, Group("full", (0, 1), heads, 8, 8), dtype, blocks, 1, blocks)


def test_a_flipped_bit_is_found_in_its_fragment() -> None:
    geometry = plain()
    blocks = chain_for(geometry, 0, 0)
    pack = packs.encode_pack(geometry, NS, blocks, Cache(geometry, 0, 48, 1))
    header = packs.parse_pack_header(pack, "pack")
    fragment = header.fragments[5]
    pack[fragment.offset + 7] ^= 1
    for other in header.fragments:
        stored = pack[other.offset : other.end]
        if other == fragment:
            with pytest.raises(IntegrityError, match=r"layer 1 k, heads \[1, 2\), blocks \[0, 3\)"):
                packs.verify_fragment(header, other, stored)
        else:
            packs.verify_fragment(header, other, stored)


def test_raw_fragments_are_packed_from_where_they_lie() -> None:
    geometry = PackGeometry(0, Group("full", (0, 1), 3, 8, 8), "BF16", 5, 1, 2)
    blocks = chain_for(geometry, 0, 3)
    cache = Cache(geometry, 0, blocks[-1].end, 1)
    parts = packs.encode_parts(geometry, NS, blocks, cache)
    assert b"".join(parts) == packs.encode_pack(geometry, NS, blocks, cache)
    theirs = sum(any(part.obj is data for data in cache.parts.values()) for part in parts)
    assert theirs == 2 * 2 * 3 * 2  # of each head both runs of two blocks; the last one ends in zeros


def test_large_fragments_begin_at_pages_and_small_ones_are_packed() -> None:
    large = PackGeometry(0, Group("full", (0,), 2, 128, 128), "BF16", 32, 1, 32)  # 128 KiB a fragment
    blocks = chain_for(large, 0, 0)
    header = packs.parse_pack_header(packs.encode_pack(large, NS, blocks, Cache(large, 0, 512, 1), "zstd"), "pack")
    assert all(f.offset % 4096 == 0 for f in header.fragments if f.stored > 65536)
    assert {f.codec for f in header.fragments} == {"none", "zstd"}  # half of the bytes are zeros, by head
    small = replace(large, blocks=1, run_blocks=1)
    packed = packs.parse_pack_header(packs.encode_pack(small, NS, blocks[:1], Cache(small, 0, 16, 1)), "pack")
    assert [f.offset - packed.header_size for f in packed.fragments] == [0, 4096, 8192, 12288]


def test_fragments_that_do_not_shrink_stay_raw() -> None:
    geometry = plain(dtype="F8_E4M3")
    blocks = chain_for(geometry, 0, 0)
    noise = random.Random(1).randbytes(2 * 48 * 8)
    pack = packs.encode_pack(geometry, NS, blocks, lambda layer, part: TokenView(memoryview(noise), 0, 48), "zstd")
    assert {f.codec for f in packs.parse_pack_header(pack, "pack").fragments} == {"none"}
    assert len(pack) == geometry.bound


def test_blocks_of_two_chains_are_refused() -> None:
    geometry = plain(2)
    ours = chain_for(geometry, 0, 0)
    theirs = tokens.chain(b"t" * 32, NS, range(32))
    with pytest.raises(UsageError) as caught:
        packs.encode_pack(geometry, NS, [ours[0], theirs[1]], Cache(geometry, 0, 32, 1))
    assert caught.value.cause == "block 1 does not follow block 0"


def test_fp8_packs_are_lossy_and_recurrent_states_never_are() -> None:
    geometry = plain(dtype="F32")
    blocks = chain_for(geometry, 0, 0)
    ones = array("f", [0.5, -2.0] * (2 * 48 * 8 // 2))
    view = memoryview(ones).cast("B")
    pack = packs.encode_pack(geometry, NS, blocks, lambda layer, part: TokenView(view, 0, 48), "fp8")
    header = packs.parse_pack_header(pack, "pack")
    assert {f.codec for f in header.fragments} == {"fp8"}
    assert len(pack) < geometry.bound / 2
    raw = memoryview(bytearray(header.fragments[0].place.raw))
    packs.decode_fragment(header, header.fragments[0], pack[header.fragments[0].offset : header.fragments[0].end], raw)
    assert raw == view[: len(raw)]  # both values are exact in e4m3
    state = PackGeometry(0, Group("recurrent", (0,), 1, 4096, 0), "F32", 1, 1, 1)
    blob = memoryview(bytes(range(256)) * 16)
    stored = packs.encode_pack(state, NS, blocks[:1], lambda layer, part: TokenView(blob, 0, 1), "fp8")
    (fragment,) = packs.parse_pack_header(stored, "pack").fragments
    assert fragment.codec == "none"
    assert stored[fragment.offset : fragment.end] == blob


@pytest.mark.parametrize(
    ("group", "blocks", "step", "run"),
    [
        (Group("full", tuple(range(32)), 8, 128, 128), 64, 1, 32),  # Llama-3-8B: 4 KiB a head and block
        (Group("full", tuple(range(30)), 3, 64, 64), 45, 1, 32),  # SmolLM2-135M: 2 KiB
        (Group("full", tuple(range(30)), 3, 64, 64), 1, 2, 1),  # a single block: two heads make 4 KiB
        (Group("mla", tuple(range(61)), 1, 512, 64), 14, 1, 14),
        (Group("full", (0,), 2, 8, 8), 3, 2, 3),
    ],
    ids=str,
)
def test_default_fragments(group: Group, blocks: int, step: int, run: int) -> None:
    descriptor = Descriptor("11" * 32, "22" * 32, "33" * 32, "BF16", (group,))
    geometry = PackGeometry.default(descriptor, 0, blocks)
    assert (geometry.head_step, geometry.run_blocks) == (step, run)
    assert geometry.fault() == ""
    assert PackGeometry.default(descriptor, 0, blocks, run_blocks=1).run_blocks == 1


def test_headers_of_full_packs_are_three_in_a_thousand_at_most() -> None:
    for group in (Group("full", tuple(range(80)), 8, 128, 128), Group("full", tuple(range(30)), 3, 64, 64)):
        descriptor = Descriptor("11" * 32, "22" * 32, "33" * 32, "BF16", (group,))
        one = PackGeometry.default(descriptor, 0, 1).payload_bytes
        geometry = PackGeometry.default(descriptor, 0, (16 << 20) // one)
        assert geometry.header_size < 0.003 * geometry.payload_bytes
