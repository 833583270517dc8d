"""Large requests, many at once, and ends that die: native-rdma and our node, in one guest of the lab.
tests/verbs/test_verbs_in_guests.py runs this file there.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.core.errors import MemberDownError
from kvctl.memory.buffers import HostBuffer
from kvctl.memory.files import FileBuffer
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Completion, Op, Status, Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_verbs import opening
from kvctl_verbs.regions import Region
from kvctl_verbs.token import RcToken
from kvctl_verbs.transport import RdmaTransport
from tests.node.rawhttp import Key, Raw

IP = os.environ["LAB_ADDRESS"]
MIB = 1 << 20
SIZE = 24 * MIB + 777
RDMA = ("--rdma", "require", "--rdma-allow", f"{IP}/32", "--rdma-opt", "pool=8388608", "--rdma-opt", "stall=5")
DATA = random.Random(5).randbytes(SIZE)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess.start(str(tmp_path), *RDMA) as running:
        (Path(running.data) / "big").write_bytes(DATA)
        yield running


@pytest.fixture
def connect() -> Iterator[Callable[..., Transport]]:
    made: list[Transport] = []

    def start(node: NodeProcess, timeout: str = "30", **options: str) -> Transport:
        config = node.store(options={"timeout": timeout})
        transport = open_transports(config, open_store(config), choose("node", "host", "native-rdma"), options)[0]
        made.append(transport)
        return transport

    yield start
    for transport in made:
        transport.close()


def drain(transport: Transport, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while len(found) < count:
        more = transport.poll(60)
        assert more, f"{len(found)} of {count} ended"
        found.update({item.id: item for item in more})
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_large_requests_are_moved_in_pieces_and_many_at_once(
    node: NodeProcess, connect: Callable[..., Transport]
) -> None:
    """One request of 24 MiB takes eight pieces of 1 MiB in flight; sixteen at once share a pool of eight."""
    transport = connect(node, threads="16")
    buffer = HostBuffer(SIZE)
    registration = transport.register(buffer)
    transport.submit([Op(1, "read", "big", 0, SIZE, buffer, 0, None, SIZE)])
    assert drain(transport, 1)[1].status is Status.DONE
    assert buffer.view == DATA
    transport.submit([Op(1, "write", "copy", 0, SIZE, buffer, 0, object_size=SIZE)])
    assert drain(transport, 1)[1].status is Status.DONE
    assert (Path(node.data) / "copy").read_bytes() == DATA
    buffer.view[:] = bytes(SIZE)
    step = 700_001
    ops = [Op(at, "read", "big", at, min(step, SIZE - at), buffer, at, None, SIZE) for at in range(0, SIZE, step)]
    random.Random(1).shuffle(ops)
    transport.submit(ops)
    assert {item.status for item in drain(transport, len(ops)).values()} == {Status.DONE}
    assert buffer.view == DATA
    registration.close()
    found = node.metrics()
    assert found["kvctl_node_rdma_sent_bytes_total"] == 2 * SIZE
    assert found["kvctl_node_rdma_received_bytes_total"] == SIZE
    assert found["kvctl_node_sent_bytes_total"] == found["kvctl_node_received_bytes_total"] == 0
    assert found["kvctl_node_rdma_pool_free_pieces"] == 8
    assert 0 < found["kvctl_node_rdma_connections"] <= 16
    buffer.close()


def test_what_no_token_can_name_goes_in_several_requests_or_in_a_body(
    node: NodeProcess, connect: Callable[..., Transport]
) -> None:
    """Tokens name less than 4 GiB; here, by a smaller limit."""
    transport = connect(node)
    assert isinstance(transport, RdmaTransport)
    transport._settings = replace(transport._settings, most=5 * MIB)
    buffer = HostBuffer(SIZE)
    transport.submit([Op(1, "read", "big", 0, SIZE, buffer, 0, None, SIZE)])
    done = drain(transport, 1)[1]
    assert (done.status, done.requests) == (Status.DONE, 5)
    assert buffer.view == DATA
    transport.submit([Op(1, "write", "copy", 0, SIZE, buffer, 0, object_size=SIZE)])
    assert drain(transport, 1)[1].status is Status.DONE
    assert (Path(node.data) / "copy").read_bytes() == DATA
    found = node.metrics()
    assert found["kvctl_node_rdma_sent_bytes_total"] == SIZE
    assert found["kvctl_node_received_bytes_total"] == SIZE


def test_who_is_not_the_endpoint_is_turned_away_and_the_error_says_how_to_let_it_in(
    node: NodeProcess, connect: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "addresses_of", lambda host: ("192.0.2.1",))
    buffer = HostBuffer(MIB)
    strict = connect(node)
    strict.submit([Op(1, "read", "big", 0, MIB, buffer)])
    done = drain(strict, 1)[1]
    assert isinstance(done.error, MemberDownError)
    assert "cannot reach this host's memory" in str(done.error)
    assert f"peers={IP}" in (done.error.hint or "")
    assert buffer.view == bytes(MIB)
    told = connect(node, peers=f"{IP}/32")
    told.submit([Op(1, "read", "big", 0, MIB, buffer)])
    assert drain(told, 1)[1].status is Status.DONE


def test_the_pages_of_a_file_are_a_destination_too(
    node: NodeProcess, connect: Callable[..., Transport], tmp_path: Path
) -> None:
    transport = connect(node)
    buffer = FileBuffer(str(tmp_path / "copy"), SIZE)
    ops = [Op(at, "read", "big", at, min(8 * MIB, SIZE - at), buffer, at, None, SIZE) for at in range(0, SIZE, 8 * MIB)]
    transport.submit(ops)
    assert {item.status for item in drain(transport, len(ops)).values()} == {Status.DONE}
    buffer.close()
    assert (tmp_path / "copy").read_bytes() == DATA


def test_a_client_that_dies_costs_the_node_nothing(node: NodeProcess, connect: Callable[..., Transport]) -> None:
    code = (
        "import sys\nfrom kvctl.core.addresses import StoreConfig\nfrom kvctl.memory.buffers import HostBuffer\n"
        "from kvctl.transports.api import Op\n"
        "from kvctl.transports.registry import choose, open_store, open_transports\n"
        "config = StoreConfig(sys.argv[1], (), {'key_file': sys.argv[2]})\n"
        "[one] = open_transports(config, open_store(config), choose('node', 'host', 'native-rdma'))\n"
        f"buffer = HostBuffer({SIZE})\nkept = one.register(buffer)\nprint('ready', flush=True)\n"
        f"one.submit([Op(n, 'read', 'big', 0, {SIZE}, buffer, 0, None, {SIZE}) for n in range(1000)])\n"
        "while True:\n    one.poll(None)\n"
    )
    config = node.store()
    client = subprocess.Popen(
        [sys.executable, "-c", code, config.url, config.options["key_file"]], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    until(lambda: node.metrics()["kvctl_node_rdma_sent_bytes_total"] > 0, "nothing was moved")
    client.kill()
    client.communicate()
    until(lambda: node.metrics()["kvctl_node_rdma_connections"] == 0, "connections of a dead client are kept")
    assert node.metrics()["kvctl_node_rdma_pool_free_pieces"] == 8
    transport = connect(node)
    buffer = HostBuffer(MIB)
    transport.submit([Op(1, "read", "big", 0, MIB, buffer)])
    assert drain(transport, 1)[1].status is Status.DONE
    assert buffer.view == DATA[:MIB]


def test_a_node_that_dies_is_an_error_and_one_that_comes_back_is_used(
    node: NodeProcess, connect: Callable[..., Transport]
) -> None:
    transport = connect(node, timeout="600")  # which nobody waits for
    buffer = HostBuffer(SIZE)
    registration = transport.register(buffer)
    transport.submit([Op(number, "read", "big", 0, SIZE, buffer, 0, None, SIZE) for number in range(4)])
    until(lambda: node.metrics()["kvctl_node_rdma_connections"] > 0, "no transfer began")
    node.kill()
    found = drain(transport, 4)
    lost = [item for item in found.values() if item.status is Status.FAILED]
    assert lost
    assert all(isinstance(item.error, MemberDownError) for item in lost)
    buffer.view[:] = bytes(SIZE)
    with NodeProcess.start(node.folder, *RDMA, port=node.port):
        assert buffer.view == bytes(SIZE), "nothing came in after the operations had ended"
        transport.submit([Op(1, "read", "big", 0, SIZE, buffer, 0, None, SIZE)])
        assert drain(transport, 1)[1].status is Status.DONE
        assert buffer.view == DATA
    registration.close()


def test_a_node_that_hangs_is_given_up_and_finds_no_way_in_later(
    node: NodeProcess, connect: Callable[..., Transport]
) -> None:
    transport = connect(node, timeout="2")
    buffer = HostBuffer(4 * MIB)
    registration = transport.register(buffer)
    first = Op(1, "read", "big", 0, 4 * MIB, buffer, 0, None, SIZE)
    transport.submit([first])
    assert drain(transport, 1)[1].status is Status.DONE
    node.stop()
    transport.submit([first])
    done = drain(transport, 1)[1]
    assert (done.status, type(done.error)) == (Status.FAILED, MemberDownError)
    buffer.view[:] = bytes(4 * MIB)
    failed = node_failures(node)
    until(lambda: node_failures(node) > failed or answered(node) >= 2, "the node never took the request up")
    assert buffer.view == bytes(4 * MIB)
    transport.submit([first])
    assert drain(transport, 1)[1].status is Status.DONE
    registration.close()


def node_failures(node: NodeProcess) -> float:
    node.resume()
    return node.metrics()["kvctl_node_rdma_failures_total"] + node.metrics()["kvctl_node_rdma_connections_failed_total"]


def answered(node: NodeProcess) -> float:
    return sum(
        value for name, value in node.metrics().items() if name.startswith('kvctl_node_requests_total{method="GET"')
    )


def test_cancelling_in_full_flight_ends_each_operation_once(
    node: NodeProcess, connect: Callable[..., Transport]
) -> None:
    transport = connect(node, threads="4")
    buffer = HostBuffer(SIZE)
    registration = transport.register(buffer)
    for _ in range(3):
        transport.submit([Op(number, "read", "big", 0, SIZE, buffer, 0, None, SIZE) for number in range(8)])
        until(lambda: node.metrics()["kvctl_node_rdma_connections"] > 0, "no transfer began")
        transport.cancel(range(8))
        found = drain(transport, 8)
        assert {item.status for item in found.values()} <= {Status.CANCELLED, Status.DONE}
        buffer.view[:] = bytes(SIZE)
        time.sleep(0.2)
        assert buffer.view == bytes(SIZE), "a cancelled operation still wrote"
    transport.submit([Op(1, "read", "big", 0, SIZE, buffer, 0, None, SIZE)])
    done = drain(transport, 1)[1]
    assert (done.status, done.error) == (Status.DONE, None)
    assert buffer.view == DATA
    until(lambda: node.metrics()["kvctl_node_rdma_pool_free_pieces"] == 8, "pieces are lost")
    registration.close()


def test_loads_leave_nothing_behind(node: NodeProcess) -> None:
    """Loads and pushes with cancels in between: descriptors, queue pairs and registrations are what they were."""
    rng = random.Random(2)
    config = node.store()
    before = resources()
    files: list[int] = []
    with closing(open_store(config)) as store:
        for _ in range(8):
            transport = open_transports(config, store, choose("node", "host", "native-rdma"), {"threads": "6"})[0]
            buffer = HostBuffer(8 * MIB)
            registration = transport.register(buffer)
            step = 700_001
            ops = [
                Op(at, "read", "big", at, min(step, 8 * MIB - at), buffer, at, None, SIZE)
                for at in range(0, 8 * MIB, step)
            ]
            ops += [Op(-1 - n, "write", f"w{n}", 0, MIB, buffer, 0, object_size=MIB) for n in range(3)]
            for cancelled in ([], rng.sample(ops, 3)):
                transport.submit(ops)
                transport.cancel([op.id for op in cancelled])
                found = drain(transport, len(ops)).values()
                assert {item.status for item in found} <= {Status.DONE, Status.CANCELLED}
                if not cancelled:
                    assert buffer.view == DATA[: 8 * MIB]
            registration.close()
            transport.close()
            buffer.close()
            files.append(len(os.listdir("/proc/self/fd")))
    assert max(files[2:]) <= files[1], files
    until(lambda: node.metrics()["kvctl_node_rdma_connections"] == 0, "connections of clients that ended are kept")
    until(lambda: resources()["qp"] <= before["qp"], f"queue pairs are left: {resources()}")
    assert resources()["mr"] <= before["mr"] + 1, "the node's transfer memory"
    assert node.metrics()["kvctl_node_rdma_failures_total"] == 0


def resources() -> dict[str, int]:
    """What of the kernel's RDMA is in use in this guest."""
    said = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True).stdout.split()
    return {name: int(count) for name, count in zip(said[2::2], said[3::2], strict=False)}


def test_a_registration_that_ended_lets_nobody_in(node: NodeProcess, connect: Callable[..., Transport]) -> None:
    """A token from before, at a listener that is still there: the device refuses its rkey."""
    transport = connect(node)
    assert isinstance(transport, RdmaTransport)
    buffer = HostBuffer(MIB)
    registration = transport.register(buffer)
    assert isinstance(registration, Region)
    [[memory]] = registration.memories.values()
    port = transport._landings[0].listen()
    token = RcToken(IP, port.number, buffer.address, 4096, memory.rkey).text()
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    with Raw((node.host, node.port), key) as raw:
        assert raw.ask("GET", "/v1/big", x_scal_rdma=token, range="bytes=0-4095").status == 206
        assert buffer.view[:4096] == DATA[:4096]
        buffer.view[:4096] = bytes(4096)
        registration.close()
        assert raw.ask("GET", "/v1/big", x_scal_rdma=token, range="bytes=0-4095").status == 400
    assert buffer.view == bytes(MIB)


def test_neither_end_tells_a_token(tmp_path: Path) -> None:
    with NodeProcess.start(str(tmp_path), *RDMA, verbose=True) as node:
        shape = LlamaShape(layers=1, hidden=256, heads=4, kv_heads=4, head_dim=64, inner=512, vocab=512)
        write_llama(f"{node.data}/m", shape, shards=1, seed=1)
        config = node.store()
        url = f"{config.url}/m?key_file={config.options['key_file']}"
        command = [sys.executable, "-m", "kvctl", "-v", "load-weights", url, "--transport", "native-rdma"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        assert "(x-scal-rdma)" in said.stderr, "the requests are told"
        assert node.metrics()["kvctl_node_rdma_sent_bytes_total"] > 0
        assert not re.search(r"0x[0-9a-f]{8}", said.stderr + said.stdout + node.log())
