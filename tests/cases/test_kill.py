"""W23 and the promise behind it: kill -9 anywhere leaves nothing but garbage, and the same command goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cases.kills import COMMANDS, kill, points, scratch


@pytest.mark.parametrize("command", COMMANDS)
def test_kill_9_anywhere_leaves_garbage_only_and_the_command_runs_again(command: str, tmp_path: Path) -> None:
    root = scratch(tmp_path)
    try:
        total, chosen = points(command, root, 6, seed=0)
        assert total > 20
        killed = [kill(command, point, root) for point in chosen]
    finally:
        if root != tmp_path:
            shutil.rmtree(root)
    # threads: the last points of a run may not come in another
    assert sum(killed) >= len(killed) - 1
