"""Weights as this engine lays them out, in a slot of the agent (`engine_slot` of the loader): the first engine reads
them from their source, lays them out and moves them there; the next ones map that memory and read nothing. Pages are
copy-on-write: engines share them until one changes its weights, and then that one has its own.
"""

from __future__ import annotations

import logging
import mmap
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvctl.agent.engine_slot import EngineSlot, Mapped
from kvctl.core.errors import ConflictError, IncompatibleError, KvctlError
from kvctl.core.units import format_size
from kvctl.weights.engine_layout import EngineLayout, Laid
from kvctl.weights.planning import fingerprint_of
from kvctl_vllm.held import held
from kvctl_vllm.unfuse import dtype_name

log = logging.getLogger("vllm.kvctl")


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the weights are: `slot` and `ident` of the agent's, None for memory of this process, and `why`.
    `generation`: of the weights held then; another one was written over it, into pages of this process.
    """

    slot: str | None
    ident: str | None
    aliased: int
    copied: int
    why: str
    generation: int

    def document(self) -> dict[str, Any]:  # Any: JSON
        changed = self.slot is not None and self.generation != held().generation
        return {
            "slot": self.slot,
            "ident": self.ident,
            "aliased_bytes": 0 if changed else self.aliased,
            "copied_bytes": self.copied,
            "why": "the weights were changed since: copy-on-write" if changed else self.why,
        }


_memory: Memory | None = None


def memory() -> dict[str, Any] | None:  # Any: JSON
    """Where this process's weights are; None without `engine_slot`."""
    return None if _memory is None else _memory.document()


def _now(slot: EngineSlot | None, ident: str | None, *, aliased: int = 0, copied: int = 0, why: str = "") -> None:
    global _memory  # noqa: PLW0603 - one engine per process
    _memory = Memory(slot.name if slot else None, ident, aliased, copied, why, held().generation)


@dataclass(frozen=True, slots=True)
class Wanted:
    """`source`: address of the weights. `fingerprint`: of exactly them; None when the source could not be asked."""

    source: str
    fingerprint: str | None
    key: Mapping[str, Any]  # Any: JSON

    @property
    def slot_fingerprint(self) -> str:
        return fingerprint_of(["engine", dict(self.key), self.fingerprint])


@dataclass(frozen=True, slots=True)
class _Found:
    tensors: dict[str, tuple[torch.Tensor, str]]  # (tensor, kind)
    aliases: dict[str, str]


def _find(model: nn.Module) -> _Found:
    tensors: dict[str, tuple[torch.Tensor, str]] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    both = (("param", model.named_parameters), ("buffer", model.named_buffers))
    for kind, named in both:
        for name, tensor in named(remove_duplicate=False):
            if name in tensors or name in aliases:
                continue
            known = first.setdefault(id(tensor), name)
            if known == name:
                tensors[name] = (tensor, kind)
            else:
                aliases[name] = known
    return _Found(tensors, aliases)


def _laid(name: str, tensor: torch.Tensor, kind: str) -> Laid:
    """Raises IncompatibleError."""
    if tensor.device.type != "cpu":
        raise IncompatibleError(
            f"the weights are on {tensor.device}, slots for engines are host memory",
            hint="without engine_slot they load as always; a slot of the checkpoint is a source: slot:NAME",
        )
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis)))
    if tensor.numel() and not tensor.permute(order).is_contiguous():
        raise IncompatibleError(f"{name} is not dense in memory")
    return Laid(name, dtype_name(tensor), tuple(tensor.shape), kind, order)


def _layout(found: _Found, wanted: Wanted, attrs: Mapping[str, Any]) -> EngineLayout:  # Any: JSON
    """Of the model as it is, holding the weights of now. Raises IncompatibleError."""
    laid = [_laid(name, tensor, kind) for name, (tensor, kind) in found.tensors.items()]
    # each aligned to its elements; small ones together, as engines write to some (scales), each time to a whole page
    laid.sort(key=lambda item: (-found.tensors[item.name][0].element_size(), item.nbytes < mmap.PAGESIZE))
    now = held()
    return EngineLayout(
        wanted.key, now.source, wanted.slot_fingerprint, now.digest, now.names, tuple(laid), found.aliases, attrs
    )


def _views(flat: torch.Tensor, layout: EngineLayout) -> Iterator[tuple[Laid, torch.Tensor]]:
    """`flat`: the bytes of the data section. Raises IncompatibleError for a dtype that this torch lacks."""
    from kvctl.weights.dtypes import DTYPES

    at = 0
    for item in layout.tensors:
        dtype = getattr(torch, DTYPES[item.dtype].torch)
        end = at + item.nbytes
        if item.nbytes:
            stored = flat[at:end].view(dtype).reshape(item.stored_shape)
        else:
            stored = torch.empty(item.stored_shape, dtype=dtype)
        back = [item.order.index(axis) for axis in range(len(item.order))]
        yield item, stored.permute(back) if back else stored.reshape(())
        at = end


def _bind(model: nn.Module, flat: torch.Tensor, layout: EngineLayout) -> None:
    """Every parameter and buffer of the layout is the memory of `flat` from now on. Raises IncompatibleError."""
    modules = dict(model.named_modules(remove_duplicate=False))

    def owner(name: str) -> tuple[nn.Module, str]:
        place, _, leaf = name.rpartition(".")
        if place not in modules:
            raise IncompatibleError(f"this model has no module for {name}")
        return modules[place], leaf

    bound: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for item, tensor in _views(flat, layout):
            module, leaf = owner(item.name)
            old = (module._parameters if item.kind == "param" else module._buffers).get(leaf)
            if old is not None and not old.is_meta and old.shape == tensor.shape and old.dtype == tensor.dtype:
                old.data = tensor  # the object stays: what vLLM hung on it is needed for reloading
                bound[item.name] = old
            else:
                bound[item.name] = _register(module, leaf, tensor, item.kind)
        for name, canonical in layout.aliases.items():
            module, leaf = owner(name)
            now = module._parameters.get(leaf, module._buffers.get(leaf))
            if now is not bound[canonical]:
                kind = "param" if isinstance(bound[canonical], nn.Parameter) else "buffer"
                _register(module, leaf, bound[canonical], kind)
    for name, value in layout.attrs.items():
        setattr(model, name, value)


def _register(module: nn.Module, leaf: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
    module._parameters.pop(leaf, None)
    module._buffers.pop(leaf, None)
    if kind == "buffer":
        module.register_buffer(leaf, tensor)
        return tensor
    made = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    module.register_parameter(leaf, made)
    return made


def _attrs(model: nn.Module) -> dict[str, Any]:  # Any: JSON
    try:
        from vllm.model_executor.model_loader.weight_cache.utils import export_model_attrs
    except ImportError:
        return {}
    export: Callable[[nn.Module], dict[str, Any]] = export_model_attrs
    return export(model)


def _flat(mapped: Mapped) -> torch.Tensor:
    return torch.frombuffer(mapped.memory, dtype=torch.uint8)[mapped.start :]


# -- the two ends ------------------------------------------------------------------------------------------------------


def find(slot: EngineSlot, wanted: Wanted) -> Mapped | None:
    """What the slot has for this engine; None, and a line of the log, where it has something else. Raises what
    `EngineSlot.open` raises.
    """
    mapped = slot.open()
    if mapped is None:
        return None
    layout = mapped.layout
    why = layout.differs(wanted.key)
    if not why and wanted.fingerprint is None and layout.source != wanted.source:
        why = f"it holds {layout.source}"
    if not why and wanted.fingerprint is not None and layout.fingerprint != wanted.slot_fingerprint:
        why = f"{wanted.source} is not what it was laid out from ({layout.source})"
    if why:
        log.warning("kvctl: slot %s is not used: %s", slot.name, why)
        return None
    return mapped


def attach(model: nn.Module, slot: EngineSlot, mapped: Mapped) -> None:
    """The model's weights are the slot's memory: nothing is copied. Raises IncompatibleError."""
    _bind(model, _flat(mapped), mapped.layout)
    aliased = mapped.layout.nbytes
    _now(slot, mapped.ident, aliased=aliased, why="attached")
    log.info(
        "weights over engine slot %s (%s): %d tensors, %s aliased, 0 B copied, peak memory so far %s",
        slot.name, mapped.ident, len(mapped.layout.tensors), format_size(aliased), format_size(_peak()),
    )  # fmt: skip


def publish(model: nn.Module, slot: EngineSlot, wanted: Wanted) -> None:
    """Move the loaded weights into the slot, tensor by tensor, and go on over its memory. `wanted`: with the
    fingerprint that was loaded, which may be another one than was asked for before. Raises KvctlError: then the weights
    are whole all the same, in memory of this process.
    """
    found = _find(model)
    layout = _layout(found, wanted, _attrs(model))
    filling = slot.fill(layout)
    if filling is None:
        mapped = slot.open()  # another engine was faster
        if mapped is None or mapped.layout.fingerprint != wanted.slot_fingerprint:
            raise ConflictError(f"slot {slot.name} was filled by another engine, and replaced since")
        attach(model, slot, mapped)
        return
    try:
        shared = torch.frombuffer(filling.data, dtype=torch.uint8)
        for item, place in _views(shared, layout):
            tensor = found.tensors[item.name][0]
            if item.nbytes:
                place.copy_(tensor.detach())
                tensor.data = place  # and the old memory is free again: the peak is one tensor more than the weights
        mapped = filling.map()
        del shared, place, tensor
        _bind(model, _flat(mapped), layout)
        filling.commit(mapped)
    except BaseException:
        filling.close()
        raise
    copied = layout.nbytes
    _now(slot, mapped.ident, aliased=copied, copied=copied, why="laid out by this engine")
    log.info(
        "weights moved into engine slot %s (%s): %d tensors, %s copied once, peak memory so far %s",
        slot.name, mapped.ident, len(layout.tensors), format_size(copied), format_size(_peak()),
    )  # fmt: skip


def alone(why: KvctlError | str) -> None:
    """The weights stay in memory of this process."""
    _now(None, None, why=str(why))
    log.warning("kvctl: the weights are in this process's memory, not in its engine slot: %s", why)


def _peak() -> int:
    """Bytes of resident memory at most, so far; shared pages count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
