"""kvctl moves model weights and KV cache between GPU fleets and shared storage.

This module is the Python API: `load_weights`, `open_model`, `attach`. Its names load on first use, so that
`import kvctl` and the command line cost nothing they do not need. May import everything below it;
nothing in kvctl imports this module for more than `__version__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "load_weights", "open_model"]

if TYPE_CHECKING:
    from kvctl.agent.attach import attach
    from kvctl.weights.api import load_weights, open_model


def __getattr__(name: str) -> Any:  # Any: the module protocol of PEP 562
    if name in {"load_weights", "open_model"}:
        from kvctl.weights import api

        return getattr(api, name)
    if name == "attach":
        from kvctl.agent.attach import attach

        return attach
    raise AttributeError(f"module 'kvctl' has no attribute {name!r}")
