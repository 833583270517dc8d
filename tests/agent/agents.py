"""Starts real agents, ended by pid, and programs that use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvctl.agent.client import AgentClient
from kvctl.agent.kv_folders import memory_roots, remove_dead
from kvctl.testing.models import LlamaShape, write_llama

DEADLINE = 120.0


@dataclass
class AgentProcess:
    """A running agent. `folder` holds its socket and its log."""

    folder: Path
    process: subprocess.Popen[bytes]
    socket: str
    peers: str
    one_sided: str

    @classmethod
    def start(cls, folder: Path, *arguments: str, peers: bool = False, memory: str = "256MiB") -> Self:
        """`kvctl agent serve`, listening when this returns."""
        folder.mkdir(exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "kvctl", "-o", "jsonl", "agent", "serve", "--memory", memory, *arguments]
        command += ["--socket", str(folder / "a.sock")]
        if peers:
            command += ["--peers", "127.0.0.1:0", "--allow-unauthenticated", "127.0.0.0/8"]
        with (folder / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert process.stdout is not None
        with process.stdout as out:
            line = out.readline()
        assert line, (folder / "agent.log").read_text()
        said = json.loads(line)
        return cls(folder, process, said["socket"], said["peers"], said["one_sided"])

    @property
    def place(self) -> str:
        """HOST:PORT for its peers."""
        return self.peers.removeprefix("peer://")

    def client(self, label: str = "test") -> AgentClient:
        return AgentClient(self.socket, label=label)

    def ls(self, slot: str | None = None) -> list[dict[str, Any]]:  # Any: JSON
        with self.client() as client:
            found: list[dict[str, Any]] = client.call("ls", slot=slot)["slots"]
        return found

    def used(self) -> int:
        with self.client() as client:
            return int(client.call("ls")["used_bytes"])

    def tiers(self) -> dict[str, Any]:  # Any: JSON
        """The KV tiers by name."""
        with self.client() as client:
            return {tier["name"]: tier for tier in client.call("kv_tiers")["tiers"]}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for root in memory_roots():
            remove_dead(root)  # its KV in memory, which the next agent would find


def eventually(found: Callable[[], object], what: str) -> None:
    """Wait until `found` is true; a failure of the test when it never is."""
    deadline = time.monotonic() + DEADLINE
    while not found():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def python(code: str, socket: str, *, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A program of its own over this agent; it talks through stdin and stdout."""
    environment = {**os.environ, "KVCTL_AGENT_SOCKET": socket}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=stdout, text=True, env=environment
    )


def kvctl(
    *arguments: str, socket: str, state: Path, seconds: float = DEADLINE
) -> tuple[int, dict[str, Any], str]:  # Any: JSON
    """Run the program: its exit code, its document (or the error's), stderr."""
    environment = {**os.environ, "KVCTL_AGENT_SOCKET": socket, "KVCTL_STATE_DIR": str(state)}
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", "-o", "json", *arguments],
        capture_output=True, text=True, env=environment, timeout=seconds, check=False,
    )  # fmt: skip
    if done.returncode:
        return done.returncode, json.loads(done.stderr.splitlines()[-1])["error"], done.stderr
    return 0, json.loads(done.stdout), done.stderr


def read_slot(agent: AgentProcess, slot: str, ident: str | None = None) -> dict[str, bytes]:
    """Every file of a slot as bytes, through the agent's own descriptors."""
    with agent.client() as client:
        opened = client.open(slot, ident)
        found = {}
        for file in opened.files:
            found[file.name] = os.pread(file.fd, file.size, 0)
            os.close(file.fd)
    return found


def same_files(found: dict[str, bytes], wanted: dict[str, bytes], names: Sequence[str] | None = None) -> bool:
    return all(found[name] == wanted[name] for name in (names or wanted))


def write_aligned(folder: Path, *, seed: int = 0, dtype: str = "F32") -> dict[str, bytes]:
    """A model whose header is padded to eight bytes, as safetensors writes it: its tensors can be used in place."""
    for pad in range(8):
        files = write_llama(str(folder), LlamaShape(dtype=dtype), seed=seed, metadata={"pad": "x" * pad})
        if int.from_bytes(files["model.safetensors"][:8], "little") % 8 == 0:
            return files
    raise AssertionError
