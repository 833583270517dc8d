"""`--load-format kvctl`: a model loader of vLLM that reads any kvctl source.

    vllm serve FOLDER --load-format kvctl --model-loader-extra-config '{"source": "lab:llama70b@7"}'

FOLDER holds config.json and the tokenizer; "source" is where the weights are (default: FOLDER). Further settings:
"repo" (where a bare name is), "config" (a kvctl config file), "transport", "verify", "max_rate", "engine_slot" (a slot
of this host's agent for the weights as this engine lays them out: the first engine fills it, the next ones map it and
read nothing). `reload_weights` with `weights_path` takes any such address.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.utils.torch_utils import set_default_torch_dtype

from kvctl.agent.engine_slot import EngineSlot
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, KvctlError, TransientError, UsageError
from kvctl.core.units import format_seconds, format_size
from kvctl.weights.load import plan_load
from kvctl.weights.request import LoadRequest
from kvctl_vllm import laid_out, layout_key, places
from kvctl_vllm.held import now_holds
from kvctl_vllm.tensors import Weights

log = logging.getLogger("vllm.kvctl")
SETTINGS: Final = {"source", "repo", "config", "transport", "verify", "max_rate", "digests", "engine_slot"}
_MODEL: Final = "_kvctl_model"  # the folder that the engine was started with


class KvctlModelLoader(BaseModelLoader):  # type: ignore[misc]
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config
        if not isinstance(extra, dict):
            raise UsageError(f"--model-loader-extra-config {extra!r} is no JSON object")
        unknown = sorted(set(extra) - SETTINGS - {_MODEL})
        if unknown:
            raise UsageError(
                f"--load-format kvctl knows no setting {unknown[0]!r}", hint=f"known are {', '.join(sorted(SETTINGS))}"
            )
        self.extra: dict[str, Any] = extra  # Any: JSON
        self._loaded: str | None = None  # fingerprint of the weights that were read last

    def download_model(self, model_config: ModelConfig) -> None:
        return

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        asked = self.extra.get("engine_slot")
        if asked is None or model_config is not vllm_config.model_config:  # a draft model is small
            model: nn.Module = super().load_model(vllm_config, model_config, prefix)
            return model
        self.extra.setdefault(_MODEL, model_config.model)
        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        slot = EngineSlot(str(asked), *layout_key.rank_of())
        address = self._address(model_config)
        key = layout_key.engine_key(vllm_config, model_config, device)
        wanted = laid_out.Wanted(address, self._fingerprint(address), key)
        try:
            mapped = laid_out.find(slot, wanted)
        except (EnvError, TransientError) as error:  # no agent, or one that is going: that is no reason not to serve
            model = super().load_model(vllm_config, model_config, prefix)
            laid_out.alone(error)
            return model
        if mapped is None:
            model = super().load_model(vllm_config, model_config, prefix)
            try:
                layout_key.check_model(model)
            except KvctlError as error:
                laid_out.alone(error)
                return model
            try:
                laid_out.publish(model, slot, replace(wanted, fingerprint=self._loaded))
            except KvctlError as error:
                laid_out.alone(error)
        else:
            with set_default_torch_dtype(model_config.dtype):
                with device:
                    model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                layout_key.check_model(model)
                layout = mapped.layout
                now_holds(layout.source, layout.digest, layout.names)
                laid_out.attach(model, slot, mapped)
            model = model.eval()
        with set_default_torch_dtype(model_config.dtype):
            layout_key.settle(model, model_config, device)
        return model

    def _fingerprint(self, address: str) -> str | None:
        """Of the weights that are there now, from headers alone; None when the source does not answer."""
        try:
            return plan_load(*request_of(address, self.extra)).fingerprint
        except TransientError as error:
            log.warning("kvctl: %s does not answer (%s): what the slot has of it will do", address, error)
            return None

    def _address(self, model_config: ModelConfig) -> str:
        moved = model_config.model != self.extra.get(_MODEL, model_config.model)
        return str(model_config.model if moved else self.extra.get("source", model_config.model))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.extra.setdefault(_MODEL, model_config.model)
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        missing = sorted({name for name, _ in model.named_parameters()} - set(loaded or ()))
        if missing and loaded is not None and model_config.quantization is None:
            raise UsageError(
                f"the weights have no tensor for {missing[0]} and {len(missing) - 1} more parameters of the model",
                hint="config.json and the weights are of different models",
            )

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the source for this process's rank; after a `reload_weights` with a path, of that address. At
        the end the engine holds them, and the report is logged.
        """
        address = self._address(model_config)
        weights = Weights(*request_of(address, self.extra))
        yield from weights
        self._loaded = weights.fingerprint
        now_holds(address, weights.digest, weights.names)
        _log(address, weights)


def request_of(address: str, extra: dict[str, Any]) -> tuple[LoadRequest, Context]:  # Any: JSON
    """What this process's rank loads for a weights address."""
    settings = places.config(extra.get("config"))
    options = {name: extra[name] for name in ("transport", "verify", "max_rate") if name in extra}
    request = places.weights_request(settings, address, extra.get("repo"), **options)
    rank, size = tensor_rank()
    if size > 1:
        request = replace(request, tp_rank=rank, tp_size=size)
    return request, places.context(settings)


def _log(address: str, weights: Weights) -> None:
    report = weights.report
    assert report is not None
    log.info(
        "weights of %s: %d tensors, %s in %s (%.2f GB/s), over-fetch %.2f, over %s, verified: %s, digest %s",
        address,
        report.tensors,
        format_size(report.bytes),
        format_seconds(report.seconds),
        report.gbps,
        report.over_fetch,
        ", ".join(sorted({path.transport for path in report.paths})) or "nothing",
        report.verified.state + (f" ({report.verified.why})" if report.verified.why else ""),
        weights.digest or "unknown",
    )


def tensor_rank() -> tuple[int, int]:
    """(rank, ranks) of tensor parallelism in this process."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    try:
        return int(get_tensor_model_parallel_rank()), int(get_tensor_model_parallel_world_size())
    except (AssertionError, RuntimeError):
        return 0, 1  # before vLLM made its groups
