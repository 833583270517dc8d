"""A node under load: many clients that read and write and check every byte, some that break off, and restarts. Used by
a test for seconds, and by the soak for minutes.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvctl.core.context import RetryPolicy
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Op, Status, Store, Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl.transports.retry import RetryStore

# a node that is restarted on a busy machine may take many seconds
PATIENT = RetryPolicy(base=0.02, cap=0.5, attempts=1000, stall_timeout=120.0)


@dataclass
class Load:
    """What many clients did: operations done, requests broken off, and everything that was wrong."""

    done: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, done: int = 0, aborted: int = 0, wrong: str = "") -> None:
        with self.lock:
            self.done += done
            self.aborted += aborted
            if wrong:
                self.wrong.append(wrong)


def content(client: int, turn: int) -> bytes:
    """Of 1 byte to 200 kB, told by who wrote it and when."""
    rng = random.Random(f"{client}/{turn}")
    return rng.randbytes(int(10 ** rng.uniform(0, 5.3)))


def run_client(node: NodeProcess, number: int, more: Callable[[int], bool], load: Load, seed: int) -> None:
    """Turns until `more(turn)` says no: write, read back both ways, list; of a hundred requests one is broken off."""
    rng = random.Random(f"{seed}/{number}")
    config = node.store(f"c{number}")
    store: Store = RetryStore(open_store(config), PATIENT)
    (transport,) = open_transports(config, store, choose("node", "host", "native-tcp"), {"threads": "1"})
    buffer = HostBuffer(1 << 18)
    try:
        turn = 0
        while more(turn):
            key, data = f"k{turn % 7}", content(number, turn)
            version = store.put(key, data).version
            start = rng.randrange(len(data))
            if store.get(key) != data or store.get(key, start, 1000) != data[start : start + 1000]:
                load.add(wrong=f"client {number}, turn {turn}: other bytes")
            if read_bulk(transport, buffer, key, start, data, version) != data[start:]:
                load.add(wrong=f"client {number}, turn {turn}: other bytes by native-tcp")
            if turn % 10 == 9 and len(list(store.list())) != 7:
                load.add(wrong=f"client {number}, turn {turn}: another list")
            if rng.random() < 0.045:  # of four or five requests a turn
                break_off(node, f"/v1/c{number}/{key if turn % 2 else 'k0'}", load, upload=turn % 2 == 0)
            load.add(done=1)
            turn += 1
    except Exception as problem:
        load.add(wrong=f"client {number}: {type(problem).__name__}: {problem}")
    finally:
        transport.close()
        store.close()
        buffer.close()


def read_bulk(transport: Transport, buffer: HostBuffer, key: str, start: int, data: bytes, version: str) -> bytes:
    """The object from `start` on. A transport has no retry: what the executor would do is done here."""
    op = Op(1, "read", key, start, len(data) - start, buffer, 0, version, len(data))
    deadline = time.monotonic() + PATIENT.stall_timeout
    while True:
        done = drive(transport, [op])[1]
        if done.status is Status.DONE:
            return bytes(op.view)
        assert done.error is not None
        if not done.error.retryable or time.monotonic() > deadline:
            raise done.error
        time.sleep(PATIENT.base)


def break_off(node: NodeProcess, target: str, load: Load, *, upload: bool) -> None:
    """Begin an upload, or a download, and reset the connection in the middle of its body."""
    from tests.node.rawhttp import Key, Raw

    assert node.master is not None
    key = Key.derived(node.master.text())
    try:
        raw = Raw((node.host, node.port), key)
    except OSError:
        return  # the node is just being restarted
    try:
        if upload:
            raw.send("PUT", target, None, content_length="1000000")
            raw.sock.sendall(bytes(10_000))
        else:
            raw.send("GET", target)
            raw.file.read(20)
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    except OSError:
        return
    finally:
        raw.close()
    load.add(aborted=1)


def run_load(
    node: NodeProcess, clients: int, more: Callable[[int], bool], between: Callable[[Load], None], *, seed: int = 0
) -> Load:
    """`between` runs in this thread while the clients work, and gets their counts."""
    load = Load()
    threads = [
        threading.Thread(target=run_client, args=(node, number, more, load, seed), name=f"client-{number}")
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    between(load)
    for thread in threads:
        thread.join()
    return load
