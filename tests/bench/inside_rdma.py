"""`bench paths` and `transports check` over native-rdma, in a guest of the lab: test_bench_rdma.py runs this there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.bench.contracts import _ways
from kvctl.bench.paths import BenchOptions, bench_paths
from kvctl.core.context import Context
from kvctl.testing.nodes import NodeProcess

OPTIONS = BenchOptions(sizes=(65536, 1 << 20), concurrencies=(1, 4), rounds=1, seconds=0.2)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    # client and node share the guest: they talk HTTP over loopback, where no RDMA device is
    with NodeProcess.start(str(tmp_path), "--rdma", "require", "--rdma-allow", "10.9.0.0/16") as running:
        yield running


def test_rdma_is_measured_beside_bare_writes_and_tcp(node: NodeProcess) -> None:
    (store,) = bench_paths([("node", node.store("bench"))], OPTIONS, Context()).stores
    assert store.failed == []
    assert store.auto == "native-rdma"
    assert store.rdma_ceiling.startswith("bare RDMA WRITEs between two queue pairs of rxe0")
    cells = {(cell.path, cell.size, cell.concurrency): cell for cell in store.cells}
    assert {path for path, _, _ in cells} >= {"ceiling", "ceiling-rdma", "native-rdma", "native-tcp"}
    for cell in cells.values():
        rate = f"{cell.gb_per_s:.3f} GB/s, {cell.of_ceiling} of {cell.ceiling}"
        print(f"{cell.path} {cell.size} x {cell.concurrency}: {rate}")
    assert cells["native-rdma", 1 << 20, 4].ceiling == "ceiling-rdma"
    assert cells["native-tcp", 1 << 20, 4].ceiling == "ceiling"
    assert all(cell.of_ceiling is not None for cell in cells.values() if not cell.path.startswith("ceiling"))
    assert store.left == []


def test_a_node_without_rdma_is_not_held_to_it(tmp_path: Path) -> None:
    with NodeProcess.start(str(tmp_path), "--rdma", "off") as plain:
        config = plain.store("bench")
        (way,) = [way for way in _ways(config, "auto") if way.name == "native-rdma"]
        assert not way.checked
        assert way.reason
        options = BenchOptions(sizes=(65536,), concurrencies=(1,), rounds=1, seconds=0.0)
        (store,) = bench_paths([("node", config)], options, Context()).stores
        assert store.auto == "native-tcp"
        assert "native-rdma" in {item["path"] for item in store.unavailable}
        assert store.failed == []
