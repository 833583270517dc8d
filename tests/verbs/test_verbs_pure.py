"""The parts of kvctl_verbs that need no RDMA: tokens, who may connect, answers, bindings, the probe's words."""

from __future__ import annotations

import ctypes
import enum
import ipaddress
import os
import subprocess
import sys
import threading
import time
import types
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.errors import (
    IncompatibleError,
    KvctlError,
    MemberDownError,
    SizeMismatchError,
    UsageError,
    VersionChangedError,
)
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Op
from kvctl.transports.registry import open_store, transport_specs
from kvctl.transports.registry import probe as probe_spec
from kvctl.transports.wire import Head
from kvctl_verbs import bindings, cm, sysfs
from kvctl_verbs.answers import check_empty, check_placed
from kvctl_verbs.engine import parse_options, step_of
from kvctl_verbs.policy import allowed
from kvctl_verbs.pool import Pool
from kvctl_verbs.probe import probe
from kvctl_verbs.rails import Balance, local_addresses
from kvctl_verbs.regions import pieces
from kvctl_verbs.talk import serves
from kvctl_verbs.token import RcToken, parse_token

ADDRESSES = st.ip_addresses().map(str)


@given(ADDRESSES, st.integers(1, 65535), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1), st.data())
def test_a_token_survives_the_way_through_a_header(
    ip: str, port: int, address: int, rkey: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, min((1 << 32) - 1, (1 << 64) - address)))
    token = RcToken(ip, port, address, size, rkey)
    assert parse_token(token.text()) == token
    assert "rkey" not in repr(token)
    assert "\r" not in token.text()


def test_the_public_form() -> None:
    token = RcToken("10.1.2.3", 18515, 0x7F00_0000_1000, 1 << 20, 0xABCD)
    assert token.text() == "10.1.2.3:18515:0x00007f0000001000:0x00100000:0x0000abcd"
    assert parse_token("10.1.2.3:18515:0x7f0000001000:0x100000:0xABCD") == token
    assert RcToken("fe80::1", 1, 0, 0, 0).text().startswith("[fe80::1]:1:0x")


@given(st.text(max_size=200))
def test_what_is_no_token_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises((UsageError, IncompatibleError)) as caught:
        parse_token(f"{text}:")
    assert len(text) < 12 or text not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("host:1:0x0:0x1:0x2", UsageError),
        ("10.0.0.1:0:0x0:0x1:0x2", UsageError),
        ("10.0.0.1:70000:0x0:0x1:0x2", UsageError),
        ("10.0.0.1:1:0xffffffffffffffff:0x2:0x2", UsageError),
        ("10.0.0.1:1:0x0:0x100000000:0x2", IncompatibleError),
        ("0107b2f5:0000:dc", IncompatibleError),
        ("", IncompatibleError),
        (f"{'1' * 200}:1:0x0:0x1:0x2", IncompatibleError),
    ],
)
def test_tokens_that_make_no_sense(text: str, kind: type[KvctlError]) -> None:
    with pytest.raises(kind):
        parse_token(text)


def test_the_node_connects_to_its_peer_or_an_allowed_network_only() -> None:
    networks = [ipaddress.ip_network("10.2.0.0/16"), ipaddress.ip_network("fd00::/8")]
    assert allowed("10.1.0.5", ["10.1.0.5"], [])
    assert allowed("10.1.0.5", ["::ffff:10.1.0.5"], [])
    assert allowed("fd00::1", [], networks)
    assert allowed("10.2.3.4", ["10.1.0.5"], networks)
    assert not allowed("10.1.0.6", ["10.1.0.5"], networks)
    assert not allowed("127.0.0.1", ["10.1.0.5"], networks)
    assert not allowed("10.1.0.5", [""], [])
    assert not allowed("gateway", ["gateway"], networks)


def head(status: int = 206, body: bytes = b"", **headers: str) -> Head:
    found = {"content-range": "bytes 10-19/100", "etag": '"v1"', "content-length": "0"}
    found |= {name.replace("_", "-"): value for name, value in headers.items()}
    return Head(status, {name: [value] for name, value in found.items() if value}, body)


def test_an_answer_counts_when_it_says_what_was_asked_for() -> None:
    buffer = HostBuffer(4096)
    op = Op(1, "read", "k", 10, 10, buffer, 0, "v1", 100)
    check_placed("n", op, head())
    check_empty("n", head())
    for wrong, kind in (
        (head(etag='"v2"'), VersionChangedError),
        (head(etag=""), VersionChangedError),
        (head(200), IncompatibleError),
        (head(content_range=""), IncompatibleError),
        (head(content_range="bytes 10-18/100"), SizeMismatchError),
        (head(content_range="bytes 9-18/100"), SizeMismatchError),
        (head(content_range="bytes 10-19/101"), SizeMismatchError),
        (head(content_range="bytes 10-14/15"), SizeMismatchError),
    ):
        with pytest.raises(kind):
            check_placed("n", op, wrong)
    for body in (head(content_length="10"), head(transfer_encoding="chunked"), head(body=b"x")):
        with pytest.raises(IncompatibleError, match="a body came"):
            check_empty("n", body)
    buffer.close()


def test_constants_of_both_generations_of_pyverbs() -> None:
    flat = types.ModuleType("pyverbs.enums")
    flat.__dict__.update(IBV_QPT_RC=2, IBV_WC_SUCCESS=0, other=5)
    classes = types.ModuleType("pyverbs.libibverbs_enums")
    classes.__dict__.update(
        ibv_qp_type=enum.IntEnum("ibv_qp_type", {"IBV_QPT_RC": 2}),
        ibv_access_flags=enum.IntFlag("ibv_access_flags", {"IBV_ACCESS_LOCAL_WRITE": 1}),
        ibv_wc_status=enum.IntEnum("ibv_wc_status", {"IBV_WC_SUCCESS": 0}),
    )
    assert bindings.constants(flat) == {"IBV_QPT_RC": 2, "IBV_WC_SUCCESS": 0}
    assert bindings.constants(classes) == {"IBV_QPT_RC": 2, "IBV_ACCESS_LOCAL_WRITE": 1, "IBV_WC_SUCCESS": 0}


def test_structures_are_laid_out_as_the_libraries_have_them() -> None:
    # sizes and offsets of rdma-core's headers on 64-bit Linux
    assert ctypes.sizeof(cm.AddressHandle) == 32
    assert cm.QpAttributes.ah_attr.offset == 56
    assert cm.QpAttributes.pkey_index.offset == 120
    assert cm.QpAttributes.timeout.offset == 130
    assert ctypes.sizeof(cm.QpAttributes) == 144


def device(root: Path, name: str, state: str, *gids: str) -> None:
    port = root / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text(f"4: {state}\n")
    (port / "link_layer").write_text("Ethernet\n")
    for number, gid in enumerate(gids):
        (port / "gids" / str(number)).write_text(f"{gid}\n")


EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
GID = "0000:0000:0000:0000:0000:ffff:0a09:0001"
LINK = "fe80:0000:0000:0000:5054:00ff:fe00:0001"


def test_the_probe_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    nodes = str(tmp_path / "nodes")
    found = probe(str(tmp_path), nodes)
    assert (found.available, found.reason) == (False, "no RDMA device")
    assert "rdma_rxe" in found.hint
    device(tmp_path, "rxe0", "DOWN", GID)
    device(tmp_path, "rxe1", "ACTIVE", EMPTY)
    found = probe(str(tmp_path), nodes)
    assert found.reason == "no active RDMA port with a GID: rxe0/1 is DOWN, rxe1/1 is ACTIVE"
    assert "ip addr" in found.hint
    device(tmp_path, "rxe2", "ACTIVE", EMPTY, GID)
    assert [port.usable for port in sysfs.ports(str(tmp_path))] == [False, False, True]
    assert sysfs.ports(str(tmp_path))[2].gid == GID
    device(tmp_path, "rxe3", "ACTIVE", EMPTY, LINK, GID)
    device(tmp_path, "rxe4", "ACTIVE", EMPTY, LINK)
    assert [(port.gid, port.gid_index) for port in sysfs.ports(str(tmp_path))[3:]] == [(GID, 2), (LINK, 1)]
    found = probe(str(tmp_path), nodes)
    assert "rdma_cm is missing" in found.reason
    assert "rdma_ucm" in found.hint
    os.mkdir(nodes)
    Path(nodes, "rdma_cm").touch()
    assert "uverbs0 is missing" in probe(str(tmp_path), nodes).reason


def test_a_limit_of_locked_memory_counts_for_who_is_bound_by_it(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from kvctl_verbs.probe import locked_limit\n"
        "print(*(locked_limit(path) for path in sys.argv[1:]))"
    )
    bound, free = tmp_path / "bound", tmp_path / "free"
    bound.write_text("Name:\tx\nCapEff:\t00000000a80425fb\n")
    free.write_text("Name:\tx\nCapEff:\t000001ffffffffff\n")
    said = subprocess.run(
        [sys.executable, "-c", code, str(bound), str(free), str(tmp_path / "none")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said.split() == ["65536", "None", "65536"]


def test_without_pyverbs_the_hint_names_the_packages(tmp_path: Path) -> None:
    device(tmp_path, "rxe2", "ACTIVE", GID)
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    for name in ("rdma_cm", "uverbs0"):
        (nodes / name).touch()
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pyverbs': raise ModuleNotFoundError('no', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from kvctl_verbs import cm; cm.load = lambda: None\n"
        "from kvctl_verbs.probe import probe\n"
        f"found = probe({str(tmp_path)!r}, {str(nodes)!r})\n"
        "print(found.available, found.reason, '|', found.hint)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("False pyverbs is not installed |")
    assert "python3-pyverbs" in said
    assert "kvctl[verbs]" in said


def test_the_spec_loads_neither_pyverbs_nor_librdmacm() -> None:
    code = (
        "import sys\nfrom kvctl.transports.registry import transport_specs, probe\n"
        "spec = transport_specs()['native-rdma']\nassert spec.rank == 30\n"
        "assert not [name for name in sys.modules if name.startswith(('pyverbs', 'kvctl_verbs.cm'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_node_says_whether_it_has_rdma(tmp_path: Path) -> None:
    with NodeProcess.start(str(tmp_path), "--rdma", "off") as node:
        config = node.store()
        with closing(open_store(config)) as store:
            assert serves(config, store) == f"the node at http://{node.address} has no RDMA"
            node.kill()
            with pytest.raises(MemberDownError):
                serves(config, store)


@pytest.mark.skipif(bool(sysfs.ports()), reason="this host has an RDMA device: the lab's tests cover it")
def test_where_there_is_no_device_the_probe_says_so() -> None:
    found = probe_spec(transport_specs()["native-rdma"])
    assert (found.available, found.reason) == (False, "no RDMA device")


@given(st.integers(0, 10_000), st.integers(1, 500), st.integers(0, 200))
def test_registrations_cover_a_buffer_and_overlap(nbytes: int, piece: int, overlap: int) -> None:
    found = pieces(nbytes, piece, overlap)
    assert sum(length for _, length in found) >= nbytes
    assert all(length <= piece + overlap for _, length in found)
    for start in range(0, nbytes, 97):
        length = min(overlap, nbytes - start)
        assert any(first <= start and start + length <= first + size for first, size in found)


def test_rails_are_taken_by_outstanding_bytes_and_failed_ones_last() -> None:
    balance = Balance(2)
    with balance.take(100) as first, balance.take(10) as second, balance.take(10) as third:
        assert first != second
        assert third == second, "less is outstanding there"
    assert second is not None
    balance.failed(second)
    with balance.take(1) as one, balance.take(1) as other:
        assert one == other == first
    balance.worked(second)
    with balance.take(1) as one, balance.take(1) as other:
        assert {one, other} == {0, 1}
    chosen = balance.choose(1)
    assert chosen is not None
    balance.over(chosen, 1, worked=False)
    assert [balance.choose(0), balance.choose(0)] == [1 - chosen] * 2
    balance.over(chosen, 0)
    assert balance.choose(0) == 1 - chosen, "that it ended says nothing of the rail"
    balance.over(chosen, 0, worked=True)
    assert {balance.choose(0), balance.choose(0)} == {0, 1}
    balance.refuse(0)
    with balance.take(1) as one:
        assert one == 1
    balance.refuse(1)
    with balance.take(1) as one:
        assert one is None


def test_who_waits_for_transfer_memory_is_served_before_who_has_some_already() -> None:
    pool = Pool(2, 4096)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    assert pool.take() is None
    got: list[int | None] = []
    waiting = threading.Thread(target=lambda: got.append(pool.take(30.0)))
    waiting.start()
    while not pool.waiting:
        time.sleep(0.001)
    pool.give(first)
    assert pool.take() is None, "it is the waiting one's"
    waiting.join()
    assert got == [first]
    assert pool.take(0.01) is None
    pool.give(second)
    assert pool.take() == second
    pool.view(second, 10)[:] = b"0123456789"
    assert ctypes.string_at(pool.address(second), 10) == b"0123456789"
    pool.close()


@pytest.mark.parametrize(
    ("length", "step"),
    [(1, 1 << 16), (1 << 16, 1 << 16), (1 << 20, 1 << 18), ((1 << 20) + 1, (1 << 18) + 4096), (1 << 30, 1 << 20)],
)
def test_requests_of_few_pieces_are_cut_finer_where_no_other_overlaps_with_them(length: int, step: int) -> None:
    assert step_of(length, 1 << 20, alone=True) == step
    assert step_of(length, 4096, alone=True) == 4096
    assert step_of(length, 1 << 20, alone=False) == 1 << 20


def test_options_of_the_engine() -> None:
    found = parse_options({"piece": "65536", "pool": "1048576", "timeout": "14", "flush": "false"})
    assert (found.pool, found.piece, found.flush, found.connections.patience.timeout) == (1 << 20, 1 << 16, False, 14)
    for wrong in ({"what": "1"}, {"pool": "1048576"}, {"flush": "maybe"}, {"piece": "x"}):
        with pytest.raises(UsageError):
            parse_options(wrong)


def test_local_addresses_are_this_hosts_without_loopback() -> None:
    found = local_addresses()
    assert not [ip for ip in found if ipaddress.ip_address(ip).is_loopback]
    assert len(found) == len(set(found))
    assert all(ipaddress.ip_address(ip) for ip in found)
    assert os.path.exists("/proc/net")
