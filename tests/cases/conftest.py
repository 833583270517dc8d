"""Every case runs in a folder of its own, with its own home and state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.testing.faulty_s3 import FaultyS3


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, _own_environment: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCTL_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with FaultyS3() as started:
        yield started
