"""A cache of transformers as a source of KV: the tensors of its layers as canonical bytes, nothing guessed.

transformers keeps [batch, heads, tokens, dim]. Of a sliding-window layer it keeps the last window - 1 tokens and the
true length apart; of MLA the latent as keys and the rope part as values, one head each; an indexer's keys are
[batch, tokens, dim]; a linear-attention layer has a convolution and a recurrent state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from kvctl.core.errors import IncompatibleError, UsageError
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.seams import LayerKv

if TYPE_CHECKING:
    import torch

Layer = Any  # a layer of transformers' cache: the classes differ from release to release, their fields less so

DTYPES: Final = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Names of torch's dtypes -> logical dtypes of KV."""


def dtype_name(tensor: torch.Tensor) -> str:
    """Raises IncompatibleError for a dtype that KV is not stored in."""
    text = str(tensor.dtype).removeprefix("torch.")
    found = DTYPES.get(text)
    if found is None:
        raise IncompatibleError(f"a cache of dtype {text} cannot be stored", cause=f"known are {', '.join(DTYPES)}")
    return found


def cache_layers(cache: Any) -> list[Layer]:  # Any: a Cache of any release
    """The layers of a cache that grows. Raises UsageError for caches of other kinds."""
    layers = getattr(cache, "layers", None)
    if not layers:
        raise UsageError(
            f"{type(cache).__name__} is no cache with layers that hold anything",
            hint="run the model with past_key_values=DynamicCache(config=model.config) first",
        )
    for number, layer in enumerate(layers):
        name = type(layer).__name__
        if "Static" in name or "Quant" in name:
            raise IncompatibleError(
                f"layer {number} is a {name}, whose bytes are not the model's keys and values one by one",
                hint="use a DynamicCache(config=model.config)",
            )
    return list(layers)


def cache_length(layers: list[Layer]) -> int:
    """Tokens that the cache has seen. Raises UsageError when its layers disagree or hold none."""
    lengths = {int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")}
    lengths.discard(0)  # layers that share another layer's cache hold nothing
    if len(lengths) != 1:
        raise UsageError(
            "the cache has no one length", cause=f"its layers hold {', '.join(map(str, sorted(lengths))) or '0'} tokens"
        )
    return lengths.pop()


def first_tensor(layers: list[Layer]) -> torch.Tensor:
    """A tensor of keys, to learn dtype and device from. Raises UsageError for an empty cache."""
    for layer in layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.numel():
            return keys
    raise UsageError("the cache is empty", hint="run the model on a prompt first")


class Exported:
    """The layers of a cache as `LayerKv`. Keeps the tensors (contiguous, on the CPU) alive for as long as it lives."""

    def __init__(self, layers: list[Layer], descriptor: Descriptor, tokens: int) -> None:
        self._held: list[torch.Tensor] = []
        self.layers: dict[tuple[int, int], LayerKv] = {}
        for index, group in enumerate(descriptor.groups):
            for number in group.layers:
                if number >= len(layers):
                    raise IncompatibleError(
                        f"the cache has {len(layers)} layers, the model's config describes layer {number}"
                    )
                self.layers[index, number] = self._export(layers[number], number, group, descriptor.dtype, tokens)

    def _export(self, layer: Layer, number: int, group: Group, dtype: str, tokens: int) -> LayerKv:
        if group.recurrent:
            return LayerKv(self._state(layer, number, group), memoryview(b""), tokens)
        if group.kind == "indexer":
            if getattr(layer, "indexer_position_ids", None) is not None:
                raise IncompatibleError(f"layer {number} keeps positions for its indexer, which no format here holds")
            keys = getattr(layer, "indexer_keys", None)
            if keys is None:
                raise IncompatibleError(f"layer {number} has no indexer keys, the model's config says it has")
            return LayerKv(self._plain(keys[:, None], number, group, group.k_dim, dtype, tokens), memoryview(b""))
        held = int(layer.keys.shape[-2])
        wanted = tokens if group.window is None else min(tokens, group.window - 1)
        if held < wanted:
            raise IncompatibleError(
                f"layer {number} holds {held} tokens where {wanted} are needed to go on", cause=f"of {tokens} tokens"
            )
        k = self._plain(layer.keys, number, group, group.k_dim, dtype, wanted)
        v = self._plain(layer.values, number, group, group.v_dim, dtype, wanted)
        return LayerKv(k, v, tokens - wanted)

    def _plain(self, tensor: torch.Tensor, number: int, group: Group, dim: int, dtype: str, last: int) -> memoryview:
        shape = tuple(int(size) for size in tensor.shape)
        if shape[0] != 1:
            raise UsageError(
                f"the cache is of a batch of {shape[0]}", hint="a session is one sequence: push each on its own"
            )
        if shape[1] != group.kv_heads or shape[3] != dim or dtype_name(tensor) != dtype:
            raise IncompatibleError(
                f"layer {number} has {dtype_name(tensor)} of {shape[1]} heads and {shape[3]} dimensions",
                cause=f"the model's config describes {dtype} of {group.kv_heads} heads and {dim} dimensions",
                hint="the cache is of another model, or this release of transformers keeps it in another form",
            )
        return self._bytes(tensor[0, :, shape[2] - last :])

    def _state(self, layer: Layer, number: int, group: Group) -> memoryview:
        parts = list(state_tensors(layer, number))
        blob = join_bytes(parts)
        self._held.append(blob)
        if blob.numel() != group.k_dim:
            raise IncompatibleError(
                f"the state of layer {number} takes {blob.numel()} bytes, the model's config describes {group.k_dim}",
                cause=", ".join(f"{part.dtype} {list(part.shape)}" for part in parts),
            )
        return memoryview(blob.numpy())

    def _bytes(self, tensor: torch.Tensor) -> memoryview:
        flat = as_bytes(tensor)
        self._held.append(flat)
        return memoryview(flat.numpy())


def state_tensors(layer: Layer, number: int) -> Iterator[torch.Tensor]:
    """The convolution and the recurrent state of a linear-attention layer. Raises IncompatibleError."""
    if getattr(layer, "number_of_states", 1) != 1:
        raise IncompatibleError(f"layer {number} has {layer.number_of_states} states, known is one")
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None)
        found = states.get(0) if isinstance(states, dict) else states
        if found is None:
            raise IncompatibleError(f"layer {number} has no {name} yet", hint="run the model on a prompt first")
        yield found[0]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, flat, on the CPU; no copy where they lie so already."""
    import torch

    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def join_bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat([as_bytes(tensor) for tensor in tensors])
