"""A disk that is full: nothing half-written stays, and the exit code says capacity."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.cli.state import save_report
from tests.cli.program import Kvctl


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system without a free block."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {made.stderr.strip()}")
    try:
        with contextlib.suppress(OSError), (place / "fill").open("wb", buffering=0) as file:
            while True:  # until there is no space
                file.write(bytes(4096))
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def files(place: Path) -> list[str]:
    return sorted(str(item.relative_to(place)) for item in place.rglob("*"))


def test_a_plug_in_package_is_whole_or_not_there(kvctl: Kvctl, full: Path) -> None:
    done = kvctl("transports", "new", "foo", "--into", full / "foo", "-o", "json")
    assert done.code == 9
    assert str(full / "foo") in done.error["what"]
    assert files(full) == ["fill"]
    (full / "mine").mkdir()
    assert kvctl("transports", "new", "foo", "--into", full / "mine").code == 9
    assert files(full) == ["fill", "mine"]


def test_a_key_is_whole_or_not_there(kvctl: Kvctl, full: Path) -> None:
    done = kvctl("node", "key", full / "k", "-o", "json")
    assert done.code == 9
    assert str(full / "k") in done.error["what"]
    assert files(full) == ["fill"]


def test_a_report_that_cannot_be_saved_leaves_nothing(full: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        save_report(str(full), "test", {"schema": "kvctl.report/1", "text": "x" * 10_000})
    assert files(full) == ["fill", "reports"]
