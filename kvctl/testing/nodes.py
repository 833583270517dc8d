"""Starts real storage nodes: one process each, on free loopback ports, ended by pid. For tests, demos and benches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import EnvError
from kvctl.transports.node_auth import MasterKey, Rights


@dataclass
class NodeProcess:
    """A running node. `folder` holds its objects in `data`, its keys, and its log (`node.log`)."""

    folder: str
    process: subprocess.Popen[bytes]
    host: str
    port: int
    tls: bool
    master: MasterKey | None

    @classmethod
    def start(
        cls,
        folder: str,
        *arguments: str,
        keys: bool = True,
        port: int = 0,
        data: str | None = None,
        verbose: bool = False,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> NodeProcess:
        """Starts `kvctl node serve` and returns when it listens. With `keys` False all of loopback may do anything.
        `verbose`: each request is in the log, which costs time.
        `wrapper`: a command to run it under. Raises EnvError with its log.
        """
        place = data or os.path.join(folder, "data")
        os.makedirs(place, exist_ok=True)
        master = _master_key(os.path.join(folder, "master.key")) if keys else None
        command = [
            *wrapper,
            sys.executable,
            "-m",
            "kvctl",
            "-o",
            "jsonl",
            *(["-v"] if verbose else []),
            "node",
            "serve",
            place,
        ]
        command += ["--listen", f"127.0.0.1:{port}", *arguments]
        command += (
            ["--key-file", os.path.join(folder, "master.key")] if keys else ["--allow-unauthenticated=127.0.0.0/8"]
        )
        with open(os.path.join(folder, "node.log"), "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=None if environment is None else {**os.environ, **environment},
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout as out:
            line = out.readline()
        if not line:
            process.wait()
            with open(os.path.join(folder, "node.log"), encoding="utf-8", errors="replace") as file:
                raise EnvError("the storage node did not start", cause="".join(file.readlines()[-8:]).strip())
        said = json.loads(line)
        return cls(folder, process, said["host"], said["port"], said["tls"], master)

    @property
    def data(self) -> str:
        """Where its objects are, unless `start` was told another place."""
        return os.path.join(self.folder, "data")

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def key_file(self, rights: Rights = "rw", prefix: str = "") -> str:
        """A client's key file for this node."""
        assert self.master is not None
        path = os.path.join(self.folder, f"client-{rights}-{prefix.replace('/', '_')}.key")
        if not os.path.exists(path):
            # many clients may ask at once: a key file is there whole, or not at all
            temp = f"{path}.{threading.get_ident()}"
            _write_key(temp, self.master.scoped(rights, prefix).text())
            os.replace(temp, path)
        return path

    def store(
        self, prefix: str = "", *, rights: Rights = "rw", scope: str = "", options: Mapping[str, str] | None = None
    ) -> StoreConfig:
        """The address of `prefix` on this node, with a key for `scope`."""
        found = dict(options or {})
        if self.master is not None:
            found.setdefault("key_file", self.key_file(rights, scope))
        if self.tls:
            found.setdefault("tls", "true")
        return StoreConfig(f"node://{self.address}/{prefix}".rstrip("/"), (), found)

    def metrics(self) -> dict[str, float]:
        """The numbers of /metrics, by name with labels."""
        with urlopen(f"http://{self.address}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def log(self) -> str:
        with open(os.path.join(self.folder, "node.log"), encoding="utf-8", errors="replace") as file:
            return file.read()

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Freeze it: sockets stay, nothing answers. It is frozen when this returns: the signal alone is a request."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def terminate(self, seconds: float = 30.0) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return self.process.wait(seconds)

    def close(self) -> None:
        """End it. Its data stays."""
        if self.process.poll() is None:
            self.resume()
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _master_key(path: str) -> MasterKey:
    from kvctl.transports.node_auth import read_key_file

    if not os.path.exists(path):
        _write_key(path, MasterKey.make().text())
    found: Any = read_key_file(path)[0]  # Any: the file is ours, it holds a master key
    assert isinstance(found, MasterKey)
    return found


def _write_key(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as out:
        out.write(text)
