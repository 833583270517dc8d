"""Cuts: every byte once, the original rebuilt, chunks shared where the issue of sharing matters, ranks exact."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.testing.models import LlamaShape, Spec, file_bytes, folder_files
from kvctl.weights.cut import ChunkCut, cover_fault, cut_file, gather, scatter, windows
from kvctl.weights.dtypes import DTYPES
from kvctl.weights.safetensors import Header, parse_header
from kvctl.weights.slicing import Heads, slice_model
from kvctl.weights.strided import Strided, intersect, span

KIB = 1024


def opened(data: bytes) -> tuple[Header, memoryview]:
    header = parse_header(data, len(data), "m")
    return header, memoryview(data)[header.header_size :]


def chunks_of(data: bytes, stripe: int, heads: Heads | None = None) -> dict[str, int]:
    """Digest -> size of a file's chunks."""
    header, section = opened(data)
    found: dict[str, int] = {}
    for cut in cut_file(header, stripe, heads=heads):
        out = bytearray(cut.size)
        gather(cut, section, memoryview(out))
        found[sha256(out).hexdigest()] = cut.size
    return found


def chunks_of_all(files: dict[str, bytes], stripe: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, data in files.items():
        if name.endswith(".safetensors"):
            found.update(chunks_of(data, stripe))
    return found


def rebuilt(data: bytes, stripe: int) -> list[ChunkCut]:
    """Cut, gather, scatter; asserts that the bytes come back; returns the cuts."""
    header, section = opened(data)
    cuts = cut_file(header, stripe)
    image = bytearray(header.data_size)
    for cut in cuts:
        assert 0 < cut.size <= stripe
        chunk = bytearray(cut.size)
        gather(cut, section, memoryview(chunk))
        scatter(cut, memoryview(chunk), memoryview(image))
    assert sum(cut.size for cut in cuts) == header.data_size  # with the next line: every byte once
    assert image == section
    assert cover_fault(cuts, header.data_size) == ""
    return cuts


def test_a_cover_with_a_fault_is_told() -> None:
    tile = Strided(0, 2, 4, 2)
    assert cover_fault([ChunkCut((tile,)), ChunkCut((tile.shifted(2),))], 8) == ""
    assert "held twice" in cover_fault([ChunkCut((tile,)), ChunkCut((span(1, 1),))], 5)
    assert cover_fault([ChunkCut((tile,))], 8) == "4 bytes of 8 are held"


MODULES = st.sampled_from(
    ["q_proj", "k_proj", "o_proj", "down_proj", "qkv_proj", "gate_up_proj", "embed_tokens", "input_layernorm", "odd"]
)
TENSOR = st.tuples(
    st.integers(0, 3),
    MODULES,
    st.sampled_from(["weight", "bias", "weight_scale"]),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.sampled_from([0, 1, 2, 3, 8, 12, 16]), min_size=1, max_size=3),
).map(lambda t: (f"model.layers.{t[0]}.{t[1]}.{t[2]}", t[3], (*t[4], 16) if t[3] == "F4" else tuple(t[4])))
TENSORS = st.lists(TENSOR, max_size=8, unique_by=lambda tensor: tensor[0])


@settings(max_examples=100)
@given(TENSORS, st.sampled_from([33, 64, 512, 4096, 65536]))
def test_any_model_and_stripe_rebuild_bit_for_bit(tensors: list[Spec], stripe: int) -> None:
    rebuilt(file_bytes(tensors), stripe)


@settings(max_examples=100)
@given(TENSORS, st.sampled_from([64, 512, 4096]), st.sampled_from([256, 10_000]))
def test_windows_cover_the_chunks_in_order(tensors: list[Spec], stripe: int, largest: int) -> None:
    header, _ = opened(file_bytes(tensors))
    cuts = cut_file(header, stripe)
    grouped = windows(cuts, largest)
    assert [cut for window in grouped for cut in window] == cuts
    for window in grouped:
        span = max(cut.end for cut in window) - min(cut.start for cut in window)
        assert span <= largest or len(window) == 1


LLAMA = LlamaShape(layers=4, hidden=256, heads=16, kv_heads=8, head_dim=16, inner=768, vocab=1024)


def test_a_longer_header_shares_every_chunk() -> None:
    stripe = 64 * KIB
    short = chunks_of(file_bytes(LLAMA.tensors()), stripe)
    longer = chunks_of(file_bytes(LLAMA.tensors(), metadata={"format": "pt", "note": "x" * 500}), stripe)
    assert short == longer


def test_another_sharding_rewrites_only_edge_groups() -> None:
    stripe = 64 * KIB
    one = chunks_of_all(folder_files(LLAMA.tensors(), shards=1), stripe)
    three = chunks_of_all(folder_files(LLAMA.tensors(), shards=3), stripe)
    total = sum(one.values())
    new = sum(size for digest, size in three.items() if digest not in one)
    # Two cuts between shards: at most the group on each side, and the collected small tensors.
    assert sum(three.values()) == total
    assert new <= 2 * 4 * stripe + total // 50
    assert len(one.keys() & three.keys()) > len(one) * 0.8


def test_a_fine_tune_shares_the_chunks_of_the_tensors_it_shares() -> None:
    stripe = 64 * KIB
    base = file_bytes(LLAMA.tensors())
    header, _ = opened(base)
    tuned = bytearray(base)
    changed = header.by_name()["model.layers.2.self_attn.q_proj.weight"]
    tuned[header.header_size + changed.start + 5] ^= 1
    before, after = chunks_of(base, stripe), chunks_of(bytes(tuned), stripe)
    assert sum(size for digest, size in after.items() if digest not in before) <= changed.nbytes


def test_small_tensors_are_collected() -> None:
    header, _ = opened(file_bytes(LLAMA.tensors()))
    cuts = cut_file(header, 64 * KIB)
    norms = [tensor for tensor in header.tensors if len(tensor.shape) == 1]
    holding = {
        number
        for number, cut in enumerate(cuts)
        for tensor in norms
        if any(part.start <= tensor.start < part.end for part in cut.parts if part.rows == 1)
    }
    assert len(holding) < len(norms)


def test_ranks_of_two_four_eight_read_whole_chunks_only() -> None:
    header, _ = opened(file_bytes(LLAMA.tensors()))
    heads = Heads.of(LLAMA.config())
    cuts = cut_file(header, 64 * KIB, heads=heads)
    where = header.by_name()
    for size in (2, 4, 8):
        for rank in range(size):
            slices = slice_model(header.tensors, rank, size, config=LLAMA.config())
            for cut in cuts:
                shared = sum(
                    part.rows * part.width
                    for piece in slices.slices.values()
                    for run in piece.runs
                    for held in cut.parts
                    for part in intersect(run.shifted(where[piece.name].start), held)
                )
                assert shared in {0, cut.size}
