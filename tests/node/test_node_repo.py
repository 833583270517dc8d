"""Three storage nodes as the members of a repo: push, load, a tensor-parallel load, and a node killed in the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import AuthError
from kvctl.repo.repo import Repo
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.testing.nodes import NodeProcess
from kvctl.transfer.report import Report
from kvctl.weights.load import run_load
from kvctl.weights.push import PushRequest, push_weights
from kvctl.weights.request import LoadRequest
from tests.cases.world import files_of, kvctl, refused
from tests.halting import Halt

SHAPE = LlamaShape(layers=2, hidden=256, heads=4, kv_heads=4, head_dim=64, inner=704, vocab=8192)
STRIPE = 256 * 1024


def quick() -> Context:
    return Context(retry=RetryPolicy(base=0.001, cap=0.05, attempts=5, stall_timeout=20.0))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[NodeProcess]]:
    folder = tmp_path_factory.mktemp("nodes")
    places = [folder / name for name in "abc"]
    for place in places:
        place.mkdir()
    running = [NodeProcess.start(str(place)) for place in places]
    yield running
    for node in running:
        node.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_llama(str(folder), SHAPE, shards=2, seed=3)
    return folder


def stores_of(nodes: Sequence[NodeProcess], prefix: str) -> tuple[StoreConfig, ...]:
    return tuple(node.store(prefix) for node in nodes)


def make(stores: tuple[StoreConfig, ...], model: Path, *, replicas: int) -> Report:
    Repo.init(stores, ctx=quick(), stripe_size=STRIPE, replicas=replicas).close()
    return push_weights(PushRequest(str(model), "m", stores), quick())


def test_push_and_load(nodes: Sequence[NodeProcess], model: Path, fresh: str, tmp_path: Path) -> None:
    stores = stores_of(nodes, fresh)
    pushed = make(stores, model, replicas=2).to_json()
    assert "native-tcp" in [item["name"] for item in pushed["transport"]]
    before = [node.metrics()["kvctl_node_sent_bytes_total"] for node in nodes]
    report = run_load(
        LoadRequest("m", repo=stores, into=f"dir:{tmp_path}/out", verify="full", hedge=False), quick()
    ).to_json()
    assert files_of(tmp_path / "out") == files_of(model)
    assert [item["name"] for item in report["transport"]] == ["native-tcp"]
    sent = sum(node.metrics()["kvctl_node_sent_bytes_total"] for node in nodes) - sum(before)
    assert sent >= report["bytes"]
    assert all(item["bytes"] > 0 for item in report["paths"]), "every node had its share"


def test_each_rank_reads_its_slice(nodes: Sequence[NodeProcess], model: Path, fresh: str) -> None:
    stores = stores_of(nodes, fresh)
    make(stores, model, replicas=1)
    whole = run_load(LoadRequest("m", repo=stores), quick()).to_json()["bytes"]
    ranks = [
        run_load(LoadRequest("m", repo=stores, tp_rank=rank, tp_size=4), quick()).to_json()["bytes"]
        for rank in range(4)
    ]
    assert max(ranks) < whole / 2
    assert sum(ranks) >= whole


def test_a_plain_folder_behind_a_node_loads(nodes: Sequence[NodeProcess], fresh: str, tmp_path: Path) -> None:
    files = write_llama(str(Path(nodes[0].data) / fresh / "llama"), SHAPE, shards=2, seed=4)
    store = nodes[0].store()
    address = f"{store.url}/{fresh}/llama/?key_file={store.options['key_file']}"
    run_load(LoadRequest(address, into=f"dir:{tmp_path}/out"), quick())
    assert (
        files_of(tmp_path / "out").items()
        >= {name: data for name, data in files.items() if name.endswith(".safetensors")}.items()
    )


def test_a_node_killed_in_the_middle_of_a_load(start: Callable[..., NodeProcess], model: Path, tmp_path: Path) -> None:
    nodes = [start() for _ in range(3)]
    stores = stores_of(nodes, "r")
    make(stores, model, replicas=2)
    request = LoadRequest("m", repo=stores, into=f"dir:{tmp_path}/out", verify="full")
    halt = Halt()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(run_load, request, replace(quick(), progress=halt))
        halt.wait()
        nodes[1].kill()
        halt.go_on()
        report = loading.result().to_json()
    assert files_of(tmp_path / "out") == files_of(model)
    assert report["retries"] >= 1


def test_a_read_only_key_loads_and_cannot_push(
    nodes: Sequence[NodeProcess], model: Path, fresh: str, tmp_path: Path
) -> None:
    make(stores_of(nodes, fresh), model, replicas=2)
    readers = tuple(node.store(fresh, rights="ro", scope=fresh) for node in nodes)
    run_load(LoadRequest("m", repo=readers, into=f"dir:{tmp_path}/out"), quick())
    assert files_of(tmp_path / "out") == files_of(model)
    with pytest.raises(AuthError):
        push_weights(PushRequest(str(model), "other", readers), quick())


def test_the_command_line_takes_nodes(nodes: Sequence[NodeProcess], model: Path, fresh: str, tmp_path: Path) -> None:
    texts = [f"{store.url}?key_file={store.options['key_file']}" for store in stores_of(nodes, fresh)]
    repo = ",".join(texts)
    for words in (
        ["repo", "init", "--replicas", "2", "-r", repo],
        ["push-weights", str(model), "m", "-r", repo, "-q"],
        ["load-weights", "m", "-r", repo, "--into", f"dir:{tmp_path}/out", "-q", "-o", "json"],
    ):
        done = kvctl(*words)
        assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == files_of(model)
    bare = ",".join(store.url for store in stores_of(nodes, fresh))
    error = refused(kvctl("load-weights", "m", "-r", bare, "-q", "-o", "json"), 5, "token_missing")
    assert "key_file" in error["hint"]


def test_sixteen_threads_share_a_store(nodes: Sequence[NodeProcess], fresh: str) -> None:
    from kvctl.transports.registry import open_store

    store = open_store(nodes[0].store(fresh))
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                store.put(f"{number}/{turn}", bytes([number]) * 100)
                assert store.get(f"{number}/{turn}") == bytes([number]) * 100
        except Exception as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(list(store.list())) == 320
    store.close()
