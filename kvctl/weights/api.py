"""The Python API: `load_weights` gives torch tensors, `open_model` iterates over them. The only module here that
imports torch, and only when it is called.

Tensors own their memory or hold its buffer alive: nothing writes to it after the load, and it is freed with the
last tensor over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, UsageError
from kvctl.memory.cuda import CudaBuffer
from kvctl.transfer.report import Report
from kvctl.weights.dtypes import DTYPES, torch_shape
from kvctl.weights.load import Loaded, load_into, plan_load
from kvctl.weights.planning import LoadPlan
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import LoadedTensor
from kvctl.weights.targets import Landing, MemoryTarget

if TYPE_CHECKING:
    import torch


def load_weights(
    url: str,
    *,
    device: str = "cpu",
    repo: str | Sequence[str] | None = None,
    version: str | None = None,
    tp_rank: int | None = None,
    tp_size: int = 1,
    ctx: Context | None = None,
    **options: Any,  # Any: further fields of LoadRequest
) -> dict[str, torch.Tensor]:
    """The tensors behind an address, by name, on `device`.

    `url`: a path, a store URL, or with `repo` (paths or store URLs of its members) a model's name. With
    `tp_rank`/`tp_size` each tensor is that rank's slice. Raises the errors of `kvctl.core.errors`; after an error
    nothing is handed over.
    """
    request = _request(url, repo, version, tp_rank, tp_size, options)
    _, loaded = load_into(replace(request, device=device), MemoryTarget(), ctx or Context())
    assert loaded is not None
    return dict(_tensors(loaded))


@dataclass(frozen=True, slots=True)
class Model:
    """An opened model: its plan is known, nothing is loaded. `report` is set after an iteration."""

    request: LoadRequest
    plan: LoadPlan
    ctx: Context

    @property
    def names(self) -> list[str]:
        return [tensor.name for tensor in self.plan.tensors]

    def describe(self, name: str) -> LoadedTensor:
        """dtype, shape and place of a tensor. Raises KeyError."""
        for tensor in self.plan.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def load(self) -> tuple[dict[str, torch.Tensor], Report]:
        """All tensors, and the report of the load."""
        report, loaded = load_into(self.request, MemoryTarget(), self.ctx)
        assert loaded is not None
        return dict(_tensors(loaded)), report

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor), in the source's order. The pairs can be kept: their bytes never change."""
        tensors, _ = self.load()
        yield from tensors.items()

    def __len__(self) -> int:
        return len(self.plan.tensors)


def open_model(
    url: str,
    *,
    device: str = "cpu",
    repo: str | Sequence[str] | None = None,
    version: str | None = None,
    tp_rank: int | None = None,
    tp_size: int = 1,
    ctx: Context | None = None,
    **options: Any,  # Any: further fields of LoadRequest
) -> Model:
    """Open a model for iteration: headers are read and checked, no weight byte moves."""
    request = replace(_request(url, repo, version, tp_rank, tp_size, options), device=device)
    context = ctx or Context()
    return Model(request, plan_load(request, context), context)


def _request(
    url: str,
    repo: str | Sequence[str] | None,
    version: str | None,
    tp_rank: int | None,
    tp_size: int,
    options: dict[str, Any],  # Any: further fields of LoadRequest
) -> LoadRequest:
    stores: tuple[StoreConfig, ...] | None = None
    if repo is not None:
        urls = repo.split(",") if isinstance(repo, str) else list(repo)
        stores = tuple(parse_store(item) for item in urls)
    if tp_size > 1 and tp_rank is None:
        raise UsageError("tp_size without tp_rank", hint="a dict of tensors is one rank's: pass tp_rank")
    try:
        return LoadRequest(
            url, repo=stores, version=version, tp_rank=tp_rank, tp_size=tp_size, into="memory", **options
        )
    except TypeError as error:
        raise UsageError(str(error)) from error


def _tensors(loaded: Loaded) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        import torch
    except ImportError as error:
        raise EnvError("tensors need torch", cause=str(error), hint="pip install 'kvctl[torch]'") from error

    memory: dict[int, torch.Tensor] = {}
    for tensor in loaded.plan.tensors:
        landing = loaded.landings[tensor.output]
        start = landing.data_start + tensor.start
        dtype = getattr(torch, DTYPES[tensor.dtype].torch, None)
        if dtype is None:
            raise EnvError(
                f"this torch has no dtype {DTYPES[tensor.dtype].torch} (tensor {tensor.name})",
                hint="install a newer torch",
            )
        if tensor.output not in memory:
            memory[tensor.output] = _memory(landing)
        flat = memory[tensor.output]
        size = tensor.end - tensor.start
        if size == 0:
            value = torch.empty(torch_shape(DTYPES[tensor.dtype], tensor.shape), dtype=dtype, device=flat.device)
        else:
            # a view of the load's memory; bytes first, since an offset need not suit the dtype's alignment
            value = _as_dtype(flat[start : start + size], dtype, tensor)
        yield tensor.name, value


def _memory(landing: Landing) -> torch.Tensor:
    """The landing's bytes as one tensor, where they are: on a GPU, or in host memory."""
    import torch

    if isinstance(landing.buffer, CudaBuffer):
        return landing.buffer.tensor
    if not landing.buffer.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(landing.buffer.view, dtype=torch.uint8)


def _as_dtype(flat: torch.Tensor, dtype: torch.dtype, tensor: LoadedTensor) -> torch.Tensor:
    kind = DTYPES[tensor.dtype]
    width = kind.bits * kind.packed // 8
    if width > 1 and flat.data_ptr() % width:
        flat = flat.clone()  # a header whose length suits no dtype: this tensor owns a copy
    return flat.view(dtype).reshape(torch_shape(kind, tensor.shape))
