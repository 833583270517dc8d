"""NIXL's UCX back end over verbs, through nixl-ucx: the memory of a process in one guest, read by one in another."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from scripts.rdma_lab.guests import Guests, Job
from scripts.rdma_lab.places import Lab
from tests.lab.fixtures import ROOT, Figure

SIZE = 64 << 20
PORT = 7790
# Verbs only, copies never; a peer that is gone is given up after seconds instead of half a minute.
UCX = {
    "UCX_TLS": "rc_v,self",
    "UCX_NET_DEVICES": "rxe0:1",
    "UCX_ZCOPY_THRESH": "0",
    "UCX_RC_TIMEOUT": "500ms",
    "UCX_RC_RETRY_COUNT": "7",
    "UCX_UD_TIMEOUT": "5s",
    "UCX_KEEPALIVE_INTERVAL": "2s",
}


def _bundled(shared: Path) -> dict[str, str]:
    """NIXL's wheel brings a libibverbs of another name and no drivers. The system's driver for Soft-RoCE wants
    libibverbs.so.1: under that name it finds the wheel's own, which is loaded once, being the same file.
    """
    found = importlib.util.find_spec("nixl_cu12")
    if found is None or found.origin is None:
        pytest.skip("needs NIXL: pip install --no-deps nixl-cu12==1.5.1")
    (library,) = glob(f"{Path(found.origin).parents[1]}/nixl_cu12.libs/libibverbs-*.so*")
    (driver,) = glob("/usr/lib/*/libibverbs/librxe-rdmav*.so")
    (shared / "verbs").mkdir()
    (shared / "verbs/libibverbs.so.1").symlink_to(library)
    return {"LD_LIBRARY_PATH": "/lab/verbs", "IBV_DRIVERS": driver.partition("-rdmav")[0]}


@pytest.fixture(scope="module")
def nixl(lab: Lab, inside: dict[str, str]) -> Iterator[tuple[Guests, dict[str, str]]]:
    """A source in guest a. The last test kills it."""
    with Guests(lab, ("a", "b"), folder=str(ROOT), environment=inside) as guests:
        yield guests, _serve(guests)


def _serve(guests: Guests) -> dict[str, str]:
    environment = {**UCX, **_bundled(guests.shared)}
    (guests.shared / "key").write_text("0123456789abcdef0123456789abcdef")
    for guest in guests:
        # the wheel's library reads the system's list of drivers too, which are of another version
        guest.run("mkdir -p /etc/libibverbs.d && rm -f /etc/libibverbs.d/*").check()
    serving = guests["a"].start(f"python -m tests.lab.nixl_peer source {PORT} /lab/key {SIZE}", environment)
    serving.wait_for("ucx://", 240)
    return environment


def _sink(nixl: tuple[Guests, dict[str, str]], more: str = "") -> Job:
    guests, environment = nixl
    url = f"ucx://{guests['a'].address}:{PORT}"
    return guests["b"].start(f"python -m tests.lab.nixl_peer sink {url} /lab/key {SIZE} {more}", environment)


def _said(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(job.wait(240).check())
    return found


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_memory_of_another_host_comes_by_verbs(nixl: tuple[Guests, dict[str, str]], mode: str, figure: Figure) -> None:
    found = _said(_sink(nixl, f"--mode {mode}"))
    figure(f"nixl-ucx {mode}, {SIZE} bytes", found["counters"])
    assert (found["error"], found["same"]) == (None, True)
    assert found["counters"]["rcvd_pkts"] >= SIZE // 4096


def test_a_source_whose_host_is_killed_ends_the_read(nixl: tuple[Guests, dict[str, str]], figure: Figure) -> None:
    guests, _ = nixl
    before = guests["b"].counters()["rcvd_pkts"]
    job = _sink(nixl, "--rounds 1000000")
    deadline = time.monotonic() + 240
    while guests["b"].counters()["rcvd_pkts"] < before + 2 * SIZE // 4096:
        assert job.code() is None, job.wait(1)
        assert time.monotonic() < deadline
    guests["a"].kill()
    began = time.monotonic()
    found = _said(job)
    figure("nixl-ucx, host of the source killed: seconds to the error", round(time.monotonic() - began, 1))
    assert found["error"] is not None
