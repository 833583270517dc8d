"""Sources in processes of their own, and readers of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvctl.core.addresses import StoreConfig
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Completion, Op
from kvctl_nixl.peer.store import PeerStore
from kvctl_nixl.quarantine import QUARANTINE
from kvctl_nixl.ucx import NixlUcx, open_transport
from tests.nixl.source_child import SIZE

CHILD = Path(__file__).with_name("source_child.py")
SECONDS = 60.0


class Child:
    """A source in a process of its own."""

    def __init__(self, port: int = 0, key: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(port), *([key] if key else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def publish_again(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.line() == "again"

    def stop(self) -> None:
        """And it has stopped when this returns: the signal alone is only a request."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Its exit status when it ends in order."""
        self.go_on()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        status = self.process.wait(timeout=SECONDS)
        self.process.stdout.close()
        return status


@contextlib.contextmanager
def running(port: int = 0, key: str = "") -> Iterator[Child]:
    child = Child(port, key)
    try:
        yield child
    finally:
        if child.process.poll() is None:
            child.kill()
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def reading(url: str, **options: str) -> Iterator[tuple[PeerStore, NixlUcx]]:
    config = StoreConfig(url, (), {name: options.pop(name) for name in ("key_file", "timeout") if name in options})
    store = PeerStore(config)
    with contextlib.closing(store), contextlib.closing(open_transport(config, store, None, options)) as transport:
        yield store, transport


def one(transport: NixlUcx, buffer: HostBuffer, key: str = "model/a", version: str | None = None) -> Completion:
    return drive(transport, [Op(1, "read", key, 0, SIZE, buffer, version=version)])[1]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def nothing_in_quarantine() -> bool:
    QUARANTINE.release_ended()
    return not len(QUARANTINE)
