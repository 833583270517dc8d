"""Slots on a device, on the stand-in of host memory: the same agent, loads, mappings and leases as on a GPU."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

import kvctl
from kvctl.agent.load import load_slot, rollback_slot, swap_slot
from kvctl.agent.settings import parse_device_memory
from kvctl.agent.target import SlotOptions
from kvctl.core.context import Context
from kvctl.core.errors import (
    CapacityError,
    ConflictError,
    EnvError,
    IncompatibleError,
    IntegrityError,
    NotFoundError,
    UsageError,
)
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.weights.load import run_load
from kvctl.weights.models import digest_model
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, eventually, python, write_aligned
from tests.agent.agents import kvctl as program
from tests.agent.conftest import Start

MIB = 1 << 20

HOLD = """
import sys, kvctl
found = kvctl.attach("m", device="hostdev")
print("attached", flush=True)
sys.stdin.readline()
"""

LOAD_HALF = """
import sys
from kvctl.agent.device_target import DeviceSlotTarget
from kvctl.agent.target import SlotTarget
from kvctl.memory.devices import open_device, open_shareable
from kvctl.weights.runs import OutputFile
from kvctl.weights.layout import encode_header
slot = SlotTarget("half")
slot.devices = [open_shareable("hostdev")]
target = DeviceSlotTarget(slot, open_device("hostdev"))
header = encode_header({"a": {"dtype": "U8", "shape": [65536], "data_offsets": [0, 65536]}})
target.open([OutputFile("model.safetensors", header, 65536)], {}, "print")
print("loading", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def agent(start: Start) -> AgentProcess:
    return start("--device-memory", "hostdev=32MiB", peers=True)


def load(
    agent: AgentProcess,
    source: Path,
    slot: str = "m",
    *,
    device: str = "hostdev",
    evict: bool = False,
    **fields: object,
) -> None:
    request = LoadRequest(str(source), into=f"slot:{slot}", device=device, **fields)  # type: ignore[arg-type]
    load_slot(request, Context(), options=SlotOptions(evict=evict), socket=agent.socket)


def taken(agent: AgentProcess, device: str = "hostdev") -> int:
    """Bytes of a device that slots take."""
    with agent.client() as client:
        found = {item["device"]: int(item["used_bytes"]) for item in client.call("ls")["devices"]}
    return found[device]


def mapped() -> list[str]:
    """How this process has memory of the device mapped."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return [line.split()[1] for line in file if "/memfd:kvctl:hostdev" in line]


@pytest.mark.torch
def test_attached_tensors_are_the_loaded_ones_and_nobody_has_them_mapped_for_writing(
    agent: AgentProcess, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvctl[torch]'")
    write_aligned(tmp_path / "m")
    load(agent, tmp_path / "m")
    assert mapped() == []
    found = kvctl.attach("m", device="hostdev", socket=agent.socket)
    assert mapped() == ["r--s"]
    wanted = kvctl.load_weights(str(tmp_path / "m"))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in wanted.items())
    assert b"LlamaForCausalLM" in found.files["config.json"]
    [document] = agent.ls("m")
    assert (document["device"], document["state"], document["leases"]) == ("hostdev", "ready", 1)
    assert agent.used() + taken(agent) == document["bytes"]


@pytest.mark.torch
def test_the_lease_ends_with_the_last_tensor(agent: AgentProcess, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'kvctl[torch]'")
    write_aligned(tmp_path / "m")
    load(agent, tmp_path / "m")
    found = kvctl.attach("m", device="hostdev", socket=agent.socket)
    kept = found["model.norm.weight"]
    found.close()
    del found
    gc.collect()
    assert agent.ls("m")[0]["leases"] == 1
    with agent.client() as client, pytest.raises(ConflictError, match="in use"):
        client.call("unload", slot="m", force=False, previous_only=False)
    del kept
    gc.collect()
    eventually(lambda: agent.ls("m")[0]["leases"] == 0, "the lease ends with the last tensor")
    assert mapped() == []
    with agent.client() as client:
        client.call("unload", slot="m", force=False, previous_only=False)
    assert (agent.used(), taken(agent)) == (0, 0)


@pytest.mark.torch
def test_an_attached_process_that_is_killed_gives_its_lease_back(agent: AgentProcess, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'kvctl[torch]'")
    write_llama(str(tmp_path / "m"))
    load(agent, tmp_path / "m")
    holder = python(HOLD, agent.socket)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == "attached\n"
        assert [item["pid"] for item in agent.ls("m")[0]["holders"]] == [holder.pid]
        holder.kill()
        holder.wait()
    eventually(lambda: agent.ls("m")[0]["leases"] == 0, "the killed process's lease ends")


def test_a_loader_that_is_killed_leaves_nothing(agent: AgentProcess) -> None:
    loader = python(LOAD_HALF, agent.socket)
    assert loader.stdin is not None
    assert loader.stdout is not None
    with loader.stdin, loader.stdout:
        assert loader.stdout.readline() == "loading\n"
        assert agent.ls("half")[0]["state"] == "loading"
        assert taken(agent) == 65536
        loader.kill()
        loader.wait()
    eventually(lambda: taken(agent) == 0, "the killed loader's memory is freed")
    assert agent.used() == 0


def test_a_load_that_fails_leaves_nothing(agent: AgentProcess, tmp_path: Path) -> None:
    files = write_llama(str(tmp_path / "m"))
    digests = tmp_path / "digests.json"
    digest_model(str(tmp_path / "m"), None, None, str(digests), Context())
    data = bytearray(files["model.safetensors"])
    data[-1] ^= 1
    (tmp_path / "m" / "model.safetensors").write_bytes(data)
    with pytest.raises(IntegrityError):
        load(agent, tmp_path / "m", digests=str(digests))
    eventually(lambda: (agent.used(), taken(agent)) == (0, 0), "what landed is freed")
    assert mapped() == []


def test_what_does_not_fit_is_refused_before_the_first_byte(start: Start, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "m"))
    write_llama(str(tmp_path / "other"), seed=1)
    probe = start("--device-memory", "hostdev=32MiB")
    load(probe, tmp_path / "m")
    size = taken(probe)
    agent = start("--device-memory", f"hostdev={2 * size - 1}")
    load(agent, tmp_path / "m")
    with pytest.raises(CapacityError, match="does not fit into the agent's memory of hostdev") as caught:
        load(agent, tmp_path / "other", "other")
    assert caught.value.details == {"needed": size, "used": size, "budget": 2 * size - 1, "device": "hostdev"}
    assert [item["slot"] for item in agent.ls()] == ["m"]
    load(agent, tmp_path / "other", "host", device="cpu")
    load(agent, tmp_path / "other", "other", evict=True)
    # what frees nothing there is not evicted
    assert sorted((item["slot"], item["device"]) for item in agent.ls()) == [("host", "cpu"), ("other", "hostdev")]
    with pytest.raises(CapacityError, match="it has none of that device"):
        load(agent, tmp_path / "m", "third", device="hostdev:1")


def test_what_a_slot_holds_already_is_not_loaded_again_but_elsewhere_it_is_not_the_same(
    agent: AgentProcess, tmp_path: Path
) -> None:
    write_llama(str(tmp_path / "m"))
    load(agent, tmp_path / "m")
    before = agent.ls("m")[0]["ident"]
    load(agent, tmp_path / "m")
    assert [item["ident"] for item in agent.ls("m")] == [before]
    with pytest.raises(UsageError, match="slot m is on hostdev, not on cpu"):
        load(agent, tmp_path / "m", device="cpu")


@pytest.mark.torch
def test_only_attach_reads_there_and_on_that_device(
    agent: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'kvctl[torch]'")
    monkeypatch.setenv("KVCTL_AGENT_SOCKET", agent.socket)
    write_llama(str(tmp_path / "m"))
    load(agent, tmp_path / "m")
    load(agent, tmp_path / "m", "host", device="cpu")
    with pytest.raises(IncompatibleError, match="slot m is on hostdev, which only"):
        kvctl.attach("m")
    with pytest.raises(IncompatibleError, match="which only"):
        run_load(LoadRequest("slot:m"), Context())
    with pytest.raises(NotFoundError, match="m is on hostdev: peers read host memory only"):
        run_load(LoadRequest(f"{agent.peers}/m"), Context())
    request = LoadRequest(str(tmp_path / "m"), into="slot:x", device="hostdev")
    with pytest.raises(UsageError, match="peers load into host memory together"):
        load_slot(request, Context(), peers=[agent.place], socket=agent.socket)
    with pytest.raises(UsageError, match="is on another device than hostdev:1"):
        kvctl.attach("m", device="hostdev:1")
    with pytest.raises(UsageError, match=r"is in host memory, not on hostdev"):
        kvctl.attach("host", device="hostdev")
    with pytest.raises(UsageError, match="no private mappings"):
        kvctl.attach("m", device="hostdev", private=True)
    eventually(lambda: {item["leases"] for item in agent.ls()} == {0}, "nobody holds a lease")
    assert mapped() == []
    assert not [
        name for name in os.listdir("/proc/self/fd") if "memfd:kvctl" in os.path.realpath(f"/proc/self/fd/{name}")
    ]


@pytest.mark.torch
def test_each_rank_is_on_its_device(start: Start, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvctl[torch]'")
    agent = start("--device-memory", "hostdev:0-1=16MiB")
    write_llama(str(tmp_path / "m"))
    load(agent, tmp_path / "m", device="hostdev:0-1", tp_size=2)
    assert agent.ls("m")[0]["device"] == "hostdev:0-1"
    assert taken(agent, "hostdev:0") == taken(agent, "hostdev:1") > 0
    for rank in range(2):
        found = kvctl.attach("m", device=f"hostdev:{rank}", tp_rank=rank, socket=agent.socket)
        wanted = kvctl.load_weights(str(tmp_path / "m"), tp_rank=rank, tp_size=2)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name].view(torch.uint8), item.view(torch.uint8)) for name, item in wanted.items())


@pytest.mark.torch
def test_a_swap_goes_where_the_old_weights_are_and_back(agent: AgentProcess, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvctl[torch]'")
    for seed in range(2):
        write_aligned(tmp_path / str(seed), seed=seed)
    load(agent, tmp_path / "0")
    size = taken(agent)
    old = kvctl.attach("m", device="hostdev", socket=agent.socket)
    options = SlotOptions(keep_previous=True)
    report = swap_slot("m", LoadRequest(str(tmp_path / "1")), Context(), options=options, socket=agent.socket)
    assert report.extra["slot"]["device"] == "hostdev"
    assert taken(agent) == 2 * size
    new = kvctl.attach("m", device="hostdev", socket=agent.socket)
    for seed, found in enumerate((old, new)):
        wanted = kvctl.load_weights(str(tmp_path / str(seed)))
        assert all(torch.equal(found[name].view(torch.uint8), item.view(torch.uint8)) for name, item in wanted.items())
    rollback_slot("m", socket=agent.socket)
    again = kvctl.attach("m", device="hostdev", socket=agent.socket)
    assert (old.ident, old.generation) == (again.ident, again.generation)
    write_llama(str(tmp_path / "wider"), LlamaShape(hidden=128))
    with pytest.raises(IncompatibleError, match="do not fit the slot"):
        swap_slot("m", LoadRequest(str(tmp_path / "wider")), Context(), socket=agent.socket)


def test_the_command_line_shows_the_way_and_where_slots_are(agent: AgentProcess, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "m"))
    arguments = ("load-weights", str(tmp_path / "m"), "--into", "slot:m", "--device", "hostdev")
    code, report, said = program(*arguments, socket=agent.socket, state=tmp_path)
    assert code == 0, said
    assert report["target"] == "slot:m on hostdev"
    assert report["extra"]["device"]["staging"] == "host"
    assert report["extra"]["slot"]["device"] == "hostdev"
    code, listed, _ = program("agent", "ls", socket=agent.socket, state=tmp_path)
    assert code == 0
    copy = ("checkpoint", "create", "--from", "slot:m", "--to", str(tmp_path / "copy"))
    code, error, _ = program(*copy, socket=agent.socket, state=tmp_path)
    assert (code, error["what"]) == (8, "slot m is on hostdev, which only kvctl.attach reads")
    [device] = listed["devices"]
    assert (device["device"], device["budget_bytes"]) == ("hostdev", 32 * MIB)
    assert 0 < device["used_bytes"] < 32 * MIB


def test_a_gpu_that_is_not_there_keeps_the_agent_from_starting_and_says_why(place: Path) -> None:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a driver here: `scripts/gpu-check` tests it")
    socket = str(place / "a.sock")
    code, error, _ = program("agent", "serve", "--device-memory", "cuda:0=1GiB", socket=socket, state=place)
    assert code == EnvError.exit_code
    assert error["what"] == "no CUDA driver is here"
    assert "install" in error["hint"]


def test_memory_of_devices_is_given_by_name_and_size() -> None:
    assert parse_device_memory(["cuda=1GiB", "hostdev:1-2=4096"]) == (
        ("cuda:0", 1 << 30), ("hostdev:1", 4096), ("hostdev:2", 4096)
    )  # fmt: skip
    for wrong in (["cuda:0"], ["gpu=1GiB"], ["cuda:0=much"], ["cuda:0=1GiB", "cuda=1GiB"], ["cuda:0-1=1", "cuda:1=1"]):
        with pytest.raises(UsageError):
            parse_device_memory(wrong)
