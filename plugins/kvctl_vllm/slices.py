"""A rank's slice that passes for the whole tensor: vLLM's weight loaders take their rank's part out of it by `narrow`,
and get what was read; whatever else is done to it first reads the whole, so a wrong guess costs time, never bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_SHAPE_ONLY = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.layout.__get__,
    torch.Tensor.is_sparse.__get__,
    torch.Tensor.is_meta.__get__,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
}


class RankSlice(torch.Tensor):  # type: ignore[misc]
    """`part`: elements [first, first + part.shape[axis]) of dimension `axis`; the other dimensions are whole."""

    part: torch.Tensor
    axis: int
    first: int
    fetch: Callable[[], torch.Tensor]

    @classmethod
    def make(
        cls, part: torch.Tensor, shape: Sequence[int], rank: int, ranks: int, fetch: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """`shape`: of the whole. Where ranks outnumber the parts (KV heads), neighbours share one."""
        axes = [axis for axis, (mine, whole) in enumerate(zip(part.shape, shape, strict=True)) if mine != whole]
        if len(axes) != 1 or shape[axes[0]] % part.shape[axes[0]]:
            return fetch()
        (axis,) = axes
        parts = shape[axis] // part.shape[axis]
        found: Any = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=part.dtype, device=part.device, requires_grad=False
        )
        found.part, found.axis, found.first, found.fetch = part, axis, rank * parts // ranks * part.shape[axis], fetch
        whole: torch.Tensor = found
        return whole

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # Any: a function of torch
        types: Sequence[type],
        args: Sequence[Any] = (),  # Any: its arguments
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if func in {torch.Tensor.narrow, torch.narrow} and isinstance(args[0], cls):
            found = args[0]._narrow(*args[1:], **named)
            if found is not None:
                return found
        plain = [item.whole() if isinstance(item, cls) else item for item in args]
        return func(*plain, **{name: item.whole() if isinstance(item, cls) else item for name, item in named.items()})

    def _narrow(self, dim: int, start: int, length: int) -> torch.Tensor | None:
        """The part asked for; None when it was not read."""
        begin = int(start) - self.first
        if dim % self.dim() != self.axis or begin < 0 or begin + length > self.part.shape[self.axis]:
            return None
        return self.part.narrow(self.axis, begin, length)

    def whole(self) -> torch.Tensor:
        return self.fetch()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # Any: torch's own
        plain = [item.whole() if isinstance(item, cls) else item for item in args]
        return func(*plain, **dict(kwargs or {}))
