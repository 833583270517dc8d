"""The real program in a process of its own, with its own home and state."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvctl.testing.models import write_llama
from tests.cli.program import PROGRAM, Done, Kvctl


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """An environment whose home, config and state are the test's own."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("KVCTL_", "XDG_"))}
    return {**kept, "HOME": str(home), "KVCTL_STATE_DIR": str(tmp_path / "state")}


@pytest.fixture
def kvctl(tmp_path: Path, surroundings: dict[str, str]) -> Kvctl:
    def run(*args: object, env: Mapping[str, str] | None = None, stdin: str = "", cwd: Path | None = None) -> Done:
        done = subprocess.run(
            [PROGRAM, *map(str, args)],
            env={**surroundings, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            cwd=cwd or tmp_path,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_llama(str(folder), shards=3)
    return folder
