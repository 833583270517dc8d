"""64 clients on one node, some of which break off, through two restarts: no wrong byte, nothing leaks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvctl.testing.nodes import NodeProcess
from kvctl.transports.registry import open_store
from tests.node.load import Load, run_load

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 64
TURNS = 20


def test_many_clients_and_two_restarts(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    node = start(folder=tmp_path / "n")
    nodes = [node]

    def restarts(load: Load) -> None:
        total = CLIENTS * TURNS
        for share, kind in ((0.3, "terminate"), (0.6, "kill")):
            while load.done < share * total and not load.wrong:
                time.sleep(0.02)
            if kind == "kill":
                nodes[-1].kill()
            else:
                assert nodes[-1].terminate(120) == 0
            nodes.append(start(folder=tmp_path / "n", port=node.port))

    load = run_load(node, CLIENTS, lambda turn: turn < TURNS, restarts)
    assert load.wrong == []
    assert load.done == CLIENTS * TURNS
    assert load.aborted > 0
    last = nodes[-1]
    # a node at rest: a root, a listener, the loop's own, one connection; objects are kept open for a second
    deadline = time.monotonic() + 60
    while (metrics := last.metrics())["process_open_fds"] >= 40 or metrics["kvctl_node_connections"] > 1:
        assert time.monotonic() < deadline, metrics
        time.sleep(0.1)
    assert metrics["process_resident_memory_bytes"] < 120e6
    # killed between a file's temp name and its own, it leaves the first: an unfinished upload, which can be aborted
    store = open_store(last.store())
    left = list(store.uploads())
    assert len(left) <= CLIENTS
    for upload in left:
        store.abort(upload)
    store.close()
    names = [path.name for path in Path(last.data).rglob("*") if path.is_file()]
    assert len(names) == CLIENTS * 7
    assert not [name for name in names if name.endswith(".kvctl-tmp")]
    requests = {name: value for name, value in metrics.items() if 'status="500"' in name}
    assert requests == {}


@pytest.mark.slow
def test_a_minute_of_load(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.soak", "node", "--runs", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "node.json").read_text())
    assert (found["restarts"], found["failures"]) == (2, [])
    assert found["broken_off"] > 0
