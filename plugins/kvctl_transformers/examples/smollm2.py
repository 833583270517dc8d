"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a GGUF file: `python smollm2.py FILE.gguf FOLDER`.

The weights are those of the GGUF (4 bits, so not bit for bit the published ones), written as BF16 safetensors. Needs
transformers and gguf. Takes ten seconds of CPU or so. The folder appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from typing import Any

PLAIN = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def hf_name(name: str) -> str:
    """GGUF's name of a Llama's tensor -> that of Hugging Face."""
    stem, _, leaf = name.rpartition(".")
    if stem in PLAIN:
        return f"{PLAIN[stem]}.{leaf}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{leaf}"


def halves(rows: Any, heads: int) -> Any:  # Any: numpy
    """GGUF has the two dimensions that RoPE turns together side by side, Hugging Face half a head apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def convert(gguf: str, folder: str) -> None:
    import torch
    from gguf import GGUFReader, dequantize  # type: ignore[import-not-found, unused-ignore]
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    read = GGUFReader(gguf)

    def said(name: str) -> Any:  # Any: int, float or text, as the file has it
        field = read.get_field(name)
        if field is None:
            raise SystemExit(f"{gguf} does not say {name}")
        return field.contents()

    heads, kv_heads = said("llama.attention.head_count"), said("llama.attention.head_count_kv")
    tensors = {}
    for tensor in read.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            values = halves(values, heads if "attn_q" in tensor.name else kv_heads)
        tensors[hf_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=said("llama.vocab_size"),
        hidden_size=said("llama.embedding_length"),
        intermediate_size=said("llama.feed_forward_length"),
        num_hidden_layers=said("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=said("llama.context_length"),
        rms_norm_eps=said("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=said("llama.rope.freq_base"),
        bos_token_id=said("tokenizer.ggml.bos_token_id"),
        eos_token_id=said("tokenizer.ggml.eos_token_id"),
        pad_token_id=said("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings="lm_head.weight" not in tensors,
    )
    place, name = os.path.split(os.path.abspath(gguf))
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    staged = f"{folder}.{os.getpid()}"
    os.makedirs(staged)
    save_file(tensors, os.path.join(staged, "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    try:
        os.rename(staged, folder)
    except OSError:  # another process was faster
        shutil.rmtree(staged, ignore_errors=True)


if __name__ == "__main__":
    convert(*sys.argv[1:3])
