"""Tensor-parallel slices: what each rank holds, that ranks together hold everything, what is refused and reported."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.errors import ConfigError, IncompatibleError, UsageError
from kvctl.testing.models import LlamaShape, Spec, header_document, tensor_bytes
from kvctl.weights.dtypes import DTYPES
from kvctl.weights.rules import Rule, Rules, parse_rules, rules_from
from kvctl.weights.safetensors import TensorInfo
from kvctl.weights.slicing import Heads, ModelSlices, TensorSlice, slice_model

LLAMA = LlamaShape(layers=1, hidden=64, heads=8, kv_heads=4, head_dim=8, inner=96, vocab=100, biases=True)


def infos(tensors: list[Spec]) -> list[TensorInfo]:
    found = []
    at = 0
    for name, dtype, shape in tensors:
        count = 1
        for dim in shape:
            count *= dim
        size = count * DTYPES[dtype].bits // 8
        found.append(TensorInfo(name, dtype, shape, at, at + size))
        at += size
    assert len(header_document(tensors)) == len(tensors)
    return found


def ranks(
    tensors: list[Spec], size: int, config: Mapping[str, object] | None = None, rules: Rules | None = None
) -> list[ModelSlices]:
    return [slice_model(infos(tensors), rank, size, rules, config) for rank in range(size)]


def taken(data: bytes, piece: TensorSlice) -> bytes:
    return b"".join(
        data[run.start + row * run.stride : run.start + row * run.stride + run.width]
        for run in piece.runs
        for row in range(run.rows)
    )


def one(
    name: str, shape: tuple[int, ...], size: int, dtype: str = "U8", config: Mapping[str, object] | None = None
) -> list[TensorSlice]:
    return [item.slices[name] for item in ranks([(name, dtype, shape)], size, config)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_llama_slices_are_those_of_numpy(size: int) -> None:
    specs = LLAMA.tensors()
    for rank, model in enumerate(ranks(specs, size, LLAMA.config())):
        assert model.unknown == ()
        for spec in specs:
            name, _, shape = spec
            array = np.frombuffer(tensor_bytes(spec), np.int16).reshape(shape)
            module = name.split(".")[-2]
            if size == 1 or "norm" in name or (module == "o_proj" and name.endswith("bias")):
                part = array
            elif module in {"o_proj", "down_proj"}:
                width = shape[1] // size
                part = array[:, rank * width : (rank + 1) * width]
            elif module in {"k_proj", "v_proj"}:
                head = rank * 4 // size
                part = array[head * 8 : (head + max(1, 4 // size)) * 8]
            else:
                step = -(-shape[0] // size)
                part = array[rank * step : (rank + 1) * step]
            piece = model.slices[name]
            assert piece.shape == part.shape
            assert taken(tensor_bytes(spec), piece) == part.tobytes()
        assert model.sharded_bytes + model.replicated_bytes == sum(p.nbytes for p in model.slices.values())


def test_the_vocabulary_may_be_ragged_and_even_run_out() -> None:
    pieces = one("lm_head.weight", (10, 2), 8)
    assert [piece.shape[0] for piece in pieces] == [2, 2, 2, 2, 2, 0, 0, 0]
    assert pieces[7].runs == ()


def test_kv_heads_are_shared_when_ranks_exceed_them() -> None:
    config: dict[str, object] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    pieces = one("a.k_proj.weight", (8, 3), 4, config=config)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 4), (0, 4), (4, 8), (4, 8)]
    scales = one("a.k_proj.weight_scale", (8, 1), 4, config=config)
    assert [(piece.start, piece.stop) for piece in scales] == [(0, 4), (0, 4), (4, 8), (4, 8)]
    with pytest.raises(IncompatibleError, match="2 KV heads and 3 ranks"):
        one("a.k_proj.weight", (8, 3), 3, config=config)
    with pytest.raises(IncompatibleError, match="8 heads do not divide by 3"):
        one("a.q_proj.weight", (32, 3), 3, config=config)


def test_a_text_config_is_found_inside_and_nonsense_counts_as_unknown() -> None:
    inner = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32}
    assert Heads.of({"text_config": inner}) == Heads(8, 2, 4)
    assert Heads.of({"num_attention_heads": "8", "hidden_size": True}) == Heads()
    assert Heads.of(None) == Heads()


def test_slices_of_nothing_have_the_rank_s_shape() -> None:
    assert one("a.up_proj.weight", (8, 0), 2)[1].shape == (4, 0)
    assert one("a.down_proj.weight", (0, 8), 2)[1].shape == (0, 4)


def test_dimensions_that_do_not_divide_are_named() -> None:
    with pytest.raises(
        IncompatibleError, match=r"'a\.up_proj\.weight' cannot be split among 4 ranks along dimension 0"
    ):
        one("a.up_proj.weight", (6, 4), 4)
    with pytest.raises(IncompatibleError, match=r"dimension 1: dimension 1 of \[4, 6\] has 6 elements"):
        one("a.down_proj.weight", (4, 6), 4)
    with pytest.raises(IncompatibleError, match="between bytes"):
        one("a.down_proj.weight", (4, 6), 2, "F4")
    with pytest.raises(UsageError, match="rank 2 of 2"):
        slice_model([], 2, 2)


def test_experts_follow_the_same_names() -> None:
    pieces = one("model.layers.0.mlp.experts.7.down_proj.weight", (4, 8), 2)
    assert [piece.dim for piece in pieces] == [1, 1]
    pieces = one("model.layers.0.block_sparse_moe.experts.7.w1.weight", (8, 4), 2)
    assert [piece.dim for piece in pieces] == [0, 0]


def test_fused_tensors_give_the_share_of_each_part() -> None:
    config: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
    pieces = one("a.qkv_proj.weight", (16, 1), 2, config=config)
    rows = bytes(range(16))
    assert [taken(rows, piece) for piece in pieces] == [
        bytes([0, 1, 2, 3, 8, 9, 12, 13]),
        bytes([4, 5, 6, 7, 10, 11, 14, 15]),
    ]
    assert pieces[0].shape == (8, 1)
    pieces = one("a.gate_up_proj.weight", (8, 1), 2)
    assert [taken(rows, piece) for piece in pieces] == [bytes([0, 1, 4, 5]), bytes([2, 3, 6, 7])]


def test_quantised_tensors_follow_their_weight_or_are_replicated() -> None:
    tensors: list[Spec] = [
        ("m.up_proj.qweight", "I32", (16, 8)),
        ("m.up_proj.scales", "F16", (2, 8)),
        ("m.up_proj.g_idx", "I32", (16,)),
        ("m.down_proj.qweight", "I32", (16, 8)),
        ("m.down_proj.scales", "F16", (3, 8)),
        ("m.down_proj.g_idx", "I32", (16,)),
        ("n.up_proj.weight_scale_inv", "F32", (4, 2)),
        ("n.down_proj.weight_scale_inv", "F32", (2, 4)),
        ("n.down_proj.weight_scale", "F32", (4, 1)),
        ("n.up_proj.input_scale", "F32", ()),
        ("n.up_proj.weight_scale", "F32", (1,)),
    ]
    model = ranks(tensors, 2)[1]
    assert {name: piece.dim for name, piece in model.slices.items()} == {
        "m.up_proj.qweight": 1,
        "m.up_proj.scales": 1,
        "m.up_proj.g_idx": None,
        "m.down_proj.qweight": 0,
        "m.down_proj.scales": None,
        "m.down_proj.g_idx": 0,
        "n.up_proj.weight_scale_inv": 0,
        "n.down_proj.weight_scale_inv": 1,
        "n.down_proj.weight_scale": None,
        "n.up_proj.input_scale": None,
        "n.up_proj.weight_scale": None,
    }
    assert model.notes == ("m.down_proj.scales: dimension 0 does not divide by 2, replicated",)


def test_unknown_tensors_are_replicated_and_reported() -> None:
    model = ranks(
        [("strange.weight", "U8", (4, 4)), ("norm.weight", "U8", (4,)), ("e.experts.up_proj", "U8", (2, 2, 2))], 2
    )[0]
    assert model.unknown == ("strange.weight", "e.experts.up_proj")
    assert model.sharded_bytes == 0


def test_bert_names_mean_something_by_their_path() -> None:
    at = "encoder.layer.0"
    dims = {
        name: one(f"{at}.{name}.weight", (8, 8), 2)[0].dim
        for name in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
    }
    assert list(dims.values()) == [0, 1, 0, 1]


def test_a_rules_file_goes_first() -> None:
    rules = parse_rules(
        b'[{"pattern": "*.up_proj.weight", "dim": 1}, {"pattern": "x.*", "dim": "replicate"}]', "r.json"
    )
    assert rules == Rules((Rule("*.up_proj.weight", 1), Rule("x.*", None)))
    assert rules_from(rules.to_json()) == rules
    toml = b'[[rule]]\npattern = "*.up_proj.weight"\ndim = 1\n[[rule]]\npattern = "x.*"\ndim = "replicate"\n'
    assert parse_rules(toml, "r.toml") == rules
    model = ranks([("a.up_proj.weight", "U8", (3, 4)), ("x.up_proj.bias", "U8", (4,))], 2, rules=rules)[1]
    assert model.slices["a.up_proj.weight"].shape == (3, 2)
    assert model.slices["x.up_proj.bias"].dim is None


@pytest.mark.parametrize(
    "data",
    [
        b"[",
        b"{}",
        b"[3]",
        b'[{"pattern": "a"}]',
        b'[{"pattern": "a", "dim": -1}]',
        b'[{"pattern": "a", "dim": true}]',
        b"a=",
        b"\xff",
    ],
)
def test_rules_files_that_mean_nothing_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_rules(data, "rules")


@settings(max_examples=150)
@given(
    st.sampled_from(
        ["q_proj.weight", "o_proj.weight", "lm_head.weight", "gate_up_proj.weight", "o_proj.bias", "odd.weight"]
    ),
    st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple),
    st.sampled_from(["U8", "BF16", "F64"]),
    st.integers(1, 6),
)
def test_ranks_together_hold_every_byte_once_or_all(name: str, shape: tuple[int, ...], dtype: str, size: int) -> None:
    spec = (f"m.{name}", dtype, shape)
    data = tensor_bytes(spec)
    try:
        pieces = [item.slices[spec[0]] for item in ranks([spec], size)]
    except IncompatibleError:
        return
    for piece in pieces:
        count = 1
        for dim in piece.shape:
            count *= dim
        assert piece.nbytes == count * DTYPES[dtype].bits // 8
    if pieces[0].dim is None:
        assert all(taken(data, piece) == data for piece in pieces)
        return
    places = sorted(
        byte
        for piece in pieces
        for run in piece.runs
        for row in range(run.rows)
        for byte in range(run.start + row * run.stride, run.start + row * run.stride + run.width)
    )
    assert places == list(range(len(data)))
