"""Test models: safetensors files of chosen tensors with seeded bytes, and Llama-shaped folders. Needs no torch."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvctl.weights.dtypes import DTYPES

Spec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def raw_header(document: object, *, padding: int = 0) -> bytes:
    """Length prefix and JSON of `document`, whatever it is, with `padding` spaces."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b" " * padding
    return len(text).to_bytes(8, "little") + text


def header_document(tensors: Iterable[Spec], metadata: Mapping[str, str] | None = None) -> dict[str, object]:
    """A right header for the tensors, laid out in the given order."""
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    offset = 0
    for name, dtype, shape in tensors:
        count = 1
        for dim in shape:
            count *= dim
        size = count * DTYPES[dtype].bits // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    return document


def file_bytes(
    tensors: Sequence[Spec], *, seed: int = 0, metadata: Mapping[str, str] | None = None, padding: int = 0
) -> bytes:
    """A whole safetensors file. A tensor's bytes depend on the seed and its name only, not on where it lies."""
    header = raw_header(header_document(tensors, metadata), padding=padding)
    return header + b"".join(tensor_bytes(tensor, seed) for tensor in tensors)


def tensor_bytes(tensor: Spec, seed: int = 0) -> bytes:
    """The seeded bytes of one tensor: any bit pattern but for BOOL, which holds 0 and 1."""
    name, dtype, shape = tensor
    count = 1
    for dim in shape:
        count *= dim
    data = random.Random(f"{seed}/{name}").randbytes(count * DTYPES[dtype].bits // 8)
    return bytes(byte & 1 for byte in data) if dtype == "BOOL" else data


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama-shaped model; the defaults make 1.2 MB in bf16."""

    layers: int = 2
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    inner: int = 384
    vocab: int = 512
    dtype: str = "BF16"
    biases: bool = False
    tied: bool = False
    extra_config: Mapping[str, object] = field(default_factory=dict)

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            **self.extra_config,
        }

    def tensors(self) -> list[Spec]:
        found: list[Spec] = [("model.embed_tokens.weight", self.dtype, (self.vocab, self.hidden))]
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            found += [
                (f"{at}.input_layernorm.weight", self.dtype, (self.hidden,)),
                (f"{at}.self_attn.q_proj.weight", self.dtype, (self.heads * self.head_dim, self.hidden)),
                (f"{at}.self_attn.k_proj.weight", self.dtype, (self.kv_heads * self.head_dim, self.hidden)),
                (f"{at}.self_attn.v_proj.weight", self.dtype, (self.kv_heads * self.head_dim, self.hidden)),
                (f"{at}.self_attn.o_proj.weight", self.dtype, (self.hidden, self.heads * self.head_dim)),
                (f"{at}.post_attention_layernorm.weight", self.dtype, (self.hidden,)),
                (f"{at}.mlp.gate_proj.weight", self.dtype, (self.inner, self.hidden)),
                (f"{at}.mlp.up_proj.weight", self.dtype, (self.inner, self.hidden)),
                (f"{at}.mlp.down_proj.weight", self.dtype, (self.hidden, self.inner)),
            ]
            if self.biases:
                found += [
                    (f"{at}.self_attn.q_proj.bias", self.dtype, (self.heads * self.head_dim,)),
                    (f"{at}.self_attn.k_proj.bias", self.dtype, (self.kv_heads * self.head_dim,)),
                    (f"{at}.self_attn.o_proj.bias", self.dtype, (self.hidden,)),
                ]
        found.append(("model.norm.weight", self.dtype, (self.hidden,)))
        if not self.tied:
            found.append(("lm_head.weight", self.dtype, (self.vocab, self.hidden)))
        return found


def shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def folder_files(
    tensors: Sequence[Spec],
    *,
    shards: int = 1,
    seed: int = 0,
    config: Mapping[str, object] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """Name -> bytes of a Hugging Face folder: config.json, shards of neighbouring tensors, the index when sharded."""
    files: dict[str, bytes] = {"config.json": json.dumps(dict(config or {}), indent=2).encode()}
    if shards == 1:
        files["model.safetensors"] = file_bytes(tensors, seed=seed, metadata=metadata)
        return files
    weight_map: dict[str, str] = {}
    for number, name in enumerate(shard_names(shards)):
        part = tensors[number * len(tensors) // shards : (number + 1) * len(tensors) // shards]
        files[name] = file_bytes(part, seed=seed, metadata=metadata)
        weight_map.update((tensor[0], name) for tensor in part)
    total = sum(len(tensor_bytes(tensor, seed)) for tensor in tensors)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(document).encode()
    return files


def write_llama(
    folder: str,
    shape: LlamaShape | None = None,
    *,
    shards: int = 1,
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """Write a Llama-shaped model into `folder` (made when missing); returns the files' bytes by name."""
    shape = shape or LlamaShape()
    files = folder_files(shape.tensors(), shards=shards, seed=seed, config=shape.config(), metadata=metadata)
    os.makedirs(folder, exist_ok=True)
    for name, data in files.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
    return files
