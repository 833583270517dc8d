"""The engine's paged KV cache and kvctl's canonical bytes: tokens out of it, and into it.

Canonical: of a layer K, then V, each [heads, tokens, dim]. vLLM's cache of a layer, by backend:

    CPU      [blocks, heads, block, 2 dim]; of a block and head, K first, as the kernels of this machine pack it
             ([dim, block] where they are plain vectors), then V [block, dim]
    CUDA     FlashAttention and its kin: [2, blocks, block, heads, dim], or with the 2 second; strides as they are
    MLA      [blocks, block, latent + rope]

How the CPU packs K is not guessed: `prove` writes a block with the backend's own operator and learns from it where each
element went.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from kvctl.core.errors import IncompatibleError
from kvctl.kv.identity import Group

SCRATCH_BLOCKS: Final = 2


class Pages(Protocol):
    """One layer's cache. `ids`: the blocks of a sequence, in order; `slots`: where its tokens lie, block * size +
    place. Canonical tensors are [heads, tokens, dim], on the CPU.
    """

    @property
    def block(self) -> int:
        """Tokens of a block."""
        ...

    def read(self, ids: Sequence[int], first: int, end: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Fill `k` and `v` with tokens [first, end) of the sequence."""
        ...

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put tokens where `slots` says."""
        ...


@dataclass(slots=True)
class CpuPages:
    """`isa`: which of its kernels the backend writes with. `place`: element of canonical K of one head's block ->
    element in the cache; None when that is plainly [dim, block].
    """

    cache: torch.Tensor
    isa: str
    place: torch.Tensor | None = None

    @property
    def block(self) -> int:
        return int(self.cache.shape[2])

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, heads, size, width = self.cache.shape
        k, v = self.cache.view(blocks, heads, 2 * size, width // 2).chunk(2, dim=2)
        return k, v

    def read(self, ids: Sequence[int], first: int, end: int, k: torch.Tensor, v: torch.Tensor) -> None:
        keys, values = self._halves()
        heads, size, dim = keys.shape[1:]
        at = first
        while at < end:
            number, inside = divmod(at, size)
            count = min(size - inside, end - at)
            page, here = ids[number], slice(at - first, at - first + count)
            v[:, here] = values[page, :, inside : inside + count]
            if self.place is None:
                k[:, here] = keys[page].reshape(heads, dim, size)[:, :, inside : inside + count].transpose(1, 2)
            else:
                plain = keys[page].reshape(heads, -1)[:, self.place].view(heads, size, dim)
                k[:, here] = plain[:, inside : inside + count]
            at += count

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        from vllm import _custom_ops as ops

        keys, values = self._halves()
        ops.cpu_attn_reshape_and_cache(
            k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(), keys, values, slots, self.isa
        )


@dataclass(slots=True)
class CudaPages:
    """`k` and `v`: [blocks, block, heads, dim] views of the layer's cache, whatever their strides."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def block(self) -> int:
        return int(self.k.shape[1])

    def read(self, ids: Sequence[int], first: int, end: int, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = slots_of(ids, self.block, first, end).to(self.k.device)
        for cache, out in ((self.k, k), (self.v, v)):
            flat = cache[slots // self.block, slots % self.block]  # [tokens, heads, dim]
            out.copy_(flat.transpose(0, 1))

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        where = slots.to(self.k.device)
        for cache, new in ((self.k, k), (self.v, v)):
            cache[where // self.block, where % self.block] = new.to(cache.device).transpose(0, 1)


@dataclass(slots=True)
class LatentPages:
    """MLA: `cache` [blocks, block, latent + rope]; K is the latent, V the rope part, one head each."""

    cache: torch.Tensor
    latent: int

    @property
    def block(self) -> int:
        return int(self.cache.shape[1])

    def read(self, ids: Sequence[int], first: int, end: int, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = slots_of(ids, self.block, first, end).to(self.cache.device)
        rows = self.cache[slots // self.block, slots % self.block]
        k.copy_(rows[None, :, : self.latent])
        v.copy_(rows[None, :, self.latent :])

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        where = slots.to(self.cache.device)
        self.cache[where // self.block, where % self.block] = torch.cat((k[0], v[0]), dim=-1).to(self.cache.device)


def slots_of(ids: Sequence[int], block: int, first: int, end: int) -> torch.Tensor:
    """Where tokens [first, end) of a sequence lie: block * size + place, int64."""
    places = torch.arange(first, end, dtype=torch.int64)
    table = torch.tensor(list(ids), dtype=torch.int64)
    return table[places // block] * block + places % block


def pages_of(name: str, cache: Any, group: Group, heads: int, isa: str | None) -> Pages:  # Any: what vLLM registers
    """The cache of layer `name`, `heads` of the group's KV heads in this rank. Raises IncompatibleError for a form that
    is not one of the above.
    """
    shape = tuple(cache.shape) if isinstance(cache, torch.Tensor) else ()
    if group.kind == "mla" and len(shape) == 3 and shape[2] == group.k_dim + group.v_dim:
        return LatentPages(cache, group.k_dim)
    if group.kind in {"full", "sliding"} and group.k_dim == group.v_dim and shape:
        dim = group.k_dim
        if cache.device.type == "cpu" and len(shape) == 4 and shape[1] == heads and shape[3] == 2 * dim and isa:
            return CpuPages(cache, isa, prove(cache, isa))
        if len(shape) == 5 and shape[3:] == (heads, dim) and 2 in shape[:2]:
            axis = 0 if shape[0] == 2 else 1
            return CudaPages(cache.select(axis, 0), cache.select(axis, 1))
    raise IncompatibleError(
        f"the engine keeps the KV of {name} in a form that kvctl does not know",
        cause=f"{group.kind}, {heads} heads of {group.k_dim}, as a tensor of shape {list(shape)}",
        hint="see the plug-in's README for the attention backends that it knows",
    )


def prove(cache: torch.Tensor, isa: str) -> torch.Tensor | None:
    """Write random tokens into a scratch block with the backend's operator, and find each element of K again. Returns
    how K is packed, see `CpuPages.place`. Raises IncompatibleError when V is not where it should be, or K is not found.
    """
    heads, size, width = cache.shape[1:]
    dim = width // 2
    scratch = CpuPages(torch.zeros(SCRATCH_BLOCKS, heads, size, width, dtype=cache.dtype), isa)
    made = torch.Generator().manual_seed(1)
    v = torch.randn(heads, size, dim, generator=made).to(cache.dtype)
    # numbers that every float type holds exactly: one pass per digit of the element's number
    total = size * dim
    number = torch.arange(total).view(size, dim)
    slots = torch.arange(size, dtype=torch.int64) + size  # block 1
    found = torch.zeros(total, dtype=torch.int64)
    weight = 1
    while weight < total:
        digit = (number // weight % 128).to(cache.dtype)
        scratch.write(slots, digit.expand(heads, size, dim).contiguous(), v)
        keys, values = scratch._halves()
        if not torch.equal(values[1], v):
            raise IncompatibleError("this CPU backend keeps values in a form that kvctl does not know")
        found += keys[1, 0].reshape(-1).to(torch.int64) * weight
        weight *= 128
    if not torch.equal(found.sort().values, torch.arange(total)):
        raise IncompatibleError("this CPU backend keeps keys in a form that kvctl does not know")
    place = torch.empty(total, dtype=torch.int64)
    place[found] = torch.arange(total)
    plain = torch.arange(total).view(dim, size).t().reshape(-1)
    return None if torch.equal(place, plain) else place
