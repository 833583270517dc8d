"""Layer groups from a model's config.json, and how many bytes their KV takes. Pure.

Exact or refused: a model whose cache this cannot describe layer by layer is an IncompatibleError, never a guess.
Numbers of a config that its file leaves out are the defaults of the model type in Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvctl.core.errors import IncompatibleError
from kvctl.kv.identity import DTYPE_BYTES, Group
from kvctl.kv.tokens import BLOCK_TOKENS

# Types whose every layer caches plain keys and values; sliding windows are found by their fields.
_PLAIN: Final = frozenset({
    *("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl"),
    *("qwen3_vl", "phi3", "phimoe", "granite", "granitemoe", "olmo", "olmo2", "olmo3", "olmoe"),
    *("starcoder2", "smollm3"),
    *("gemma", "gemma2", "gemma3_text", "gpt_oss", "cohere", "cohere2", "stablelm", "internlm2", "internlm3", "glm"),
    *("glm4", "glm4_moe", "ernie4_5", "ernie4_5_moe", "seed_oss", "exaone4", "arcee", "hunyuan_v1_dense", "apertus"),
    *("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "mistral3_text", "pixtral_text"),
})  # fmt: skip
_MLA: Final = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "longcat_flash"})
_LINEAR: Final = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "cohere2": {"sliding_window_pattern": 4, "sliding_window": 4096},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v32": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
}
# Fields that say a cache is more than keys and values of every layer.
_FOREIGN: Final = (
    *("cross_attention_layers", "attention_chunk_size", "ssm_state_size", "mamba_d_state", "attention_k_eq_v"),
    *("cross_layer_attention", "attn_layer_indices", "block_types", "compress_ratios", "use_cla"),
)
_TYPES: Final = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "recurrent"}

Config = Mapping[str, Any]  # Any: config.json


def groups_of(config: Config, *, dtype: str = "BF16") -> tuple[Group, ...]:
    """The layer groups of the model with this config.json, by their first layer. `dtype` (of the KV) enters the size
    of recurrent states only. Raises IncompatibleError for what cannot be described exactly.
    """
    text = config.get("text_config")
    inner: dict[str, Any] = {**config, **text} if isinstance(text, Mapping) else dict(config)  # Any: config.json
    name = str((text.get("model_type") if isinstance(text, Mapping) else None) or config.get("model_type") or "")
    if isinstance(text, Mapping) and name in {"gemma3", "qwen2_vl", "qwen3_5", "qwen3_5_moe"}:
        name += "_text"
    if name not in _PLAIN | _MLA | _LINEAR:
        raise _refusal(name, f"model type {name!r} is not known")
    inner = {**_DEFAULTS.get(name, {}), **{key: value for key, value in inner.items() if value is not None}}
    for field in _FOREIGN:
        if inner.get(field):
            raise _refusal(name, f"its config has {field}")
    layers = _number(inner, "num_hidden_layers", name)
    if name in _MLA:
        return _mla(inner, name, layers)
    cached = layers - int(inner.get("num_kv_shared_layers") or 0)
    kinds = _kinds(inner, name, layers)[:cached]
    heads = _number(inner, "num_attention_heads", name)
    kv_heads = _number(inner, "num_key_value_heads", name) if "num_key_value_heads" in inner else heads
    dim = _number(inner, "head_dim", name) if "head_dim" in inner else _number(inner, "hidden_size", name) // heads
    groups = []
    for kind in dict.fromkeys(kinds):
        own = tuple(layer for layer, its in enumerate(kinds) if its == kind)
        if kind == "recurrent":
            groups.append(Group(kind, own, 1, _state_bytes(inner, name, dtype), 0))
        else:
            window = _number(inner, "sliding_window", name) if kind == "sliding" else None
            groups.append(Group(kind, own, kv_heads, dim, dim, window))
    return tuple(groups)


def _mla(config: Config, name: str, layers: int) -> tuple[Group, ...]:
    every = tuple(range(layers))
    latent = Group("mla", every, 1, _number(config, "kv_lora_rank", name), _number(config, "qk_rope_head_dim", name))
    if not config.get("index_head_dim"):
        return (latent,)
    return latent, Group("indexer", every, 1, _number(config, "index_head_dim", name), 0)


def _kinds(config: Config, name: str, layers: int) -> list[str]:
    """The kind of each layer."""
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, Sequence) or len(types) != layers:
            raise _refusal(name, f"layer_types do not name its {layers} layers")
        unknown = sorted({str(item) for item in types} - _TYPES.keys())
        if unknown or ("linear_attention" in types and name not in _LINEAR):
            raise _refusal(name, f"its config has layers of type {unknown or 'linear_attention'}")
        return [_TYPES[item] for item in types]
    if name in _LINEAR:
        every = _number(config, "full_attention_interval", name)
        return ["recurrent" if (layer + 1) % every else "full" for layer in range(layers)]
    if name in {"gemma2", "gpt_oss"}:
        return ["full" if layer % 2 else "sliding" for layer in range(layers)]
    if config.get("sliding_window_pattern"):
        every = _number(config, "sliding_window_pattern", name)
        return ["sliding" if (layer + 1) % every else "full" for layer in range(layers)]
    if not config.get("sliding_window"):
        return ["full"] * layers
    if "use_sliding_window" in config or name.startswith("qwen"):
        if not config.get("use_sliding_window"):
            return ["full"] * layers
        first = _number(config, "max_window_layers", name)
        return ["full" if layer < first else "sliding" for layer in range(layers)]
    if name in {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}:
        return ["sliding"] * layers
    raise _refusal(name, "it has a sliding_window, and nothing says in which layers")


def _state_bytes(config: Config, name: str, dtype: str) -> int:
    """Gated delta net, one layer: the convolution's last inputs [channels, kernel] in the KV's dtype, then the
    recurrent state [value heads, key dim, value dim] in F32.
    """
    key_heads, key_dim = _number(config, "linear_num_key_heads", name), _number(config, "linear_key_head_dim", name)
    heads, dim = _number(config, "linear_num_value_heads", name), _number(config, "linear_value_head_dim", name)
    channels = 2 * key_heads * key_dim + heads * dim
    convolution = channels * _number(config, "linear_conv_kernel_dim", name) * _size(dtype)
    return convolution + 4 * heads * key_dim * dim


def _number(config: Config, field: str, name: str) -> int:
    value = config.get(field)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _refusal(name, f"its config has {field} {value!r}")
    return value


def _refusal(name: str, cause: str) -> IncompatibleError:
    return IncompatibleError(
        f"the KV cache of {name or 'this'} models cannot be stored",
        cause=f"{cause}, so it could not be restored exactly",
        hint="known are Llama-, Mistral-, Qwen-, Gemma-, gpt-oss-, DeepSeek- and Qwen3-Next-shaped configs",
        details={"model_type": name},
    )


def _size(dtype: str) -> int:
    found = DTYPE_BYTES.get(dtype)
    if found is None:
        raise IncompatibleError(
            f"KV of dtype {dtype} cannot be stored",
            cause=f"known are {', '.join(DTYPE_BYTES)}",
            details={"dtype": dtype},
        )
    return found


def token_bytes_of(group: Group, dtype: str) -> int:
    """Bytes that one token adds to a group while nothing leaves its window; 0 for recurrent ones."""
    return 0 if group.recurrent else len(group.layers) * group.kv_heads * (group.k_dim + group.v_dim) * _size(dtype)


def bytes_per_token(groups: Iterable[Group], dtype: str, at_tokens: int = 1) -> int:
    """Bytes that token number `at_tokens` (from 1) adds to the cache: past a window, a sliding group adds none."""
    return sum(token_bytes_of(group, dtype) for group in groups if group.window is None or at_tokens <= group.window)


def state_bytes(groups: Iterable[Group]) -> int:
    """Bytes of the recurrent states: the same for every length."""
    return sum(len(group.layers) * group.k_dim for group in groups if group.recurrent)


def cache_bytes(groups: Iterable[Group], dtype: str, tokens: int) -> int:
    """Bytes of the whole cache after `tokens` tokens, windows applied, states included."""
    groups = tuple(groups)
    held = sum(token_bytes_of(group, dtype) * min(tokens, group.window or tokens) for group in groups)
    return held + state_bytes(groups)


def block_bytes(group: Group, dtype: str, block_tokens: int = BLOCK_TOKENS) -> int:
    """Canonical payload of one block of a group; of a recurrent one, its states."""
    if group.recurrent:
        return len(group.layers) * group.k_dim
    return block_tokens * token_bytes_of(group, dtype)
