"""pyverbs, of both generations: rdma-core 44 (Debian 12) has its constants flat in `pyverbs.enums`, later ones as enum
classes in `pyverbs.libibverbs_enums`. Everything else of it that is used here is the same in both.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any, Final

from kvctl.core.errors import EnvError

HINT: Final = (
    "Debian, Ubuntu: apt install ibverbs-providers librdmacm1 python3-pyverbs (for the system's Python); elsewhere "
    "pip install 'kvctl[verbs]', which builds pyverbs against an rdma-core of the same release (libnl headers, "
    "cython < 3.2)"
)
_ENUMS: Final = ("pyverbs.libibverbs_enums", "pyverbs.enums")
_MODULES: Final = ("addr", "cq", "device", "mr", "pd", "qp", "wr")


class Verbs:
    """The modules of pyverbs by name, and constants by their C name."""

    def __init__(self, modules: dict[str, ModuleType], enums: ModuleType) -> None:
        self._constants = constants(enums)
        # Any: Cython classes without types
        self.addr: Any = modules["addr"]
        self.cq: Any = modules["cq"]
        self.device: Any = modules["device"]
        self.mr: Any = modules["mr"]
        self.pd: Any = modules["pd"]
        self.qp: Any = modules["qp"]
        self.wr: Any = modules["wr"]

    def __getitem__(self, name: str) -> int:
        """The constant without its prefix: `verbs["WC_SUCCESS"]`."""
        return self._constants[f"IBV_{name}"]


def constants(enums: ModuleType) -> dict[str, int]:
    """All of libibverbs' constants in a module of either generation, by their C name."""
    found: dict[str, int] = {}
    for name, value in vars(enums).items():
        if name.startswith("IBV_"):
            found[name] = int(value)
        elif isinstance(value, type) and hasattr(value, "__members__"):
            found.update({member: int(item) for member, item in value.__members__.items() if member.startswith("IBV_")})
    return found


@cache
def load() -> Verbs:
    """Raises EnvError that says what to install."""
    try:
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
        return Verbs(modules, _enums())
    except ImportError as problem:
        missing = problem.name == "pyverbs"
        raise EnvError(
            "pyverbs is not installed" if missing else "pyverbs does not load", cause=None if missing else str(problem),
            hint=HINT,
        ) from None  # fmt: skip


def _enums() -> ModuleType:
    for name in _ENUMS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ImportError("it has no module of constants that is known here", name="pyverbs.enums")
