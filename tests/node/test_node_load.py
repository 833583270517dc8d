"""64 clients on one node, some of which break off, through two restarts: no wrong byte, nothing leaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvctl.testing.nodes import NodeProcess
from tests.node.load import Load, run_load

CLIENTS = 64
TURNS = 20


def test_many_clients_and_two_restarts(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    node = start(folder=tmp_path / "n")
    nodes = [node]

    def restarts(load: Load) -> None:
        total = CLIENTS * TURNS
        for share, end in ((0.3, NodeProcess.terminate), (0.6, NodeProcess.kill)):
            while load.done < share * total and not load.wrong:
                time.sleep(0.02)
            end(nodes[-1])
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
    names = [path.name for path in Path(last.data).rglob("*") if path.is_file()]
    assert len(names) == CLIENTS * 7
    assert not [name for name in names if name.endswith(".kvctl-tmp")]
    requests = {name: value for name, value in metrics.items() if 'status="500"' in name}
    assert requests == {}
