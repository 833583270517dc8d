"""Which part of each tensor a tensor-parallel rank holds. Pure: names, shapes, rules and the model's config in,
byte geometry out.

- Column-parallel (q/k/v, gate/up, vocabulary ..): output features, dimension 0 of weight and bias.
- Row-parallel (o, down ..): input features, dimension 1 of the weight; its bias is replicated.
- KV heads: whole heads; with more ranks than heads each head goes to size / heads neighbouring ranks.
- Vocabulary that does not divide: rank r holds rows r*ceil(V/size) onwards; the last ranks hold fewer, or none. The
  engine pads; no padding is stored or sent.
- Fused tensors (qkv, gate_up): the share of each part, one after the other.
- Quantised: GPTQ/AWQ tensors are transposed (in, out), so the dimensions swap; scales follow their weight where they
  have that dimension and it divides.
- Everything else is replicated; tensors of two or more dimensions that no rule knows are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from kvctl.core.errors import IncompatibleError, UsageError
from kvctl.weights.rules import Axis, Rules
from kvctl.weights.safetensors import TensorInfo
from kvctl.weights.strided import Strided, span


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts of a model's config.json. Zero: unknown."""

    attention: int = 0
    kv: int = 0
    dim: int = 0

    @classmethod
    def of(cls, config: Mapping[str, object] | None) -> Heads:
        """From a config.json, or its text_config. Values that are no positive ints count as unknown."""
        config = config or {}
        inner = config.get("text_config")
        if "num_attention_heads" not in config and isinstance(inner, Mapping):
            config = inner

        def number(name: str) -> int:
            value = config.get(name)
            return value if type(value) is int and value > 0 else 0

        attention = number("num_attention_heads")
        hidden = number("hidden_size")
        dim = number("head_dim") or (hidden // attention if attention else 0)
        return cls(attention, number("num_key_value_heads") or attention, dim)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rank's part: elements `start..stop` of dimension `dim` (of the first part, for fused tensors), None for all.

    `runs` are bytes from the tensor's first byte; packed one after the other they are the slice of shape `shape`.
    """

    name: str
    dim: int | None
    start: int
    stop: int
    shape: tuple[int, ...]
    runs: tuple[Strided, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


@dataclass(frozen=True, slots=True)
class ModelSlices:
    """All of a rank's slices by name. `unknown`: replicated tensors that no rule knows. Bytes are this rank's."""

    rank: int
    size: int
    slices: Mapping[str, TensorSlice] = field(repr=False)
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    sharded_bytes: int
    replicated_bytes: int


def slice_model(
    tensors: Iterable[TensorInfo],
    rank: int,
    size: int,
    rules: Rules | None = None,
    config: Mapping[str, object] | None = None,
) -> ModelSlices:
    """Raises UsageError for a rank outside the group, IncompatibleError naming tensor, dimension and size where a
    dimension does not divide.
    """
    if size < 1 or not 0 <= rank < size:
        raise UsageError(f"tensor-parallel rank {rank} of {size} makes no sense", hint="ranks count from 0 to size - 1")
    rules = rules or Rules()
    heads = Heads.of(config)
    slices: dict[str, TensorSlice] = {}
    unknown: list[str] = []
    notes: list[str] = []
    sharded = replicated = 0
    for tensor in tensors:
        axis = rules.axis(tensor.name, tensor.shape)
        if size == 1:
            axis = Axis(None)
        if not axis.known:
            unknown.append(tensor.name)
        piece = slice_tensor(tensor, axis, rank, size, heads)
        if piece is None:
            notes.append(f"{tensor.name}: dimension {axis.dim} does not divide by {size}, replicated")
            piece = _whole(tensor)
        slices[tensor.name] = piece
        if piece.dim is None:
            replicated += piece.nbytes
        else:
            sharded += piece.nbytes
    return ModelSlices(rank, size, slices, tuple(unknown), tuple(notes), sharded, replicated)


def slice_tensor(tensor: TensorInfo, axis: Axis, rank: int, size: int, heads: Heads) -> TensorSlice | None:
    """A rank's slice of one tensor; None where a soft rule (scales) does not divide. Raises IncompatibleError."""
    dim = axis.dim
    if dim is None or dim >= len(tensor.shape):
        return _whole(tensor)
    parts = parts_of(tensor.shape[dim], axis, heads)
    bounds: list[tuple[int, int]] = []
    at = 0
    for length, kv in parts:
        share = _share(length, kv, axis, rank, size, heads)
        if share is None:
            if axis.soft:
                return None
            raise _indivisible(tensor, dim, length, size, heads, kv=kv)
        bounds.append((at + share[0], at + share[1]))
        at += length
    runs = tuple(
        run for start, stop in bounds if stop > start for run in [dim_run(tensor, dim, start, stop)] if run is not None
    )
    if not tensor.nbytes:
        runs = ()
    elif len(runs) != sum(stop > start for start, stop in bounds):
        if axis.soft:
            return None
        raise IncompatibleError(
            f"tensor {tensor.name!r} of {tensor.dtype} cannot be cut between bytes",
            cause=f"dimension {dim} of {list(tensor.shape)} for {size} ranks",
            hint="load it with a smaller --tp-size, or replicate it with a rules file",
        )
    count = sum(stop - start for start, stop in bounds)
    shape = (*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])
    if dim > 0 and len(runs) > 1:
        raise IncompatibleError(
            f"tensor {tensor.name!r} is fused along dimension {dim}, which kvctl cannot cut",
            hint="replicate it with a rules file",
        )
    return TensorSlice(tensor.name, dim, bounds[0][0], bounds[0][1], shape, runs)


def dim_run(tensor: TensorInfo, dim: int, start: int, stop: int) -> Strided | None:
    """Bytes of elements `start..stop` of dimension `dim`; None where they do not begin and end between bytes."""
    inner = prod(tensor.shape[dim + 1 :]) * tensor.type.bits
    if start * inner % 8 or stop * inner % 8 or tensor.shape[dim] * inner % 8:
        return None
    outer = prod(tensor.shape[:dim])
    width = (stop - start) * inner // 8
    if outer == 1 or width == tensor.shape[dim] * inner // 8:
        return span(start * inner // 8, outer * width)
    return Strided(start * inner // 8, outer, tensor.shape[dim] * inner // 8, width)


def parts_of(length: int, axis: Axis, heads: Heads) -> list[tuple[int, bool]]:
    """(elements, is made of KV heads) of the parts of a dimension; one part unless the tensor is fused."""
    kv_rows = heads.kv * heads.dim
    if axis.fused == "qkv" and heads.attention and length == (heads.attention + 2 * heads.kv) * heads.dim:
        return [(heads.attention * heads.dim, False), (kv_rows, True), (kv_rows, True)]
    if axis.fused == "qkv" and not heads.attention and length % 3 == 0:
        return [(length // 3, False)] * 3
    if axis.fused == "pair" and length % 2 == 0:
        return [(length // 2, False)] * 2
    # A scale or packed weight has fewer rows per head than the weight; a vision tower has heads of its own.
    kv = axis.kv and bool(heads.kv) and (length == kv_rows or (axis.soft and length % heads.kv == 0))
    return [(length, kv)]


def _share(length: int, kv: bool, axis: Axis, rank: int, size: int, heads: Heads) -> tuple[int, int] | None:
    if kv:
        per_head = length // heads.kv
        if size > heads.kv:
            if size % heads.kv:
                return None
            head = rank // (size // heads.kv)
            return head * per_head, (head + 1) * per_head
        if heads.kv % size:
            return None
    elif axis.query and heads.attention and length == heads.attention * heads.dim and heads.attention % size:
        return None
    if length % size:
        if not axis.ragged:
            return None
        step = -(-length // size)
        return min(rank * step, length), min((rank + 1) * step, length)
    step = length // size
    return rank * step, (rank + 1) * step


def _whole(tensor: TensorInfo) -> TensorSlice:
    runs = (span(0, tensor.nbytes),) if tensor.nbytes else ()
    return TensorSlice(tensor.name, None, 0, 0, tensor.shape, runs)


def _indivisible(tensor: TensorInfo, dim: int, length: int, size: int, heads: Heads, *, kv: bool) -> IncompatibleError:
    cause = f"dimension {dim} of {list(tensor.shape)} has {length} elements"
    if kv:
        cause = f"its {heads.kv} KV heads and {size} ranks do not divide each other"
    elif heads.attention and length == heads.attention * heads.dim:
        cause = f"its {heads.attention} heads do not divide by {size}"
    return IncompatibleError(
        f"tensor {tensor.name!r} cannot be split among {size} ranks along dimension {dim}",
        cause=cause,
        hint="choose another --tp-size, or replicate the tensor with a rules file",
        details={"tensor": tensor.name, "dim": dim, "shape": list(tensor.shape), "tp_size": size},
    )
