"""What a probe finds, and the machine it looks at. Values, and reading small files.

ok: works, or is as fast as it can be. degraded: kvctl works, but slower or with less safety. broken: something that is
configured or needed does not work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

State = Literal["ok", "degraded", "broken"]
ORDER: Final[Sequence[State]] = ("ok", "degraded", "broken")


@dataclass(frozen=True, slots=True)
class Finding:
    """`value` is what there is, `why` what that means when it is not ok, `fix` what to do about it."""

    area: str
    name: str
    state: State
    value: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """`look` gives the findings; it is given up after `seconds` and then named by `area` and `name`."""

    area: str
    name: str
    look: Callable[[], Sequence[Finding]]
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Where /sys, /proc, /dev, /run and /etc are, and the environment."""

    root: str = "/"
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def path(self, name: str) -> str:
        """The path of '/sys/..' under the root."""
        return os.path.join(self.root, name.lstrip("/"))

    def read(self, name: str) -> str | None:
        """A small file's text, stripped; None when it cannot be read."""
        try:
            with open(self.path(name), encoding="utf-8", errors="replace") as file:
                return file.read(1 << 20).strip()
        except OSError:
            return None

    def list(self, name: str) -> list[str]:
        """The names in a folder, sorted; empty when there is none."""
        try:
            return sorted(os.listdir(self.path(name)))
        except OSError:
            return []

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))
