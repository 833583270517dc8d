"""The CUDA suite's part about the agent: a slot on the device, filled by this process, attached here and in others, one
of which is killed, and one of which writes where it may only read.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from kvctl.agent.client import AgentClient
from kvctl.agent.load import load_slot
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, IntegrityError
from kvctl.weights.request import LoadRequest

SECONDS: Final = 120.0
BEYOND: Final = 64 << 20  # what slots may take more than the model has: pages are large

HOLD: Final = """
import sys, kvctl
found = kvctl.attach("m", device=sys.argv[1])
print(sum(tensor.nbytes for tensor in found.values()), flush=True)
sys.stdin.readline()
"""

WRITE: Final = """
import sys, torch, kvctl
found = kvctl.attach("m", device=sys.argv[1])
print("attached", flush=True)
next(iter(found.values())).zero_()
if sys.argv[1].startswith("cuda"):
    torch.cuda.synchronize(sys.argv[1])
print("written", flush=True)
"""


def slots(device: str, model: str, size: int) -> Mapping[str, Any]:
    """What the slot gives is what a load into host memory gives; leases end with their processes; unloading frees."""
    import torch

    import kvctl

    with _agent(device, size + BEYOND) as socket, AgentClient(socket, label="gpu-check") as client:
        request = LoadRequest(model, into="slot:m", device=device)
        report = load_slot(request, Context(), socket=socket)
        here = kvctl.load_weights(model)

        def compare() -> None:
            there = kvctl.attach("m", device=device, socket=socket)
            for name, tensor in here.items():
                if not torch.equal(there[name].cpu().view(torch.uint8), tensor.view(torch.uint8)):
                    raise IntegrityError(f"{name} differs")

        compare()
        holder = _program(HOLD, socket, device)
        assert holder.stdout is not None
        seen = int(holder.stdout.readline())
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
        if seen != sum(tensor.nbytes for tensor in here.values()):
            raise IntegrityError(f"another process sees {seen} bytes")
        out, _ = _program(WRITE, socket, device).communicate(timeout=SECONDS)
        if out != "attached\n":
            raise EnvError("a tensor that is to be read only was written", cause=out)
        compare()
        gc.collect()
        _without_leases(client)
        free = _free(device)
        freed = int(client.call("unload", slot="m", force=False, previous_only=False)["freed_bytes"])
        came_back = _free(device) - free
        if device.startswith("cuda") and came_back < size:
            raise EnvError(f"{came_back} bytes of the GPU came back of {freed}")
        return {
            "gb_per_s": report.gbps, "bytes": report.bytes, "freed_bytes": freed, "device": report.extra.get("device")
        }  # fmt: skip


@contextmanager
def _agent(device: str, nbytes: int) -> Iterator[str]:
    """An agent of its own; gives its socket."""
    with tempfile.TemporaryDirectory(prefix="kvctl-") as folder:
        socket = os.path.join(folder, "a.sock")
        command = [sys.executable, "-m", "kvctl", "-o", "jsonl", "agent", "serve", "--socket", socket]
        command += ["--device-memory", f"{device}={nbytes}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise EnvError("the agent did not start", cause=f"it ended with {process.wait()}")
            yield socket
        finally:
            process.terminate()
            process.communicate()


def _program(code: str, socket: str, device: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "KVCTL_AGENT_SOCKET": socket}
    return subprocess.Popen(
        [sys.executable, "-c", code, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _without_leases(client: AgentClient) -> None:
    deadline = time.monotonic() + SECONDS
    while client.call("ls", slot="m")["slots"][0]["leases"]:
        if time.monotonic() > deadline:
            raise EnvError("a lease outlives its process")
        time.sleep(0.02)


def _free(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    import torch

    free: int = torch.cuda.mem_get_info(device)[0]
    return free
