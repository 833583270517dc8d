"""Tiny random models of several shapes, made in seconds; and what generation from a cache gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Model = Any  # a PreTrainedModel: transformers ships no types that help here

SEED = 7


def llama() -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512,
        )
    )  # fmt: skip


def gemma3() -> Model:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, sliding_window=24, max_position_embeddings=512,
        )
    )  # fmt: skip


def deepseek() -> Model:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, kv_lora_rank=32,
            q_lora_rank=24, qk_rope_head_dim=16, v_head_dim=16, qk_nope_head_dim=16, n_group=2, topk_group=1,
            num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=512,
        )
    )  # fmt: skip


def deepseek_v32() -> Model:
    """MLA with an indexer."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    return DeepseekV32ForCausalLM(
        DeepseekV32Config(
            vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, kv_lora_rank=32,
            q_lora_rank=24, qk_rope_head_dim=16, v_head_dim=16, qk_nope_head_dim=16, n_group=2, topk_group=1,
            num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=512, index_head_dim=32,
            index_n_heads=2, index_topk=16,
        )
    )  # fmt: skip


def qwen3_next() -> Model:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
            shared_expert_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, max_position_embeddings=512,
        )
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Model]] = {
    "llama": llama,
    "gemma3": gemma3,
    "deepseek": deepseek,
    "deepseek_v32": deepseek_v32,
    "qwen3_next": qwen3_next,
}


def make(shape: str, dtype: str = "float32", seed: int = SEED) -> Model:
    import torch

    torch.manual_seed(seed)
    return SHAPES[shape]().to(getattr(torch, dtype)).eval()


def load(folder: str, dtype: str) -> Model:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def prompt(tokens: int, seed: int = 1) -> list[int]:
    import random

    rng = random.Random(seed)
    return [rng.randrange(3, 128) for _ in range(tokens)]


def prefill(model: Model, ids: list[int]) -> Any:  # Any: a DynamicCache
    """The cache after all but the last token: that one starts the generation."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([ids[:-1]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def go_on(model: Model, cache: Any, last: int, steps: int = 12) -> tuple[list[int], str]:  # Any: a DynamicCache
    """Greedy tokens, and the digest of every logit on the way."""
    import hashlib

    import torch

    tokens: list[int] = []
    seen = hashlib.sha256()
    with torch.no_grad():
        for _ in range(steps):
            logits = model(torch.tensor([[last]]), past_key_values=cache, use_cache=True).logits[0, -1]
            seen.update(logits.float().numpy().tobytes())
            last = int(logits.argmax())
            tokens.append(last)
    return tokens, seen.hexdigest()
