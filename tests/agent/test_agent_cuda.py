"""The agent, a loader and readers over CUDA's own calls, against a stand-in of libcuda whose memory is the host's: the
whole way but torch, which has no GPU here. With a GPU `scripts/gpu-check` goes all of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl.testing.models import LlamaShape, write_llama
from tests.agent.agents import AgentProcess, eventually
from tests.agent.conftest import Start
from tests.memory.libcuda import build, environment

MIB = 1 << 20
IDENT = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"

HEAD = """
import ctypes, os, sys
from kvctl.agent.client import AgentClient
from kvctl.agent.device_target import DeviceSlotTarget
from kvctl.agent.target import SlotTarget
from kvctl.core.context import Context
from kvctl.core.errors import KvctlError
from kvctl.memory.devices import HostDevice, open_shareable
from kvctl.weights.load import load_into
from kvctl.weights.request import LoadRequest

class Over:
    kind = "host"
    def __init__(self, mapped):
        self.mapped, self.nbytes, self.address = mapped, mapped.nbytes, mapped.address
        self.view = memoryview((ctypes.c_char * mapped.nbytes).from_address(mapped.address)).cast("B")
    def close(self):
        self.mapped.unmap()

class Device(HostDevice):
    def over(self, mapped):
        return Over(mapped)

def load(source, slot):
    target = SlotTarget(slot)
    target.devices = [open_shareable("cuda:0")]
    try:
        load_into(LoadRequest(source), DeviceSlotTarget(target, Device()), Context())
    except KvctlError as error:
        print(error.code, error, flush=True)
    else:
        print("loaded", flush=True)
    with open("/proc/self/maps") as file:
        assert not [line for line in file if "/memfd:gpu" in line]

def attach(slot):
    client = AgentClient(label="reader")
    [file] = [item for item in client.open(slot, devices=True).files if item.header]
    mapped = open_shareable("cuda:0").map(file.space_fd, file.space.nbytes, writable=False)
    mapped.lease = client
    header = os.pread(file.fd, file.header, 0)
    file.close()
    view = Over(mapped).view[file.space.start :][: file.size - file.header]
    return mapped, header, view
"""

READ = """
mapped, header, view = attach(sys.argv[1])
with open(sys.argv[2], "rb") as file:
    wanted = file.read()
print(wanted == header + bytes(view), flush=True)
while sys.stdin.readline():
    print(wanted == header + bytes(view), flush=True)
"""

WRITE = """
mapped, header, view = attach(sys.argv[1])
print("attached", flush=True)
view[0] = 1
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def agent(start: Start, library: Path, monkeypatch: pytest.MonkeyPatch) -> AgentProcess:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("STAND_IN_BYTES", str(4 * MIB))
    return start("--device-memory", "cuda:0=6MiB")


def client(agent: AgentProcess, library: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment(library, KVCTL_AGENT_SOCKET=agent.socket),
    )  # fmt: skip


def said(agent: AgentProcess, library: Path, code: str, *arguments: str) -> tuple[str, int]:
    """What it printed, and how it ended."""
    running = client(agent, library, code, *arguments)
    out, _ = running.communicate("", timeout=120)
    return out, running.returncode


def on_gpu(agent: AgentProcess) -> int:
    """Bytes of memory that the agent holds by its descriptors."""
    folder, found = f"/proc/{agent.process.pid}/fd", 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # a connection that has just ended
            if "/memfd:gpu" in os.readlink(f"{folder}/{name}"):
                found += os.stat(f"{folder}/{name}").st_size
    return found


def test_a_slot_is_filled_read_and_freed_by_cudas_calls(agent: AgentProcess, library: Path, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "m"))
    file = str(tmp_path / "m" / "model.safetensors")
    load = f"load({str(tmp_path / 'm')!r}, 'm')"
    assert said(agent, library, load) == ("loaded\n", 0)
    with agent.client() as control:
        [device] = control.call("ls")["devices"]
    assert device == {"device": "cuda:0", "ident": IDENT, "budget_bytes": 6 * MIB, "used_bytes": on_gpu(agent)}
    assert on_gpu(agent) % (2 * MIB) == 0
    assert agent.ls("m")[0]["device"] == "cuda:0"
    assert said(agent, library, READ, "m", file) == ("True\n", 0)
    assert said(agent, library, WRITE, "m") == ("attached\n", -signal.SIGSEGV)
    reader = client(agent, library, READ, "m", file)
    assert reader.stdin is not None
    assert reader.stdout is not None
    with reader.stdin, reader.stdout:
        assert reader.stdout.readline() == "True\n"
        eventually(lambda: agent.ls("m")[0]["leases"] == 1, "only the reader that lives holds a lease")
        reader.kill()
        reader.wait()
    eventually(lambda: agent.ls("m")[0]["leases"] == 0, "the killed reader's lease ends")
    with agent.client() as control:
        control.call("unload", slot="m", force=False, previous_only=False)
    assert on_gpu(agent) == 0


def test_what_the_gpu_or_the_budget_has_no_room_for_is_refused_before_the_first_byte(
    agent: AgentProcess, library: Path, tmp_path: Path
) -> None:
    write_llama(str(tmp_path / "m"))
    write_llama(str(tmp_path / "big"), LlamaShape(vocab=4500, layers=1, dtype="F32"))
    size = sum(path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors"))
    assert 4 * MIB < size < 6 * MIB, size
    out, code = said(agent, library, f"load({str(tmp_path / 'big')!r}, 'big')")
    assert (out, code) == ("capacity cuda:0 has no room for 6 MiB: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY\n", 0)
    assert (agent.ls(), agent.used(), on_gpu(agent)) == ([], 0, 0)
    assert said(agent, library, f"load({str(tmp_path / 'm')!r}, 'm')")[0] == "loaded\n"
    out, code = said(agent, library, f"load({str(tmp_path / 'big')!r}, 'big')")
    assert out.startswith("capacity slot big does not fit into the agent's memory of cuda:0: it needs 6 MiB, ")
    assert [item["slot"] for item in agent.ls()] == ["m"]


def test_what_is_mapped_outlives_the_agent(agent: AgentProcess, library: Path, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "m"))
    assert said(agent, library, f"load({str(tmp_path / 'm')!r}, 'm')")[0] == "loaded\n"
    reader = client(agent, library, READ, "m", str(tmp_path / "m" / "model.safetensors"))
    assert reader.stdin is not None
    assert reader.stdout is not None
    with reader.stdin, reader.stdout:
        assert reader.stdout.readline() == "True\n"
        agent.kill()
        reader.stdin.write("again\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "True\n"
        reader.stdin.close()
        assert reader.wait(60) == 0
