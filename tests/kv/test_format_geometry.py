"""Layer groups and bytes per token from configs as they are published; what cannot be described is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.core.errors import IncompatibleError
from kvctl.kv import geometry
from kvctl.kv.identity import Group

Config = dict[str, Any]  # Any: config.json

LLAMA_3_8B: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
LLAMA_33_70B: Config = {**LLAMA_3_8B, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
QWEN3_CODER_30B: Config = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
GEMMA_3_4B: Config = {  # the published file leaves heads and head_dim to the type's defaults
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
GPT_OSS_120B: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
QWEN3_NEXT_80B: Config = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "head_dim": 256,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
SMOLLM2_135M: Config = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@pytest.mark.parametrize(
    ("config", "short", "long"),
    [
        (LLAMA_3_8B, 131_072, 131_072),
        (LLAMA_33_70B, 327_680, 327_680),
        (QWEN3_CODER_30B, 98_304, 98_304),
        (GEMMA_3_4B, 139_264, 20_480),
        (GPT_OSS_120B, 73_728, 36_864),
        (DEEPSEEK_V3, 70_272, 70_272),
        (QWEN3_NEXT_80B, 24_576, 24_576),
        (SMOLLM2_135M, 23_040, 23_040),
    ],
    ids=[
        "llama-3-8b",
        "llama-3.3-70b",
        "qwen3-coder-30b",
        "gemma-3-4b",
        "gpt-oss-120b",
        "deepseek-v3",
        "qwen3-next",
        "smollm2",
    ],
)
def test_bytes_per_token(config: Config, short: int, long: int) -> None:
    groups = geometry.groups_of(config)
    assert geometry.bytes_per_token(groups, "BF16", 1) == short
    assert geometry.bytes_per_token(groups, "BF16", 100_000) == long
    assert geometry.bytes_per_token(groups, "F8_E4M3", 1) == short // 2


def test_a_window_ends_at_its_length() -> None:
    groups = geometry.groups_of(GEMMA_3_4B)
    assert [geometry.bytes_per_token(groups, "BF16", at) for at in (1024, 1025)] == [139_264, 20_480]
    assert geometry.cache_bytes(groups, "BF16", 1024) == 1024 * 139_264
    assert geometry.cache_bytes(groups, "BF16", 3000) == 1024 * 139_264 + 1976 * 20_480
    assert [(group.kind, len(group.layers), group.window) for group in groups] == [
        ("sliding", 29, 1024),
        ("full", 5, None),
    ]
    assert groups[1].layers == (5, 11, 17, 23, 29)


def test_recurrent_layers_have_a_fixed_state() -> None:
    groups = geometry.groups_of(QWEN3_NEXT_80B)
    states = [group for group in groups if group.recurrent]
    assert [len(group.layers) for group in groups] == [36, 12]
    assert states[0].k_dim == 8192 * 4 * 2 + 4 * 32 * 128 * 128
    assert geometry.state_bytes(groups) == 36 * states[0].k_dim == 77_856_768
    assert geometry.cache_bytes(groups, "BF16", 1000) == 24_576_000 + 77_856_768


def test_latent_attention_is_one_head_of_latent_and_rope() -> None:
    assert geometry.groups_of(DEEPSEEK_V3) == (Group("mla", tuple(range(61)), 1, 512, 64),)
    with_indexer = geometry.groups_of({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128})
    assert with_indexer[1] == Group("indexer", tuple(range(61)), 1, 128, 0)


def test_layer_types_and_patterns_agree() -> None:
    plain = {key: value for key, value in GPT_OSS_120B.items() if key != "layer_types"}
    assert geometry.groups_of(plain) == geometry.groups_of(GPT_OSS_120B)
    named = {**GEMMA_3_4B["text_config"], "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 6}
    named["layer_types"] = named["layer_types"][:34]
    assert geometry.groups_of(named) == geometry.groups_of(GEMMA_3_4B)
    gemma2 = geometry.groups_of({"model_type": "gemma2", "num_hidden_layers": 4, "hidden_size": 2304})
    assert [(group.kind, group.layers) for group in gemma2] == [("sliding", (0, 2)), ("full", (1, 3))]


def test_mistral_windows_and_qwen_switches() -> None:
    mistral = {**LLAMA_3_8B, "model_type": "mistral", "sliding_window": 4096}
    assert [group.kind for group in geometry.groups_of(mistral)] == ["sliding"]
    assert [group.kind for group in geometry.groups_of({**mistral, "sliding_window": None})] == ["full"]
    qwen = {**QWEN3_CODER_30B, "use_sliding_window": True, "sliding_window": 512}
    assert [(group.kind, len(group.layers)) for group in geometry.groups_of(qwen)] == [("full", 28), ("sliding", 20)]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model_type": "brand_new"}, "model type 'brand_new' is not known"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "is not known"),
        ({"layer_types": ["full_attention"]}, "layer_types do not name its 32 layers"),
        ({"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"sliding_window": 4096}, "nothing says in which layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers '32'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1"),
    ],
    ids=str,
)
def test_what_cannot_be_restored_exactly_is_refused(change: Config, cause: str) -> None:
    with pytest.raises(IncompatibleError) as caught:
        geometry.groups_of({**LLAMA_3_8B, **change})
    assert cause in (caught.value.cause or "")


def test_block_sizes() -> None:
    (group,) = geometry.groups_of(LLAMA_3_8B)
    assert geometry.block_bytes(group, "BF16") == 2 << 20
    (state, _) = geometry.groups_of(QWEN3_NEXT_80B)
    assert geometry.block_bytes(state, "BF16") == 77_856_768
    with pytest.raises(IncompatibleError):
        geometry.block_bytes(group, "F4")
