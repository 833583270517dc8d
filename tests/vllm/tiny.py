"""Tiny models in the shapes of Llama and Gemma 3, in float32, with a tokenizer of their own; made in seconds."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

SYLLABLES = ("ka", "ri", "to", "mun", "sel", "dor", "vi", "pa", "lex", "qua", "ne", "shi", "bra", "ool", "int", "ex")
VOCABULARY = 1024
WINDOW = 192  # tokens; of Gemma's sliding layers
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>"]


def make(folder: Path, kind: str = "llama", *, seed: int = 0, layers: int = 4, hidden: int = 128, **more: Any) -> Path:
    """The model's folder. The same arguments give the same bytes."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(1, hidden // 64),
        "head_dim": 32,
        "max_position_embeddings": 16384,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": 0.1,
        "dtype": "float32",
    }
    if kind == "gemma":
        types = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(layers)]
        common |= {"sliding_window": WINDOW, "layer_types": types, "query_pre_attn_scalar": 32}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**{**common, "tie_word_embeddings": True, **more}))
    else:
        common |= {"rope_theta": 500000.0, "tie_word_embeddings": False}
        model = LlamaForCausalLM(LlamaConfig(**{**common, **more}))
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def adapter(folder: Path, *, seed: int, rank: int = 8, alpha: int = 16, layers: int = 4, hidden: int = 128) -> Path:
    """A LoRA of `make`'s Llama, as PEFT writes it: on every projection of the attention."""
    import torch
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(seed)
    heads, shared = hidden // 32 * 32, max(1, hidden // 64) * 32
    shapes = {
        "q_proj": (hidden, heads),
        "k_proj": (hidden, shared),
        "v_proj": (hidden, shared),
        "o_proj": (heads, hidden),
    }
    tensors = {}
    for layer in range(layers):
        for name, (wide, out) in shapes.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{where}.lora_A.weight"] = 0.1 * torch.randn(rank, wide, generator=made)
            tensors[f"{where}.lora_B.weight"] = 0.1 * torch.randn(out, rank, generator=made)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": list(shapes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def tokenizer() -> Any:  # Any: a class of any release of transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    draw = random.Random(0)
    found = Tokenizer(models.BPE(unk_token=None))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    lines = (" ".join("".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(40)) for _ in range(1000))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2]
    )


def tokens(count: int, seed: int = 7) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]
