"""The weights of a running model by the names of its checkpoint: vLLM fuses projections, pads vocabularies and shares
tied tensors; here they are views of its parameters again. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from kvctl.core.errors import IncompatibleError
from kvctl.weights.dtypes import DTYPES

NAMES: Final = {kind.torch: name for name, kind in DTYPES.items()}


def checkpoint_views(model: nn.Module, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Checkpoint name -> view of the parameter. `names`: of the checkpoint that was loaded; one that is tied to another
    appears when it is there. Raises IncompatibleError for parameters that cannot be told apart again (quantised,
    packed, experts fused in one tensor), and for one rank of several.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    found.update(_views(model, seen))
    wanted = set(names)
    if wanted:
        for name in sorted(wanted - found.keys()):
            tied = _tied(model, name)
            if tied is not None:
                found[name] = tied
        strange = sorted(found.keys() - wanted)
        if strange:
            raise IncompatibleError(
                f"the engine has a parameter {strange[0]} that its checkpoint does not name",
                cause=f"{len(strange)} of {len(found)} names are not those of the {len(wanted)} tensors loaded",
                hint="kvctl does not know yet how vLLM renames this model's tensors",
            )
    return found


def _views(model: nn.Module, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        if int(getattr(module, "tp_size", 1)) > 1:
            raise IncompatibleError("the weights are divided among ranks", hint="ask an engine with one rank")
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{name}.{leaf}" if name else leaf
            if not parameter.numel():
                raise IncompatibleError(f"the parameter {full} is empty: a kernel has packed it away")
            head, _, own = name.rpartition(".")
            if own in packed and len(packed[own]) > 1:
                sizes = _parts(module, full)
                if sum(sizes) != parameter.shape[0] or len(sizes) != len(packed[own]):
                    raise IncompatibleError(f"the parameter {full} is not made of {', '.join(packed[own])}")
                for part, piece in zip(packed[own], parameter.data.split(sizes), strict=True):
                    yield f"{head}.{part}.{leaf}" if head else f"{part}.{leaf}", piece
            elif hasattr(module, "org_vocab_size"):
                yield full, parameter.data[: int(module.org_vocab_size)]
            elif type(module).__name__ == "FusedMoE" or "w13_weight" in leaf:
                raise IncompatibleError(f"the experts in {full} are fused", hint="kvctl does not take them apart yet")
            else:
                yield full, parameter.data


def _parts(module: Any, name: str) -> list[int]:  # Any: a linear layer of vLLM
    """Rows of each projection in a fused one."""
    if hasattr(module, "num_kv_heads") and hasattr(module, "head_size"):
        values = int(getattr(module, "v_head_size", module.head_size))
        return [
            int(module.num_heads) * int(module.head_size),
            int(module.num_kv_heads) * int(module.head_size),
            int(module.num_kv_heads) * values,
        ]
    sizes = getattr(module, "output_sizes", None)
    if sizes is None:
        raise IncompatibleError(f"the parameter {name} is fused in a way that kvctl does not know")
    return [int(size) for size in sizes]


def _tied(model: nn.Module, name: str) -> torch.Tensor | None:
    """The tensor behind a second name (an output layer that shares the embedding)."""
    module_name, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(module_name)
    except AttributeError:
        return None
    parameter = module._parameters.get(leaf)
    if parameter is None:
        return None
    rows = int(getattr(module, "org_vocab_size", parameter.shape[0]))
    tied: torch.Tensor = parameter.data[:rows]
    return tied


def dtype_name(tensor: torch.Tensor) -> str:
    """By the names of safetensors. Raises IncompatibleError."""
    name = NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if name is None:
        raise IncompatibleError(f"a tensor of dtype {tensor.dtype} has no name in a checkpoint")
    return name


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat; a view where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
