"""W24: a member is down, before the load or in the middle of it; with two replicas and with one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.models import LlamaShape, write_llama
from tests.cases.world import as_option, files_of, kvctl, make_repo, nothing_left, push, refused

SOON = ("--stall-timeout", "2s")  # for loads that are to end
SHAPE = LlamaShape(layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, inner=704, vocab=1024)


class Cluster:
    """Three servers, one member each, and the model in their repo."""

    def __init__(self, servers: Sequence[FaultyS3]) -> None:
        self.servers = list(servers)
        self.stores = [server.store("repo") for server in servers]
        self.files: dict[str, bytes] = {}

    def fill(self, replicas: int) -> None:
        self.files = write_llama("model", SHAPE, shards=2)
        make_repo(self.stores, replicas=replicas, stripe=256 * 1024)
        push("model", self.stores)
        for server in self.servers:
            server.clear()

    @property
    def args(self) -> tuple[str, ...]:
        return ("load-weights", "m", "-r", as_option(self.stores), "--into", "dir:out", "-o", "json")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster([stack.enter_context(FaultyS3()) for _ in range(3)])


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_two_replicas_and_a_member_that_is_down_from_the_start(victim: int, cluster: Cluster, tmp_path: Path) -> None:
    cluster.fill(replicas=2)
    lost = cluster.servers[victim].endpoint
    cluster.servers[victim].close()
    done = kvctl(*cluster.args)
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == cluster.files
    report = done.document
    assert any(note.startswith(f"member s3://bucket/repo at {lost} is down") for note in report["notes"]), report[
        "notes"
    ]
    assert sorted(path["member"] for path in report["paths"]) == sorted(
        f"s3://bucket/repo at {server.endpoint}" for server in cluster.servers if server.endpoint != lost
    )
    assert report["verified"]["state"] == "leaves"
    assert report["verified"]["bytes"] == report["bytes"]


def test_two_replicas_and_a_member_that_dies_in_the_middle(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fill(replicas=2)
    victim = cluster.servers[1]
    # its metadata is served; its first chunk of weights is, then no connection gets an answer any more
    fault = victim.add(Fault("reset", key="repo/chunks/*", skip=4))
    done = kvctl(*cluster.args)
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == cluster.files
    assert fault.fired > 0
    report = done.document
    path = next(path for path in report["paths"] if path["endpoint"] == victim.endpoint)
    assert path["failures"] > 0
    assert report["retries"] >= 1
    assert sum(path["bytes"] for path in report["paths"]) >= report["bytes"]


def test_one_replica_and_a_member_that_is_down_names_it_and_what_is_missing(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fill(replicas=1)
    held = [
        sum(len(item.data) for (_, key), item in server.objects.items() if "/chunks/" in key)
        for server in cluster.servers
    ]
    victim = held.index(max(held))
    lost = cluster.servers[victim].endpoint
    cluster.servers[victim].close()
    error = refused(kvctl(*cluster.args, *SOON), 6, f"member s3://bucket/repo at {lost} is down", "only there")
    assert error["details"]["missing_bytes"] > 0
    assert error["code"] == "member_down"
    nothing_left(tmp_path)
    # nothing was read: it was known before
    others = [server for number, server in enumerate(cluster.servers) if number != victim]
    assert [item for server in others for item in server.requests("GET", "*/chunks/*") if item.range] == []


def test_one_replica_and_a_member_that_dies_in_the_middle_ends_with_six(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fill(replicas=1)
    victim = cluster.servers[2]
    # after the headers and leaf tables, wherever random ids have put them
    victim.add(Fault("reset", key="repo/chunks/*", methods=("GET",), skip=8))
    error = refused(kvctl(*cluster.args, *SOON), 6, "chunks/")
    assert error["details"]["missing_bytes"] > 0
    assert error["details"]["members"] == f"s3://bucket/repo at {victim.endpoint}"
    assert not (tmp_path / "out").exists()
    victim.clear()
    done = kvctl(*cluster.args)
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == cluster.files


def test_one_replica_and_a_member_that_dies_before_the_headers_ends_with_six(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fill(replicas=1)
    for server in cluster.servers:
        server.add(Fault("reset", key="repo/chunks/*", methods=("GET",)))
    refused(kvctl(*cluster.args, *SOON), 6, "no readable copy of chunk")
    assert not (tmp_path / "out").exists()


def test_a_member_that_comes_back_empty_is_no_hole_with_two_replicas(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fill(replicas=2)
    for place in [place for place in cluster.servers[0].objects if "/chunks/" in place[1]]:
        del cluster.servers[0].objects[place]
    done = kvctl(*cluster.args)
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == cluster.files


def test_a_damaged_replica_is_read_around_and_reported(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fill(replicas=2)
    server = cluster.servers[0]
    for (bucket, key), item in list(server.objects.items()):
        if "/chunks/" in key and len(item.data) > 1000:
            server.put(key, bytes([item.data[0] ^ 1]) + item.data[1:], bucket)
    done = kvctl(*cluster.args)
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == cluster.files
    assert done.document["notes"], "the damage is not mentioned"


def test_a_damaged_only_copy_is_seven_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    cluster.fill(replicas=1)
    server = cluster.servers[0]
    for (bucket, key), item in list(server.objects.items()):
        if "/chunks/" in key and len(item.data) > 10_000:
            server.put(key, item.data[:-1] + bytes([item.data[-1] ^ 1]), bucket)
    refused(kvctl(*cluster.args), 7, "chunks/")
    nothing_left(tmp_path)
