"""What breaks while weights come by RDMA: packets, a cable, a node, a link, a client's host, the storage host. Both
ends go on, or end clearly and in time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvctl.testing.models import LlamaShape, write_llama
from scripts.rdma_lab.guests import Done, Guests, Job
from scripts.rdma_lab.places import Lab
from tests.lab.fixtures import ROOT, Figure
from tests.lab.fleet import NODES, PATIENCE, STALL, STORAGE, Fleet, write_session

SHAPE = LlamaShape(layers=1, hidden=1024, heads=8, kv_heads=8, head_dim=128, inner=2816, vocab=4096)
# Slow enough that there is a middle, on any machine.
LOAD = "load-weights lab:m --verify full --max-rate 10MB"
# For loads that are to end: sooner than a load that is to go on may give up.
SOON = 8
NOT_FOUND = 4
TRANSIENT = 6
# From the fault to the end of a command that cannot go on: its own deadline, then what a busy machine adds.
LIMIT = 4 * STALL


@pytest.fixture(scope="module")
def fleet(lab: Lab, inside: dict[str, str]) -> Iterator[Fleet]:
    """Two clients; a repo with two copies of each chunk, the model `m` and the session alice/chat in it."""
    with Guests(lab, (STORAGE, "client", "other"), folder=str(ROOT), environment=inside) as guests:
        write_llama(str(guests.shared / "model"), SHAPE, shards=2, seed=9)
        write_session(guests.shared / "chat.safetensors")
        # a connection that rests does not notice that its client is gone: the node ends those that rest for long
        fleet = Fleet(guests, "--rdma", "require", "--rdma-opt", "idle=5")
        fleet.kvctl("repo init -r lab --replicas 2").wait(PATIENCE).check()
        fleet.kvctl("push-weights /lab/model m -r lab").wait(PATIENCE).check()
        fleet.kvctl("kv push bundle:/lab/chat.safetensors alice/chat -r lab --with-tokens").wait(PATIENCE).check()
        yield fleet


@pytest.fixture
def loading(fleet: Fleet) -> Callable[..., Job]:
    """`loading(into, guest=, stall=)`: a load that is under way, its first megabytes placed."""

    def start(into: str, *, guest: str = "client", stall: float = STALL) -> Job:
        return _under_way(fleet, f"{LOAD} --into {into} --stall-timeout {stall:g}s", guest)

    return start


def _under_way(fleet: Fleet, command: str, guest: str) -> Job:
    before = _placed(fleet)
    job = fleet.kvctl(f"-o json {command}", guest=guest)
    deadline = time.monotonic() + PATIENCE
    while _placed(fleet) < before + (4 << 20):
        assert job.code() is None, job.wait(1)
        assert time.monotonic() < deadline
    return job


def _placed(fleet: Fleet) -> int:
    found = fleet.metrics()
    return found["kvctl_node_rdma_sent_bytes_total"] + found["kvctl_node_rdma_received_bytes_total"]


def _arrived(fleet: Fleet, done: Done, folder: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.check())
    assert [item["name"] for item in report["transport"]] == ["native-rdma"]
    assert report["verified"]["state"] == "full"
    fleet.same("/lab/model", folder)
    return report


def _failed_clearly(done: Done) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(done.err.strip().splitlines()[-1])["error"]
    assert (done.code, error["exit_code"]) == (TRANSIENT, TRANSIENT)
    assert "10.9.2.1" in f"{error['what']} {error['cause']}", "which node"
    assert "Traceback" not in done.err
    return error


def _lose(fleet: Fleet, percent: float) -> None:
    for name in (STORAGE, "client"):
        fleet.guests[name].lose(percent)


def test_two_percent_loss_in_both_directions(fleet: Fleet, loading: Callable[..., Job], figure: Figure) -> None:
    job = loading("dir:/tmp/lossy")
    _lose(fleet, 2)
    done = job.wait(LIMIT)
    _lose(fleet, 0)
    report = _arrived(fleet, done, "/tmp/lossy")
    figure("load-weights, loss: seconds, retries", (report["seconds"], report["retries"]))


def test_a_push_over_a_link_that_loses(fleet: Fleet, figure: Figure) -> None:
    # other content: what is stored is not sent
    write_llama(str(fleet.guests.shared / "other"), SHAPE, shards=2, seed=10)
    job = _under_way(fleet, "push-weights /lab/other other -r lab --max-rate 20MB", "client")
    _lose(fleet, 2)
    done = job.wait(LIMIT)
    _lose(fleet, 0)
    report = json.loads(done.check())
    figure("push-weights, loss: seconds, retries", (report["seconds"], report["retries"]))
    fleet.report("load-weights lab:other --into dir:/tmp/other --verify full")
    fleet.same("/lab/other", "/tmp/other")


def test_a_cable_pulled_for_seconds(fleet: Fleet, loading: Callable[..., Job], figure: Figure) -> None:
    job = loading("dir:/tmp/cable")
    _lose(fleet, 100)
    time.sleep(2)  # the fault itself
    _lose(fleet, 0)
    report = _arrived(fleet, job.wait(LIMIT), "/tmp/cable")
    figure("load-weights, cable: seconds, retries", (report["seconds"], report["retries"]))


def test_a_node_killed_has_a_replica(fleet: Fleet, loading: Callable[..., Job], figure: Figure) -> None:
    job = loading("dir:/tmp/killed")
    fleet.jobs[1].kill()
    report = _arrived(fleet, job.wait(LIMIT), "/tmp/killed")
    figure("load-weights, node killed: seconds, retries", (report["seconds"], report["retries"]))
    fleet.jobs[1] = fleet.serve(1)
    fleet.jobs[1].wait_for('"port"', PATIENCE)


def test_a_pull_goes_on_when_a_node_is_killed(fleet: Fleet, figure: Figure) -> None:
    pull = "kv pull lab:alice/chat --into bundle:/tmp/chat.safetensors --max-rate 5MB"
    job = _under_way(fleet, pull, "client")
    fleet.jobs[2].kill()
    report = json.loads(job.wait(LIMIT).check())
    figure("kv pull, node killed: seconds, retries", (report["seconds"], report["retries"]))
    fleet.guests["client"].run("cmp /lab/chat.safetensors /tmp/chat.safetensors").check()
    fleet.jobs[2] = fleet.serve(2)
    fleet.jobs[2].wait_for('"port"', PATIENCE)


def test_a_link_that_stays_down_ends_the_load_and_not_the_nodes(
    fleet: Fleet, loading: Callable[..., Job], figure: Figure
) -> None:
    job = loading("none", stall=SOON)
    fleet.guests["client"].link(up=False)
    began = time.monotonic()
    done = job.wait(LIMIT)
    figure("load-weights, link down: seconds to the error", round(time.monotonic() - began, 1))
    _failed_clearly(done)
    fleet.kvctl(f"{LOAD} --into none", guest="other").wait(LIMIT).check()
    _up(fleet)
    fleet.kvctl(f"{LOAD} --into none").wait(LIMIT).check()


@pytest.fixture
def downed(fleet: Fleet) -> Iterator[Callable[[Job], float]]:
    """`downed(job)`: the client's link goes down under a command that is under way; seconds until it ended, with the
    error of a node that does not answer. Up again after the test, which may bring it `up` itself.
    """

    def down(job: Job) -> float:
        fleet.guests["client"].link(up=False)
        began = time.monotonic()
        _failed_clearly(job.wait(LIMIT))
        return round(time.monotonic() - began, 1)

    yield down
    _up(fleet)


def _up(fleet: Fleet) -> None:
    fleet.guests["client"].link(up=True)
    fleet.guests["client"].renew()


def _nodes_hold_nothing(fleet: Fleet) -> None:
    """No connection to a client, and all transfer memory free: 64 pieces each."""
    deadline = time.monotonic() + LIMIT
    while (found := fleet.metrics())["kvctl_node_rdma_connections"]:
        assert time.monotonic() < deadline, found
    assert found["kvctl_node_rdma_pool_free_pieces"] == NODES * 64


def test_a_link_that_stays_down_ends_a_pull_and_leaves_no_part_of_a_bundle(
    fleet: Fleet, downed: Callable[[Job], float], figure: Figure
) -> None:
    pull = "kv pull lab:alice/chat --into bundle:/tmp/cut.safetensors"
    seconds = downed(_under_way(fleet, f"{pull} --max-rate 5MB --stall-timeout {SOON}s", "client"))
    figure("kv pull, link down: seconds to the error", seconds)
    fleet.guests["client"].run("! ls /tmp/cut.safetensors*").check()
    _nodes_hold_nothing(fleet)
    fleet.report(pull, guest="other")
    _up(fleet)
    report = fleet.report(pull)
    assert [item["name"] for item in report["transport"]] == ["native-rdma"]
    for guest in ("client", "other"):
        fleet.guests[guest].run("cmp /lab/chat.safetensors /tmp/cut.safetensors").check()


def test_a_link_that_stays_down_ends_a_push_and_the_session_is_not_there_before_it_is_whole(
    fleet: Fleet, downed: Callable[[Job], float], figure: Figure
) -> None:
    write_session(fleet.guests.shared / "bob.safetensors", seed=6)
    push = "kv push bundle:/lab/bob.safetensors bob/chat -r lab --with-tokens"
    seconds = downed(_under_way(fleet, f"{push} --max-rate 5MB --stall-timeout {SOON}s", "client"))
    figure("kv push, link down: seconds to the error", seconds)
    _nodes_hold_nothing(fleet)
    assert fleet.kvctl("kv ls bob/chat -r lab", guest="other").wait(PATIENCE).code == NOT_FOUND
    _up(fleet)
    report = fleet.report(push)
    figure("kv push, after the link came back: bytes written", report["written"])
    fleet.report("kv pull lab:bob/chat --into bundle:/tmp/bob.safetensors", guest="other")
    fleet.guests["other"].run("cmp /lab/bob.safetensors /tmp/bob.safetensors").check()


def test_a_client_host_killed_leaves_nothing_behind(fleet: Fleet, loading: Callable[..., Job], figure: Figure) -> None:
    loading("none")
    fleet.guests["client"].kill()
    fleet.kvctl(f"{LOAD} --into none", guest="other").wait(LIMIT).check()
    deadline = time.monotonic() + LIMIT
    while (found := fleet.metrics())["kvctl_node_rdma_connections"]:
        assert time.monotonic() < deadline, found
    figure("client host killed: connections that the nodes ended", found["kvctl_node_rdma_connections_dropped_total"])


def test_the_storage_host_killed_ends_the_load(fleet: Fleet, loading: Callable[..., Job], figure: Figure) -> None:
    job = loading("dir:/tmp/dead", guest="other", stall=SOON)
    fleet.guests[STORAGE].kill()
    began = time.monotonic()
    done = job.wait(LIMIT)
    figure("load-weights, storage host killed: seconds to the error", round(time.monotonic() - began, 1))
    _failed_clearly(done)
    # what is not whole is not there
    fleet.guests["other"].run("! test -e /tmp/dead").check()
