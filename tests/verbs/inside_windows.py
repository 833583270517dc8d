"""native-rdma with memory=window, in one guest of the lab: what a window lets in, and for how long.
tests/verbs/test_verbs_in_guests.py runs this file there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvctl.core.errors import EnvError
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Op, Status, Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_verbs.device import Device
from kvctl_verbs.landing import Landing
from kvctl_verbs.regions import Region
from kvctl_verbs.token import RcToken
from kvctl_verbs.transport import RdmaTransport
from kvctl_verbs.windows import Window
from tests.node.rawhttp import Key, Raw
from tests.verbs.inside_faults import drain, resources, until

IP = os.environ["LAB_ADDRESS"]
MIB = 1 << 20
DATA = random.Random(6).randbytes(MIB)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("node")
    with NodeProcess.start(str(folder), "--rdma", "require", "--rdma-allow", "10.9.0.0/16") as running:
        (Path(running.data) / "k").write_bytes(DATA)
        yield running


@pytest.fixture
def open_one(node: NodeProcess) -> Iterator[Callable[..., RdmaTransport]]:
    with ExitStack() as stack:

        def start(**options: str) -> RdmaTransport:
            config = node.store()
            store = open_store(config)
            stack.callback(store.close)
            made: Transport = open_transports(config, store, choose("node", "host", "native-rdma"), options)[0]
            stack.callback(made.close)
            assert isinstance(made, RdmaTransport)
            return made

        yield start


class Attempts:
    """Requests of a stranger's making to the node, with tokens that name any key."""

    def __init__(self, node: NodeProcess, landing: Landing) -> None:
        self._node = node
        self._landing = landing
        self._key = Key.derived((Path(node.folder) / "master.key").read_text())

    def _ask(self, target: str, address: int, length: int, rkey: int, **headers: str) -> int:
        # a listener for each: after an error the node lets go of a connection
        port = self._landing.listen()
        token = RcToken(IP, port.number, address, length, rkey).text()
        method, path = target.split()
        with Raw((self._node.host, self._node.port), self._key) as raw:
            status: int = raw.ask(method, path, None, x_scal_rdma=token, **headers).status
        port.sever()
        return status

    def write(self, address: int, length: int, rkey: int) -> int:
        """The status of a GET, which writes to our memory."""
        return self._ask("GET /v1/k", address, length, rkey, range=f"bytes=0-{length - 1}")

    def read(self, address: int, length: int, rkey: int) -> int:
        """The status of a PUT, which reads from it."""
        return self._ask("PUT /v1/stolen", address, length, rkey, content_length="0")


def test_a_key_lets_in_what_its_operation_needs_and_ends_with_it(
    node: NodeProcess, open_one: Callable[..., RdmaTransport]
) -> None:
    transport = open_one(memory="window")
    landing = transport._landings[0]
    regions, ask = transport._regions, Attempts(node, landing)
    buffer = GuardedBuffer(MIB)
    registration = transport.register(buffer)
    assert isinstance(registration, Region)
    [[memory]] = registration.memories.values()
    assert ask.write(buffer.address, 4096, memory.rkey) == 400, "the arena's own key opens nothing"
    assert ask.read(buffer.address, 4096, memory.rkey) == 400
    keys = []
    for writable in (True, False):
        with regions.covering(landing.device, buffer.address, 8192, writable=writable) as rkey:
            keys.append(rkey)
            assert ask.write(buffer.address, 8192, rkey) == (206 if writable else 400)
            # who may write may read as well: a byte of what it wrote
            assert ask.read(buffer.address, 8192, rkey) == 200
        assert ask.write(buffer.address, 4096, rkey) == 400
        assert ask.read(buffer.address, 4096, rkey) == 400
    assert len({*keys, memory.rkey}) == 3
    assert buffer.view[:8192] == DATA[:8192]
    buffer.check((0, 8192))
    registration.close()
    buffer.close()


def test_what_a_window_does_not_stop_here(node: NodeProcess, open_one: Callable[..., RdmaTransport]) -> None:
    """Told, not asserted: Linux 6.1's Soft-RoCE looks at a window's key and rights only, a NIC at its range too."""
    transport = open_one(memory="window")
    landing, ask = transport._landings[0], Attempts(node, transport._landings[0])
    buffer = HostBuffer(MIB)
    registration = transport.register(buffer)
    with transport._regions.covering(landing.device, buffer.address, 4096, writable=True) as rkey:
        past = ask.write(buffer.address + 4096, 4096, rkey)
    print("a write past the window's end is answered by", past)
    assert (bytes(buffer.view[4096:8192]) == DATA[:4096]) is (past == 206)
    registration.close()
    buffer.close()


def test_transfers_by_windows_are_right_and_leave_nothing_behind(
    node: NodeProcess, open_one: Callable[..., RdmaTransport]
) -> None:
    before = resources()
    step = 64 << 10
    for turn in range(3):
        transport = open_one(memory="window", threads="4")
        buffer = GuardedBuffer(MIB)
        registration = transport.register(buffer)
        ops = [Op(at, "read", "k", at, step, buffer, at, None, MIB) for at in range(0, MIB, step)]
        for cancelled in (ops[:3], []):
            transport.submit(ops)
            transport.cancel([op.id for op in cancelled])
            found = drain(transport, len(ops)).values()
            assert {item.status for item in found} <= {Status.DONE, Status.CANCELLED}
        assert {item.status for item in found} == {Status.DONE}
        assert buffer.view == DATA
        buffer.check((0, MIB))
        transport.submit([Op(1, "write", f"w{turn}", 0, MIB, buffer, 0, object_size=MIB)])
        assert drain(transport, 1)[1].status is Status.DONE
        assert (Path(node.data) / f"w{turn}").read_bytes() == DATA
        used = len(transport._regions.windows["rxe0"]._idle)
        assert 1 <= used <= 4, "one for each operation at once"
        registration.close()
        transport.close()
        buffer.close()
    until(lambda: resources()["qp"] <= before["qp"], f"queue pairs are left: {resources()}")
    assert resources()["mr"] <= before["mr"] + 1, "the node's transfer memory"


def test_a_device_without_windows_is_an_error_that_names_the_way_out(
    open_one: Callable[..., RdmaTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Window, device: Device) -> None:
        raise EnvError(f"{device.name} binds no memory window", hint="memory=op")

    monkeypatch.setattr(Window, "__init__", refuse)
    before = resources()
    with pytest.raises(EnvError, match="rxe0 binds no memory window"):
        open_one(memory="window")
    assert resources() == before
