"""Several devices: native-rdma and our node in one guest of the lab with two rails.
tests/verbs/test_verbs_in_guests.py runs this file there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import AuthError, UsageError
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Completion, Op, Status, Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_verbs.rails import Rail, find_rails
from tests.cli.inside import program_inside
from tests.lab.fleet import SESSION_BYTES, write_session

RAILS = ("10.9.2.1", "10.9.3.1")
MIB = 1 << 20
DATA = random.Random(9).randbytes(16 * MIB)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], NodeProcess]]:
    running: list[NodeProcess] = []

    def start(*allowed: str) -> NodeProcess:
        arguments = [word for network in allowed for word in ("--rdma-allow", network)]
        node = NodeProcess.start(str(tmp_path), "--rdma", "require", *arguments)
        running.append(node)
        (Path(node.data) / "k").write_bytes(DATA)
        return node

    yield start
    for node in running:
        node.close()


def load(node: NodeProcess, **options: str) -> dict[int, Completion]:
    """Reads of 1 MiB, checked."""
    config = node.store()
    store = open_store(config)
    transport: Transport = open_transports(config, store, choose("node", "host", "native-rdma"), options)[0]
    buffer = HostBuffer(len(DATA))
    registration = transport.register(buffer)
    transport.submit([Op(at, "read", "k", at, MIB, buffer, at, None, len(DATA)) for at in range(0, len(DATA), MIB)])
    found: dict[int, Completion] = {}
    while len(found) < len(DATA) // MIB:
        more = transport.poll(60)
        assert more
        found.update({item.id: item for item in more})
    assert all(item.status is Status.DONE for item in found.values()) == (buffer.view == DATA)
    registration.close()
    transport.close()
    store.close()
    return found


def received(rail: int) -> int:
    return int(Path(f"/sys/class/infiniband/rxe{rail}/ports/1/hw_counters/rcvd_pkts").read_text())


def test_all_devices_share_a_load(start: Callable[..., NodeProcess]) -> None:
    assert find_rails() == [Rail("rxe0", RAILS[0]), Rail("rxe1", RAILS[1])]
    before = [received(rail) for rail in range(2)]
    found = load(start("10.9.0.0/16"))
    assert {item.status for item in found.values()} == {Status.DONE}
    packets = [received(rail) - count for rail, count in enumerate(before)]
    print("packets", packets)
    assert min(packets) >= 2 * MIB // 4096, "each has an eighth of it at least, however busy the machine is"


def test_devices_can_be_named_by_name_or_address(start: Callable[..., NodeProcess]) -> None:
    node = start("10.9.0.0/16")
    for name, rail in (("rxe1", 1), (RAILS[0], 0)):
        before = received(1 - rail)
        assert {item.status for item in load(node, devices=name).values()} == {Status.DONE}
        assert received(1 - rail) - before < MIB // 4096, "the end of older connections, no data"
    with pytest.raises(UsageError, match="mlx5_9 is no RDMA device"):
        load(node, devices="mlx5_9,rxe0")


def test_an_address_that_the_node_does_not_connect_to_is_left_alone(start: Callable[..., NodeProcess]) -> None:
    node = start(f"{RAILS[0]}/32")
    found = load(node)
    assert {item.status for item in found.values()} == {Status.DONE}
    refused = node.metrics()["kvctl_node_rdma_addresses_refused_total"]
    assert 1 <= refused <= 8, "once per request that was under way, then never again"
    found = load(node, devices="rxe1")
    assert {type(item.error) for item in found.values()} == {AuthError}
    problem = found[0].error
    assert problem is not None
    assert RAILS[1] in str(problem)
    assert "--rdma-allow" in (problem.hint or "")


def test_a_session_goes_by_one_device_and_comes_by_another(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    node = start("10.9.0.0/16")
    (tmp_path / "kvctl.toml").write_text(
        f'[[repos.lab.stores]]\nurl = "{node.store().url}"\noptions.key_file = "{node.key_file()}"\n'
    )
    kvctl = program_inside(tmp_path)
    write_session(tmp_path / "chat.safetensors")
    assert kvctl("repo", "init", "-r", "lab").code == 0
    whole = SESSION_BYTES // 4096  # packets, at least
    for rail, words in enumerate((
        ("push", "bundle:chat.safetensors", "lab:alice/chat", "--with-tokens"),
        ("pull", "lab:alice/chat", "--into", "bundle:back.safetensors"),
    )):  # fmt: skip
        before = [received(rail) for rail in range(2)]
        options = ("--transport", "native-rdma", "--transport-opt", f"devices=rxe{rail}")
        done = kvctl("kv", *words, *options)
        assert done.code == 0, done.err
        packets = [received(rail) - count for rail, count in enumerate(before)]
        print("packets", words[0], packets)
        assert packets[rail] >= whole
        assert packets[1 - rail] < whole // 8, "the end of older connections, no data"
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "chat.safetensors").read_bytes()
