"""Where a pull lands: tensors in the shapes of transformers' cache, and the cache made of them once all is verified."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvctl.core.errors import IncompatibleError
from kvctl.kv.identity import DTYPE_BYTES, Descriptor
from kvctl.kv.seams import LayerKv, Layout, Slot
from kvctl_transformers.export import DTYPES, Layer

if TYPE_CHECKING:
    import torch

TORCH_NAMES: Final = {ours: theirs for theirs, ours in DTYPES.items()}


@dataclass(slots=True)
class CacheSink:
    """Memory that a pull fills; `to_cache` makes the cache. `usable`: tokens that may be used, 0 until verified."""

    descriptor: Descriptor | None = None
    layout: Layout | None = None
    usable: int = 0
    _held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def prepare(self, descriptor: Descriptor, layout: Layout) -> Sequence[LayerKv]:
        import torch

        self.descriptor, self.layout = descriptor, layout
        views: list[LayerKv] = []
        for slot in layout.slots:
            k = torch.empty(slot.k_bytes, dtype=torch.uint8)
            v = torch.empty(slot.v_bytes, dtype=torch.uint8)
            self._held[slot.group, slot.layer] = (k, v)
            views.append(LayerKv(memoryview(k.numpy()), memoryview(v.numpy()), slot.start))
        return views

    def layer_ready(self, layer: int) -> None:
        return

    def invalid(self, from_token: int) -> None:
        self.usable = min(self.usable, from_token)
        if not from_token:
            self._held.clear()

    def done(self, tokens: int) -> None:
        self.usable = tokens

    def to_cache(self, config: Any, device: str) -> Any:  # Any: a config and a DynamicCache of any release
        """The cache that a model with `config` goes on from; an empty one when nothing was usable. Raises
        IncompatibleError when this release of transformers keeps the model's cache in another form.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=config)
        if self.descriptor is None or self.layout is None or not self.usable:
            return cache
        for slot in self.layout.slots:
            if slot.layer >= len(cache.layers):
                raise IncompatibleError(
                    f"the session has layer {slot.layer}, the model's cache {len(cache.layers)} layers"
                )
            self._fill(cache.layers[slot.layer], slot, config.get_text_config(decoder=True), device)
        return cache

    def _fill(self, layer: Layer, slot: Slot, config: Any, device: str) -> None:  # Any: a config of any release
        assert self.descriptor is not None
        group = self.descriptor.groups[slot.group]
        k, v = self._held[slot.group, slot.layer]
        if group.recurrent:
            self._fill_state(layer, slot.layer, k, config, device)
            return
        rows = slot.end - slot.start
        # a prefix that damage made shorter lies where the longer one was to be
        lost = slot.end - self.usable
        keys = self._shaped(k, (1, slot.heads, rows, group.k_dim))[:, :, : rows - lost].to(device)
        if group.kind == "indexer":
            layer.update_indexer(keys[:, 0])
            return
        values = self._shaped(v, (1, slot.heads, rows, group.v_dim))[:, :, : rows - lost].to(device)
        if group.window is not None:
            self._fill_window(layer, slot, group.window, keys, values)
            return
        if hasattr(layer, "sliding_window"):
            raise IncompatibleError(f"layer {slot.layer} slides in the model, and is full in the session")
        initialize(layer, keys, values)
        layer.keys, layer.values = keys, values

    def _fill_window(self, layer: Layer, slot: Slot, window: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As transformers does: window - 1 tokens at most are kept, all that went by are counted."""
        if getattr(layer, "sliding_window", None) != window:
            raise IncompatibleError(
                f"layer {slot.layer} has a window of {getattr(layer, 'sliding_window', None)} tokens in the model",
                cause=f"the session has {window}",
            )
        needed = min(slot.end, window - 1)
        if slot.end - slot.start < needed:
            raise IncompatibleError(
                f"layer {slot.layer}: {slot.end - slot.start} tokens came where {needed} are needed to go on"
            )
        initialize(layer, keys, values)
        first = slot.end - slot.start - needed
        layer.keys, layer.values = keys[:, :, first:], values[:, :, first:]
        layer.cumulative_length = slot.end

    def _fill_state(self, layer: Layer, number: int, blob: torch.Tensor, config: Any, device: str) -> None:
        """Gated delta net: the convolution [channels, kernel] in the KV's dtype, the state [heads, k, v] in F32."""
        assert self.descriptor is not None
        import torch

        dtype = getattr(torch, TORCH_NAMES[self.descriptor.dtype])
        key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
        channels, kernel = 2 * key_heads * key_dim + heads * dim, config.linear_conv_kernel_dim
        split = channels * kernel * DTYPE_BYTES[self.descriptor.dtype]
        if blob.numel() != split + 4 * heads * key_dim * dim:
            raise IncompatibleError(f"the state of layer {number} has not the size that the model's config describes")
        layer.update_conv_state(blob[:split].view(dtype).view(1, channels, kernel).to(device))
        state = blob[split:].clone().view(torch.float32)  # its bytes may begin where no F32 may
        layer.update_recurrent_state(state.view(1, heads, key_dim, dim).to(device))

    def _shaped(self, flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        assert self.descriptor is not None
        typed = flat.view(getattr(torch, TORCH_NAMES[self.descriptor.dtype]))
        assert typed.numel() == math.prod(shape)
        return typed.view(shape)


def initialize(layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
    try:
        layer.lazy_initialization(keys, values)
    except TypeError:
        layer.lazy_initialization(keys)  # releases before 5 take the keys only
