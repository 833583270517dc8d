"""Tensors of a model as vLLM's loaders take them, out of a kvctl load that streams by: nothing is kept here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import torch

from kvctl.core.context import Context
from kvctl.core.errors import EnvError
from kvctl.transfer.report import Report
from kvctl.weights.digests import TensorDigest, TensorHasher, model_digest
from kvctl.weights.dtypes import DTYPES, torch_shape
from kvctl.weights.load import plan_load
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import LoadedTensor
from kvctl.weights.streaming import TensorStream
from kvctl_vllm.slices import RankSlice

WAITING: Final = 4  # tensors that wait to be hashed


class Weights:
    """Iterate over it once: (name, tensor). `report`, `digest`, `names` and `fingerprint` (of the load's plan) are
    known after the last one. `digest` is the source's own, or made from the bytes as they pass; None where this rank
    read slices of a source that has none.
    """

    def __init__(self, request: LoadRequest, ctx: Context) -> None:
        self.request = request
        self.ctx = ctx
        self.report: Report | None = None
        self.digest: str | None = None
        self.names: tuple[str, ...] = ()
        self.fingerprint: str | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        request = self.request
        sliced = request.tp_size > 1
        whole = {}
        if sliced:
            plan = plan_load(replace(request, tp_size=1, tp_rank=None), self.ctx)
            whole = {tensor.name: tensor for tensor in plan.tensors}
        with TensorStream(request, self.ctx) as stream, ThreadPoolExecutor(1, "kvctl-hash") as hashing:
            known = stream.digest
            hashes: list[Future[TensorDigest]] = []
            names: list[str] = []
            for tensor, data in stream:
                names.append(tensor.name)
                if known is None and not sliced:
                    if len(hashes) >= WAITING:
                        hashes[-WAITING].result()  # what waits to be hashed holds its memory
                    hashes.append(hashing.submit(_hash, tensor, data))
                value = as_tensor(tensor, data)
                if sliced:
                    yield tensor.name, self._slice(tensor, value, whole[tensor.name])
                else:
                    yield tensor.name, value
                del data, value
            self.report = stream.report
            self.fingerprint = stream.plan.fingerprint
            self.names = tuple(names)
            self.digest = known
            if known is None and hashes:
                self.digest = model_digest([future.result() for future in hashes])

    def _slice(self, tensor: LoadedTensor, value: torch.Tensor, whole: LoadedTensor) -> torch.Tensor:
        if tensor.shape == whole.shape:
            return value

        def fetch() -> torch.Tensor:
            return self._whole(whole.name)

        return RankSlice.make(value, whole.shape, self.request.tp_rank or 0, self.request.tp_size, fetch)

    def _whole(self, name: str) -> torch.Tensor:
        """A tensor that the engine divides otherwise than the rules say: read again, whole."""
        from kvctl.weights.api import load_weights

        request = self.request
        self.ctx.progress.note(f"{name} is not divided as the rules say: this rank reads all of it")
        repo = None if request.repo is None else [store.url for store in request.repo]
        found: Any = load_weights(request.address, repo=repo, version=request.version, ctx=self.ctx)
        tensor: torch.Tensor = found[name]
        return tensor


def as_tensor(tensor: LoadedTensor, data: Any) -> torch.Tensor:  # Any: a ctypes array
    """A tensor over the bytes, which it keeps alive. Raises EnvError for a dtype that this torch lacks."""
    kind = DTYPES[tensor.dtype]
    dtype = getattr(torch, kind.torch, None)
    if dtype is None:
        raise EnvError(f"this torch has no dtype {kind.torch} (tensor {tensor.name})", hint="install a newer torch")
    shape = torch_shape(kind, tensor.shape)
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if flat.data_ptr() % max(1, dtype.itemsize):
        flat = flat.clone()  # a header whose length suits no dtype
    return flat.view(dtype).reshape(shape)


def _hash(tensor: LoadedTensor, data: Any) -> TensorDigest:  # Any: a ctypes array
    hasher = TensorHasher(tensor.dtype, tensor.shape, len(data))
    hasher.update(memoryview(data).cast("B"))
    return TensorDigest(tensor.name, tensor.dtype, tensor.shape, hasher.digest())
