"""The program for the tests of this folder, and plug-ins that are found without being installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.conftest import own_environment, program_in
from tests.cli.program import Kvctl

SCHEMAS = Path(__file__).resolve().parent.parent.parent / "kvctl" / "cli" / "schemas"


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    return own_environment(tmp_path)


@pytest.fixture
def kvctl(tmp_path: Path, surroundings: dict[str, str]) -> Kvctl:
    return program_in(tmp_path, surroundings)


@pytest.fixture
def valid() -> Callable[[str, Mapping[str, Any]], None]:
    """Holds a document to a shipped schema."""

    def check(name: str, document: Mapping[str, Any]) -> None:
        schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
        jsonschema.validate(document, schema)

    return check


@pytest.fixture
def plug_in(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """Writes a module and the metadata that makes it a plug-in; the folder to put on the path."""

    def write(module: str, code: str, entry_points: str) -> Path:
        site = tmp_path / "site"
        info = site / f"{module}-1.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(entry_points)
        return site

    return write
