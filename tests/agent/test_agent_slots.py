"""An agent as its users meet it: loading into slots, attaching, leases that end with their process, the budget."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest

from kvctl.agent import wire
from kvctl.agent.client import AgentClient
from kvctl.agent.load import load_slot
from kvctl.agent.memory import is_sealed
from kvctl.agent.target import SlotOptions
from kvctl.core.addresses import parse_store
from kvctl.core.context import Context
from kvctl.core.errors import CapacityError, ConflictError, EnvError, NotFoundError, UsageError
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.transports.registry import open_store, probe, transport_specs
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, eventually, kvctl, python, read_slot, same_files
from tests.agent.conftest import Start

HOLD = """
import sys
from kvctl.agent.client import AgentClient
client = AgentClient(label="holder")
opened = client.open(sys.stdin.readline().strip())
print("held", flush=True)
sys.stdin.readline()
"""

LOAD_HALF = """
import sys
from kvctl.agent.target import SlotTarget, SlotOptions
from kvctl.weights.runs import OutputFile
from kvctl.weights.layout import encode_header
target = SlotTarget("half")
header = encode_header({"a": {"dtype": "U8", "shape": [65536], "data_offsets": [0, 65536]}})
target.open([OutputFile("model.safetensors", header, 65536)], {}, "print")
print("loading", flush=True)
sys.stdin.readline()
"""


def load(agent: AgentProcess, source: Path, slot: str = "m", *, evict: bool = False) -> None:
    request = LoadRequest(str(source), into=f"slot:{slot}")
    load_slot(request, Context(), options=SlotOptions(evict=evict), socket=agent.socket)


def test_a_slot_holds_the_files_bit_for_bit_and_serves_them_as_a_source(
    agent: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_AGENT_SOCKET", agent.socket)
    files = write_llama(str(tmp_path / "m"), shards=2)
    code, report, _ = kvctl(
        "load-weights", str(tmp_path / "m"), "--into", "slot:m", socket=agent.socket, state=tmp_path
    )
    assert code == 0
    assert report["extra"]["slot"]["state"] == "ready"
    assert same_files(read_slot(agent, "m"), files)
    again = kvctl("load-weights", "slot:m", "--into", f"dir:{tmp_path}/copy", socket=agent.socket, state=tmp_path)
    assert again[0] == 0
    assert all((tmp_path / "copy" / name).read_bytes() == data for name, data in files.items())
    assert agent.ls("m")[0]["leases"] == 0


def test_what_a_slot_holds_already_is_not_loaded_again_and_other_weights_are_refused(
    agent: AgentProcess, tmp_path: Path
) -> None:
    write_llama(str(tmp_path / "m"))
    write_llama(str(tmp_path / "other"), seed=1)
    load(agent, tmp_path / "m")
    before = agent.ls("m")[0]["ident"]
    load(agent, tmp_path / "m")
    assert [item["ident"] for item in agent.ls("m")] == [before]
    with pytest.raises(UsageError, match="holds other weights"):
        load(agent, tmp_path / "other")


def test_handed_out_memory_is_sealed(agent: AgentProcess, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "m"))
    load(agent, tmp_path / "m")
    with agent.client() as client:
        for file in client.open("m").files:
            assert is_sealed(file.fd)
            with pytest.raises(PermissionError):
                os.pwrite(file.fd, b"x", 0)
            os.close(file.fd)


def test_a_client_that_is_killed_gives_its_lease_back(agent: AgentProcess, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "m"))
    load(agent, tmp_path / "m")
    holder = python(HOLD, agent.socket)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        holder.stdin.write("m\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "held\n"
        assert agent.ls("m")[0]["holders"] == [{"pid": holder.pid, "label": "holder", "leases": 1}]
        with agent.client() as client, pytest.raises(ConflictError, match="in use"):
            client.call("unload", slot="m", force=False, previous_only=False)
        holder.kill()
        holder.wait()
    eventually(lambda: agent.ls("m")[0]["leases"] == 0, "the killed client's lease ends")
    with agent.client() as client:
        assert client.call("unload", slot="m", force=False, previous_only=False)["freed_bytes"] > 0
    assert agent.used() == 0


def test_a_loader_that_is_killed_leaves_nothing(agent: AgentProcess) -> None:
    loader = python(LOAD_HALF, agent.socket)
    assert loader.stdin is not None
    assert loader.stdout is not None
    with loader.stdin, loader.stdout:
        assert loader.stdout.readline() == "loading\n"
        assert agent.ls("half")[0]["state"] == "loading"
        with agent.client() as client, pytest.raises(NotFoundError, match="still being loaded"):
            client.open("half")
        with agent.client() as client, pytest.raises(ConflictError, match="being loaded"):
            client.call("reserve", slot="half", fingerprint="x", source="", files=[], facts={}, runs=0, swap=False,
                        evict_first=False, evict=False)  # fmt: skip
        loader.kill()
        loader.wait()
    eventually(lambda: agent.used() == 0, "the killed loader's memory is freed")


def test_what_does_not_fit_is_refused_before_the_first_byte(start: Start, tmp_path: Path) -> None:
    agent = start(memory="4MiB")
    write_llama(str(tmp_path / "m"))
    write_llama(str(tmp_path / "big"), LlamaShape(vocab=16384))
    load(agent, tmp_path / "m")
    with pytest.raises(CapacityError, match="does not fit") as caught:
        load(agent, tmp_path / "big", "big")
    assert caught.value.details["budget"] == 4 << 20
    assert [item["slot"] for item in agent.ls()] == ["m"]


def test_unused_slots_are_evicted_only_when_asked(start: Start, tmp_path: Path) -> None:
    agent = start(memory="3MiB")
    for name in ("a", "b", "c"):
        write_llama(str(tmp_path / name), seed=ord(name))
    load(agent, tmp_path / "a", "a")
    load(agent, tmp_path / "b", "b")
    with pytest.raises(CapacityError):
        load(agent, tmp_path / "c", "c")
    with agent.client() as client:
        for file in client.open("a").files:
            os.close(file.fd)
        load(agent, tmp_path / "c", "c", evict=True)
    # a was used longer ago than b, but somebody has it
    assert [item["slot"] for item in agent.ls()] == ["a", "c"]


def test_the_socket_is_for_this_user_only_and_a_second_agent_is_refused(agent: AgentProcess, tmp_path: Path) -> None:
    assert stat.S_IMODE(os.stat(agent.socket).st_mode) == 0o600
    code, error, _ = kvctl("agent", "serve", "--socket", agent.socket, socket=agent.socket, state=tmp_path)
    assert code == 10
    assert "is running at" in error["what"]


def test_nonsense_ends_its_own_connection_only(agent: AgentProcess) -> None:
    for data in (b"\xff\xff\xff\xff", b"\0\0\0\x02[]", b"\0\0\0\x05{oops", b"\0\0\0\x10" + b'{"op":"reserve"}'):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(agent.socket)
            sock.settimeout(60)
            sock.sendall(data)
            assert sock.recv(100) == b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(agent.socket)
        sock.settimeout(60)
        wire.send(sock, {"op": "dance"})
        answer, _ = wire.receive(sock)
        assert answer["error"]["code"] == "usage"
    assert agent.ls() == []


def test_without_an_agent_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="no agent is running") as caught:
        AgentClient(str(tmp_path / "none.sock"))
    assert "kvctl agent serve" in str(caught.value.hint)


def test_an_agent_ends_in_order_and_a_new_one_takes_a_killed_ones_place(start: Start, place: Path) -> None:
    first = start()
    first.kill()
    assert os.path.exists(first.socket)
    with AgentProcess.start(first.folder) as second:
        assert second.ls() == []
        assert second.close() == 0
    assert not os.path.exists(first.socket)


def test_a_peer_reads_a_slot_bit_for_bit_and_cannot_write(agent: AgentProcess, tmp_path: Path) -> None:
    files = write_llama(str(tmp_path / "m"), shards=3)
    load(agent, tmp_path / "m")
    run_load(LoadRequest(f"{agent.peers}/m", into=f"dir:{tmp_path}/copy"), Context())
    assert all((tmp_path / "copy" / name).read_bytes() == data for name, data in files.items())
    with pytest.raises(NotFoundError, match="no such slot"):
        run_load(LoadRequest(f"{agent.peers}/other"), Context())


def test_a_peer_without_a_token_is_refused_where_keys_are_asked_for(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "master.key"
    assert kvctl("node", "key", str(key), socket="", state=tmp_path)[0] == 0
    assert kvctl("node", "token", str(tmp_path / "ro.key"), "--key-file", str(key), socket="", state=tmp_path)[0] == 0
    agent = start("--peers", "127.0.0.1:0", "--key-file", str(key))
    write_llama(str(tmp_path / "m"))
    load(agent, tmp_path / "m")
    code, error, _ = kvctl("load-weights", f"{agent.peers}/m", socket="", state=tmp_path)
    assert (code, error["code"]) == (5, "auth")
    monkeypatch.setenv("KVCTL_NODE_KEY_FILE", str(tmp_path / "ro.key"))
    assert kvctl("load-weights", f"{agent.peers}/m", socket="", state=tmp_path)[0] == 0


def test_a_peer_reads_a_slot_by_ucx_and_sees_what_serves_only(start: Start, tmp_path: Path) -> None:
    if not probe(transport_specs()["nixl-ucx"]).available:
        pytest.skip("needs NIXL: pip install 'kvctl[nixl]'")
    agent = start("--peers-ucx", "127.0.0.1:0")
    files = write_llama(str(tmp_path / "m"), shards=2)
    load(agent, tmp_path / "m")
    where = f"{agent.one_sided}/m"
    with contextlib.closing(open_store(parse_store(where))) as store:
        eventually(lambda: len(list(store.list())) == len(files), "the slot is published")
    report = kvctl("load-weights", where, "--into", f"dir:{tmp_path}/copy", socket="", state=tmp_path)[1]
    assert report["transport"][0]["name"] == "nixl-ucx"
    assert all((tmp_path / "copy" / name).read_bytes() == data for name, data in files.items())
    with agent.client() as client:
        client.call("unload", slot="m", force=False, previous_only=False)
    with contextlib.closing(open_store(parse_store(where))) as store:
        eventually(lambda: not list(store.list()), "the slot is withdrawn")
    assert agent.used() == 0
    assert agent.close() == 0
