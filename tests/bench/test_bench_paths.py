"""`kvctl bench paths`: what is measured, by what ceiling, and that nothing stays. No time is asserted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvctl.bench import ceilings, plot
from kvctl.bench.paths import BenchOptions, bench_paths
from kvctl.bench.plot import require_plot
from kvctl.bench.rivals import Memory, TransportRival, check_content
from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, IntegrityError, UsageError
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.mem import MemStore, MemTransport
from tests.cli.program import Kvctl

Valid = Callable[[str, Mapping[str, Any]], None]
QUICK = ("--sizes", "64KiB,1MiB", "--concurrency", "1,4", "--rounds", "2", "--seconds", "20ms")
SHORT = BenchOptions(sizes=(65536,), concurrencies=(2,), rounds=1, seconds=0.01)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NodeProcess]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(NodeProcess.start(str(tmp_path_factory.mktemp(f"node{number}")), keys=number != 0))
            for number in range(3)
        ]


def cells(store: Mapping[str, Any]) -> dict[tuple[str, int, int], Mapping[str, Any]]:
    return {(cell["path"], cell["size"], cell["concurrency"]): cell for cell in store["cells"]}


def test_a_folder_against_preadv(kvctl: Kvctl, tmp_path: Path, valid: Valid) -> None:
    done = kvctl("bench", "paths", "./store", *QUICK, "--plot", "out.svg", "-o", "json")
    assert done.code == 0, done.err
    document = done.document
    valid("bench-paths", document)
    (store,) = document["stores"]
    assert store["ceiling"].startswith("preadv of the same file")
    found = cells(store)
    paths = {path for path, _, _ in found}
    assert {"ceiling", "file", "store-get"} <= paths
    assert set(found) == {(path, size, count) for path in paths for size in (65536, 1 << 20) for count in (1, 4)}
    for (path, size, count), cell in found.items():
        assert len(cell["gb_per_s_rounds"]) == 2
        assert cell["bytes"] == cell["requests"] * size
        assert cell["requests"] >= 2 * 2 * count
        assert (cell["of_ceiling"] is None) is (path == "ceiling")
        assert cell["p50_s"] <= cell["p99_s"]
    assert store["auto"] == "file"
    assert list((tmp_path / "store").iterdir()) == []
    picture = (tmp_path / "out.svg").read_text()
    assert picture.count("<svg") == 1
    assert kvctl("bench", "paths", "./store", *QUICK, "--transport", "file").out.startswith("file://")


def test_three_nodes_each_against_a_bare_server(
    kvctl: Kvctl, nodes: list[NodeProcess], tmp_path: Path, valid: Valid
) -> None:
    stores = "".join(
        f'[[repos.lab.stores]]\nurl = "{node.store().url}/lab"\n'
        + (f'options = {{ key_file = "{node.key_file()}" }}\n' if node.master else "")
        for node in nodes
    )
    (tmp_path / "kvctl.toml").write_text(f'default_repo = "lab"\n{stores}')
    done = kvctl("bench", "paths", *QUICK, "-o", "json")
    assert done.code == 0, done.err
    document = done.document
    valid("bench-paths", document)
    assert [store["url"] for store in document["stores"]] == [f"node://{node.address}/lab" for node in nodes]
    for store in document["stores"]:
        assert "bare sendfile server on the loopback" in store["ceiling"]
        assert "/metrics" in store["server_cpu"]
        found = cells(store)
        assert {path for path, _, _ in found} >= {"ceiling", "readinto", "native-tcp", "store-get"}
        assert all(cell["server_cpu_s_per_gb"] is not None for cell in found.values())
        assert found["native-tcp", 1 << 20, 4]["server_cpu_s_per_gb"] > 0
        assert store["left"] == []
    for node in nodes:
        assert [path for path in Path(node.data).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("number", [0, 1], ids=["open", "with keys"])
def test_a_node_elsewhere_is_measured_against_itself(
    nodes: list[NodeProcess], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "is_here", lambda host: False)
    config = nodes[number].store("far")
    (store,) = bench_paths([("far", config)], SHORT, Context()).stores
    assert f"a bare socket to {nodes[number].address} itself" in store.ceiling
    assert store.failed == []
    assert {cell.path for cell in store.cells} >= {"ceiling", "readinto", "native-tcp"}


@pytest.mark.s3
def test_s3_elsewhere_is_measured_with_requests_signed_before(
    seaweed_store: Callable[[], StoreConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "is_here", lambda host: False)
    (store,) = bench_paths([("far", seaweed_store())], SHORT, Context()).stores
    assert "signed before" in store.ceiling
    assert store.failed == []
    assert {cell.path for cell in store.cells} >= {"ceiling", "readinto", "s3"}
    assert store.left == []


@pytest.mark.s3
def test_s3_here_is_measured_against_a_bare_server(seaweed_store: Callable[[], StoreConfig]) -> None:
    (store,) = bench_paths([("near", seaweed_store())], SHORT, Context()).stores
    assert "bare sendfile server" in store.ceiling
    assert next(cell for cell in store.cells if cell.path == "ceiling").server_cpu_s_per_gb is not None
    assert next(cell for cell in store.cells if cell.path == "s3").server_cpu_s_per_gb is None
    assert store.server_cpu == "unknown: the server does not tell"


def test_a_medium_without_a_known_ceiling_is_measured_without(kvctl: Kvctl) -> None:
    done = kvctl("bench", "paths", "mem://box", *QUICK, "-o", "json")
    assert done.code == 0, done.err
    (store,) = done.document["stores"]
    assert store["ceiling"] == ""
    assert all(cell["of_ceiling"] is None for cell in store["cells"])


def test_what_cannot_run_is_named_with_the_reason(kvctl: Kvctl) -> None:
    done = kvctl("bench", "paths", "node://127.0.0.1:1/x", "--transport", "s3", "-o", "json")
    assert done.code == 2
    assert "serves s3" in done.error["what"]


def test_the_object_stays_when_asked(kvctl: Kvctl, tmp_path: Path) -> None:
    arguments = ("--sizes", "64KiB", "--concurrency", "1", "--rounds", "1", "--seconds", "1ms", "--transport", "file")
    done = kvctl("bench", "paths", "./store", *arguments, "--keep", "-o", "json")
    assert done.code == 0
    (store,) = done.document["stores"]
    assert store["left"] == ["object.bin"]
    assert (tmp_path / "store" / store["prefix"] / "object.bin").stat().st_size == 64 << 20


def test_more_at_once_than_a_transport_does_is_said() -> None:
    options = BenchOptions(sizes=(4096,), concurrencies=(8,), rounds=1, seconds=0.0)
    (store,) = bench_paths([("box", parse_store("mem://many"))], options, Context()).stores
    assert "mem works on 4 requests at once; further ones waited" in store.notes
    assert {cell.requests for cell in store.cells} == {16}


def test_a_direct_path_is_held_to_a_direct_ceiling(tmp_path: Path) -> None:
    options = replace(SHORT, seconds=0.0, transport="file", transport_options={"direct": "true"})
    (store,) = bench_paths([("files", parse_store(str(tmp_path)))], options, Context()).stores
    if store.failed:
        pytest.skip(f"no O_DIRECT on {tmp_path}: set --basetemp to a disk ({store.failed[0]['error']})")
    assert store.ceiling.startswith("preadv with O_DIRECT")
    assert {cell.path for cell in store.cells} == {"ceiling", "file"}


def test_threads_follow_the_concurrency(tmp_path: Path) -> None:
    options = BenchOptions(sizes=(4096,), concurrencies=(24,), rounds=1, seconds=0.0, transport="file")
    (store,) = bench_paths([("files", parse_store(str(tmp_path)))], options, Context()).stores
    assert "file ran with threads=24, for 24 requests at once" in store.notes


def test_a_path_that_breaks_is_told_and_the_others_are_measured(
    kvctl: Kvctl, plug_in: Callable[[str, str, str], Path]
) -> None:
    code = """
from kvctl.core.errors import EnvError
from kvctl.transports.mem import MemTransport, open_store
from kvctl.transports.registry import TransportSpec

class Breaks(MemTransport):
    def perform(self, op):
        raise EnvError("it broke")

def open_transport(config, store, endpoint, options):
    return Breaks(open_store(config))

SPEC = TransportSpec("breaks", "fails", "breaker:open_transport", schemes=("mem",))
"""
    site = plug_in("breaker", code, "[kvctl.transports]\nbreaks = breaker:SPEC\n")
    done = kvctl("bench", "paths", "mem://box", *QUICK, "-o", "json", env={"PYTHONPATH": str(site)})
    assert done.code == 3
    (store,) = done.document["stores"]
    assert store["failed"] == [{"path": "breaks", "error": "it broke"}]
    assert {cell["path"] for cell in store["cells"]} == {"mem", "store-get"}
    assert "breaks" in done.error["what"]


def test_wrong_bytes_are_found_before_anything_is_timed() -> None:
    store = MemStore("wrong-bytes")
    version = store.put("object.bin", bytes(1 << 20)).version
    rival = TransportRival("mem", store, [MemTransport(store)], "object.bin", version, 1 << 20)
    memory = Memory(2, 4096)
    with pytest.raises(IntegrityError, match="other bytes"):
        check_content(rival, memory, [(0, 4096)], memoryview(b"x" * 4096))
    rival.close()
    memory.close()


def test_a_picture_needs_matplotlib_and_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no picture"):
        require_plot("out.gif")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(EnvError) as caught:
        require_plot("out.svg")
    assert caught.value.hint == "pip install 'kvctl[plot]'"


def test_nothing_stays_behind_after_an_interruption(tmp_path: Path) -> None:
    ctx = Context()
    timer = threading.Timer(1.0, lambda: ctx.cancel.request(2))
    timer.start()
    from kvctl.core.errors import InterruptedRunError

    with pytest.raises(InterruptedRunError):
        bench_paths([("files", parse_store(str(tmp_path)))], BenchOptions(rounds=1000, seconds=0.01), ctx)
    timer.join()
    assert list(tmp_path.iterdir()) == []


def test_this_host_is_here_and_others_are_not() -> None:
    assert ceilings.is_here("127.0.0.1")
    assert ceilings.is_here("localhost")
    assert not ceilings.is_here("192.0.2.1")
    assert not ceilings.is_here("no-such-host.invalid")
