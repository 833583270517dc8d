"""A machine of files: /sys, /proc and /dev as a test wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvctl.doctor.findings import Machine
from tests.cli.conftest import own_environment, program_in
from tests.cli.program import Kvctl

Build = Callable[[Mapping[str, str]], Machine]


@pytest.fixture
def machine(tmp_path: Path) -> Build:
    """Makes the machine of {path: text}; a path that ends with '/' is a folder."""
    root = tmp_path / "machine"
    root.mkdir()

    def build(files: Mapping[str, str]) -> Machine:
        for name, text in files.items():
            path = root / name.strip("/")
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return Machine(str(root))

    return build


@pytest.fixture
def kvctl(tmp_path: Path) -> Kvctl:
    return program_in(tmp_path, own_environment(tmp_path))
