"""How tests run the real program, and what they look at."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = str(Path(sys.executable).parent / "kvctl")


@dataclass(frozen=True)
class Done:
    """How a run of the program ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:  # Any: JSON
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def error(self) -> dict[str, Any]:  # Any: JSON
        """The error of -o json: the last line of stderr."""
        document = json.loads(self.err.splitlines()[-1])
        assert document["schema"] == "kvctl.error/1"
        error: dict[str, Any] = document["error"]
        assert set(error) == {"code", "exit_code", "what", "cause", "hint", "details"}
        return error


Kvctl = Callable[..., Done]
