"""NIXL itself, imported once, quietly. The only module that imports it.

`nixl_cu12` and `nixl_cu13` are the two builds; the package `nixl` on top of them picks one by looking at torch, which
takes seconds, so it is not used. Left alone, NIXL's Python logger and UCX write to stdout, and its set-up switches
Python's reporting of broken log handlers off.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from typing import Any, Final

from kvctl.core.errors import EnvError
from kvctl_nixl.probes import BUILDS, installed, missing

_LOCK: Final = threading.Lock()
_LOADED: dict[str, Any] = {}  # Any: NIXL's modules carry no types

# An error of a transfer is reported by us, with its reason; NIXL's own lines about it would only be noise beside it.
_QUIET: Final = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_LOG_FILE": "stderr"}


def load(build: str = "auto") -> Any:  # Any: the module
    """The Python API of NIXL. `build`: cu12, cu13, or auto: the one that is loaded, else cu12 where it is installed,
    since its plug-ins need no CUDA library. Raises EnvError when it is missing, too old or cannot be loaded.
    """
    with _LOCK:
        if _LOADED and build in {"auto", *_LOADED}:
            return next(iter(_LOADED.values()))
        if _LOADED:
            raise EnvError(
                f"NIXL {build} cannot be loaded beside {next(iter(_LOADED))}",
                cause="both define the same types, and a process can have one of them",
                hint="use one build for all transports of a run: --transport-opt build=",
            )
        names = BUILDS if build == "auto" else (build,)
        found = next((name for name in names if installed(name)), None)
        if found is None:
            why = missing(names)
            raise EnvError("NIXL is not available", cause=why.reason, hint=why.hint)
        _LOADED[found] = _import(found)
        return _LOADED[found]


def _import(build: str) -> Any:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("UCX_MODULES") and not has_infiniband():
        # its InfiniBand module, without a device, ends the process with a segmentation fault at exit
        os.environ["UCX_MODULES"] = "^ib"
    raises = logging.raiseExceptions
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(f"nixl_{build}._api")
    except Exception as error:  # foreign code: linkers, missing libraries, anything
        raise EnvError(
            f"NIXL ({build}) cannot be loaded",
            cause=f"{type(error).__name__}: {error}",
            hint="reinstall it: pip install --force-reinstall 'kvctl[nixl]'",
        ) from error
    finally:
        logging.raiseExceptions = raises
    logger = logging.getLogger("nixl")
    for handler in list(logger.handlers):
        # the same lines to stderr, whatever that is by then
        ours = logging._StderrHandler()  # type: ignore[attr-defined] # the one handler that follows sys.stderr
        ours.setFormatter(handler.formatter)
        logger.removeHandler(handler)
        logger.addHandler(ours)
    return module


def has_infiniband() -> bool:
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False
