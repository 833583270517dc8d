"""Which engines can take each other's laid-out weights, and vLLM's own ways around them: ranks, layers that can,
kernels over new memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvctl.core.errors import EnvError, IncompatibleError
from kvctl_vllm.plugin import version


def engine_key(vllm_config: Any, model_config: Any, device: torch.device) -> dict[str, Any]:  # Any: vLLM's own, JSON
    """Of an engine's layout. Before the weights are loaded: that may change the quantisation's config."""
    parallel = vllm_config.parallel_config
    config = json.loads(model_config.hf_config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)  # where the folder is
    return {
        "engine": "vLLM",
        "release": version(),
        "torch": torch.__version__,
        "model": ", ".join(getattr(model_config.hf_config, "architectures", None) or ["?"]),
        "config": hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest(),
        "dtype": str(model_config.dtype),
        "quantization": [str(model_config.quantization), str(getattr(model_config, "quantization_config", None))],
        "device": device.type if device.type == "cpu" else f"{device.type} {torch.cuda.get_device_capability()}",
        "cpu": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else "",
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "expert_parallel": bool(getattr(parallel, "enable_expert_parallel", False)),
    }


def rank_of() -> tuple[int, int]:
    """(rank, ranks) among all that divide one model: tensor and pipeline parallelism."""
    from vllm.distributed import parallel_state as state

    try:
        tensor, stages = state.get_tp_group(), state.get_pp_group()
    except AssertionError:
        return 0, 1
    return (
        int(stages.rank_in_group * tensor.world_size + tensor.rank_in_group),
        int(stages.world_size * tensor.world_size),
    )


@contextmanager
def _processed() -> Iterator[None]:
    """Raises EnvError."""
    try:
        from vllm.model_executor.utils import weights_already_processed
    except ImportError as error:
        raise EnvError("this vLLM cannot take weights that are laid out already", hint="0.32 or newer can") from error
    known: Any = weights_already_processed
    with known():
        yield


def check_model(model: nn.Module) -> None:
    """Raises IncompatibleError for layers that lay their weights out in ways that cannot be taken over, EnvError."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not getattr(method, "supports_pre_processed_weights", True):
            raise IncompatibleError(
                f"{type(method).__name__} (layer {name or 'root'}) cannot take weights that are laid out already"
            )
    with _processed():
        pass


def settle(model: nn.Module, model_config: Any, device: torch.device) -> None:  # Any: vLLM's own
    """What layers know about their weights besides (kernels, handles), over the memory of now."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process: Callable[..., None] = process_weights_after_loading
    with _processed():
        process(model, model_config, device)
