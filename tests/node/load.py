"""A node under load: many clients that read and write and check every byte, some that break off, and restarts. Used by
a test for seconds, and by the soak for minutes.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvctl.core.context import RetryPolicy
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Store
from kvctl.transports.registry import open_store
from kvctl.transports.retry import RetryStore

PATIENT = RetryPolicy(base=0.02, cap=0.5, attempts=60, stall_timeout=60.0)


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


def run_client(node: NodeProcess, number: int, more: Callable[[int], bool], load: Load) -> None:
    """Turns until `more(turn)` says no: write, read back, list; in one of a hundred the connection is broken off."""
    rng = random.Random(number)
    store: Store = RetryStore(open_store(node.store(f"c{number}")), PATIENT)
    try:
        turn = 0
        while more(turn):
            key, data = f"k{turn % 7}", content(number, turn)
            store.put(key, data)
            start = rng.randrange(len(data))
            if store.get(key) != data or store.get(key, start, 1000) != data[start : start + 1000]:
                load.add(wrong=f"client {number}, turn {turn}: other bytes")
            if turn % 10 == 9 and len(list(store.list())) != 7:
                load.add(wrong=f"client {number}, turn {turn}: another list")
            if rng.random() < 0.04:  # of three or four requests a turn: one of a hundred
                break_off(node, number, load)
            load.add(done=1)
            turn += 1
    except Exception as problem:
        load.add(wrong=f"client {number}: {type(problem).__name__}: {problem}")
    finally:
        store.close()


def break_off(node: NodeProcess, number: int, load: Load) -> None:
    """Begin an upload and reset the connection in the middle of its body."""
    from tests.node.rawhttp import Key, Raw

    assert node.master is not None
    key = Key.derived(node.master.text())
    try:
        raw = Raw((node.host, node.port), key)
    except OSError:
        return  # the node is just being restarted
    try:
        raw.send("PUT", f"/v1/c{number}/k0", None, content_length="1000000")
        raw.sock.sendall(bytes(10_000))
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    except OSError:
        return
    finally:
        raw.close()
    load.add(aborted=1)


def run_load(node: NodeProcess, clients: int, more: Callable[[int], bool], between: Callable[[Load], None]) -> Load:
    """`between` runs in this thread while the clients work, and gets their counts."""
    load = Load()
    threads = [
        threading.Thread(target=run_client, args=(node, number, more, load), name=f"client-{number}")
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    between(load)
    for thread in threads:
        thread.join()
    return load
