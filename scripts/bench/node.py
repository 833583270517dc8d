"""The storage node and native-tcp against the least that sockets can do, in one interleaved run on loopback.

`bare`: a server that only calls sendfile (kvctl.testing.bare_server), a client that sends heads made beforehand and
only receives into memory. `http.client`: Python's own and `readinto`, against static_server.py, which sends files.
`native-tcp`: our transport and our node, tokens and checks included. `node`: our node, asked by a bare client with
HTTP heads made beforehand: what the node costs without our client. Every rival moves the same ranges of one warm file
to the same places of an arena that no core's cache holds, as a load does. Latencies are the caller's: from handing
over a request to having its bytes. Where there are two cores and more, servers and clients have cores of their own,
as hosts have; `--unpinned` leaves it to the scheduler.

Usage: python -m scripts.bench.node [--out FILE] [--sizes 64KiB,1MiB,..] [--concurrency 1,4] [--rounds N] [--work DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

from kvctl.core.units import format_size, parse_size
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.api import Op, Status, Transport
from kvctl.transports.node_auth import TOKEN_HEADER, Asked, ScopedKey, read_key_file
from kvctl.transports.registry import choose, open_store, open_transports
from scripts.bench.table import percentile

ROOT: Final = Path(__file__).resolve().parents[2]
KEY: Final = "bench/object"
BURST_BYTES: Final = 256 << 20  # of one rival in one round, between these two numbers of requests
BURST_LEAST: Final = 16
BURST_MOST: Final = 600
ARENA: Final = 64 << 20
Json = dict[str, Any]  # Any: JSON


@dataclass
class Burst:
    """What one rival did in one round: seconds, latencies in seconds, CPU seconds of both ends."""

    seconds: float
    latencies: list[float]
    client_cpu: float
    server_cpu: float


@dataclass
class Measured:
    bursts: list[Burst] = field(default_factory=list)

    def row(self, size: int, ceiling: Measured) -> Json:
        """Ratios are medians over the rounds of what both did in the same one: what the machine did cancels out."""
        latencies = [value for burst in self.bursts for value in burst.latencies]
        moved = sum(len(burst.latencies) for burst in self.bursts) * size / 1e9
        pairs = list(zip(self.bursts, ceiling.bursts, strict=True))
        return {
            "p50_us": round(percentile(latencies, 0.5) * 1e6, 1),
            "p99_us": round(percentile(latencies, 0.99) * 1e6, 1),
            "gb_per_s": round(statistics.median(len(b.latencies) * size / b.seconds for b in self.bursts) / 1e9, 3),
            "client_cpu_s_per_gb": round(sum(burst.client_cpu for burst in self.bursts) / moved, 3),
            "server_cpu_s_per_gb": round(sum(burst.server_cpu for burst in self.bursts) / moved, 3),
            "speed_against_bare": round(statistics.median(bare.seconds / mine.seconds for mine, bare in pairs), 3),
            "p50_against_bare": round(
                statistics.median(
                    percentile(mine.latencies, 0.5) / percentile(bare.latencies, 0.5) for mine, bare in pairs
                ),
                2,
            ),
        }


class Rival(ABC):
    name: str

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    @abstractmethod
    def move(self, offsets: Sequence[int], size: int, view: memoryview, concurrency: int) -> list[float]:
        """Get all ranges into places of `view` in turn, `concurrency` at a time; each one's latency."""

    def burst(self, offsets: Sequence[int], size: int, view: memoryview, concurrency: int) -> Burst:
        cpu, server = time.process_time(), self._server_cpu()
        started = time.perf_counter()
        latencies = self.move(offsets, size, view, concurrency)
        seconds = time.perf_counter() - started
        return Burst(seconds, latencies, time.process_time() - cpu, self._server_cpu() - server)

    def _server_cpu(self) -> float:
        return sum(_cpu_of(pid) for parent in self._pids for pid in (parent, *_children(parent)))


class Threads(Rival):
    """Blocking clients: one thread and one connection for each request at a time."""

    def __init__(self, port: int, pids: Sequence[int]) -> None:
        super().__init__(pids)
        self._port = port
        self._sockets: list[socket.socket] = []

    @abstractmethod
    def fetch(self, number: int, offset: int, view: memoryview) -> None:
        """Client `number` fills `view` from `offset` on."""

    def prepare(self, offsets: Sequence[int], size: int, concurrency: int) -> None:
        """What is not measured."""
        while len(self._sockets) < concurrency:
            made = socket.create_connection(("127.0.0.1", self._port))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(made)

    def burst(self, offsets: Sequence[int], size: int, view: memoryview, concurrency: int) -> Burst:
        self.prepare(offsets, size, concurrency)
        return super().burst(offsets, size, view, concurrency)

    def move(self, offsets: Sequence[int], size: int, view: memoryview, concurrency: int) -> list[float]:
        latencies: list[float] = []

        def run(number: int) -> None:
            places = range(number * size, len(view) - size + 1, concurrency * size)
            for turn, offset in enumerate(offsets[number::concurrency]):
                place = places[turn % len(places)]
                begin = time.perf_counter()
                self.fetch(number, offset, view[place : place + size])
                latencies.append(time.perf_counter() - begin)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(1, concurrency)]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        return latencies

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


class Sockets(Threads):
    """Heads made before: one send and the receives are all that is measured."""

    def __init__(self, name: str, port: int, pids: Sequence[int], head: Callable[[int, int], bytes]) -> None:
        """`head` of a range's offset and length."""
        super().__init__(port, pids)
        self.name = name
        self._head = head
        self._heads: dict[int, bytes] = {}

    def prepare(self, offsets: Sequence[int], size: int, concurrency: int) -> None:
        super().prepare(offsets, size, concurrency)
        self._heads = {offset: self._head(offset, size) for offset in offsets}

    def fetch(self, number: int, offset: int, view: memoryview) -> None:
        sock = self._sockets[number]
        sock.sendall(self._heads[offset])
        data = sock.recv(1024)
        body = data.index(b"\r\n\r\n") + 4
        assert data.startswith(b"HTTP/1.1 206")
        got = len(data) - body
        view[:got] = data[body:]
        while got < len(view):
            got += sock.recv_into(view[got:], len(view) - got, socket.MSG_WAITALL)


class HttpClient(Threads):
    """What one writes without more ado: Python's http.client and `readinto`, against a server that sends files."""

    name = "http.client"

    def prepare(self, offsets: Sequence[int], size: int, concurrency: int) -> None:
        if not self._sockets:
            self._connections: list[HTTPConnection] = []
        super().prepare(offsets, size, concurrency)
        for sock in self._sockets[len(self._connections) :]:
            self._connections.append(HTTPConnection("127.0.0.1", self._port))
            self._connections[-1].sock = sock

    def fetch(self, number: int, offset: int, view: memoryview) -> None:
        connection = self._connections[number]
        connection.request("GET", f"/data/{KEY}", headers={"Range": f"bytes={offset}-{offset + len(view) - 1}"})
        answer = connection.getresponse()
        assert answer.status == 206
        got = 0
        while got < len(view):
            got += answer.readinto(view[got:])


class Ours(Rival):
    """native-tcp, driven as the executor drives it: so many operations in flight, one thread polling."""

    name = "native-tcp"

    def __init__(self, transport: Transport, pid: int, size: int) -> None:
        super().__init__([pid])
        self._transport = transport
        self._object_size = size

    def bind(self, buffer: HostBuffer) -> None:
        self._buffer = buffer

    def move(self, offsets: Sequence[int], size: int, view: memoryview, concurrency: int) -> list[float]:
        transport, latencies = self._transport, []
        begun: dict[int, float] = {}
        places = len(view) // size
        following = 0
        while following < len(offsets) or begun:
            while len(begun) < concurrency and following < len(offsets):
                place = following % places * size
                begun[following] = time.perf_counter()
                op = Op(following, "read", KEY, offsets[following], size, self._buffer, place, None, self._object_size)
                transport.submit([op])
                following += 1
            for done in transport.poll(10.0):
                latencies.append(time.perf_counter() - begun.pop(done.id))
                assert done.status is Status.DONE, done.error
        return latencies


def pin(pids: Sequence[int]) -> bool:
    """Servers on one half of the cores, this process on the other; False where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    for pid in pids if half else ():
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores[half:])
    if half:
        os.sched_setaffinity(0, cores[:half])
    return bool(half)


def _bare_head(offset: int, size: int) -> bytes:
    return f"GET / HTTP/1.1\r\nhost: bare\r\nrange: bytes={offset}-{offset + size - 1}\r\n\r\n".encode()


def _node_head(key: ScopedKey, offset: int, size: int) -> bytes:
    span = f"bytes={offset}-{offset + size - 1}"
    token = key.token(Asked("GET", f"/v1/{KEY}", span), life=600)
    fields = f"host: node\r\nuser-agent: bench\r\n{TOKEN_HEADER}: {token}\r\nrange: {span}"
    return f"GET /v1/{KEY} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


def _cpu_of(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the kernel's clock of a process: clock_getcpuclockid(3)
    except OSError:
        return 0.0


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(text) for text in file.read().split()]


@contextmanager
def server(module: str, *arguments: object) -> Iterator[tuple[int, int]]:
    """(port, pid) of a program that prints its port and ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
    finally:
        process.communicate()


def measure(rivals: Sequence[Rival], object_size: int, size: int, concurrency: int, rounds: int) -> Json:
    """One size at one concurrency; the first round warms up and does not count."""
    count = max(BURST_LEAST, min(BURST_MOST, BURST_BYTES // size))
    rng = random.Random(size * 100 + concurrency)
    found = {rival.name: Measured() for rival in rivals}
    buffer = HostBuffer(max(ARENA, concurrency * size))
    for rival in rivals:
        if isinstance(rival, Ours):
            rival.bind(buffer)
    for number in range(rounds + 1):
        offsets = [rng.randrange(object_size // size) * size for _ in range(count)]
        for rival in (*rivals[number % len(rivals) :], *rivals[: number % len(rivals)]):
            done = rival.burst(offsets, size, buffer.view, concurrency)
            assert len(done.latencies) == count
            if number:
                found[rival.name].bursts.append(done)
    buffer.close()
    bare = found["bare"]
    return {
        "size": size,
        "concurrency": concurrency,
        "requests": count * rounds,
        "rounds": rounds,
        "rivals": {name: measured.row(size, bare) for name, measured in found.items()},
    }


def show(case: Json) -> None:
    print(f"{format_size(case['size'])}, {case['concurrency']} at a time, {case['requests']} requests each", flush=True)
    for name, row in case["rivals"].items():
        print(
            f"  {name:<12} {row['gb_per_s']:7.3f} GB/s ({row['speed_against_bare']:.2f} of bare)  p50"
            f" {row['p50_us']:9.1f} us ({row['p50_against_bare']:.2f}x)  p99 {row['p99_us']:9.1f} us  CPU s/GB: client"
            f" {row['client_cpu_s_per_gb']:.3f}, server {row['server_cpu_s_per_gb']:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", default="64KiB,1MiB,4MiB,16MiB")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--object", default="256MiB", help="size of the file; it must fit into the page cache")
    parser.add_argument("--unpinned", action="store_true")
    parser.add_argument("--work", help="folder for the file (default: a temporary one)")
    options = parser.parse_args()
    object_size = parse_size(options.object)
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    concurrencies = [int(text) for text in options.concurrency.split(",")]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvctl-bench-", dir=options.work)))
        path = work / "data" / KEY
        path.parent.mkdir(parents=True)
        with open(path, "wb") as file:
            file.writelines(os.urandom(1 << 20) for _ in range(object_size >> 20))
        node = stack.enter_context(NodeProcess.start(str(work)))
        bare_port, bare_pid = stack.enter_context(server("kvctl.testing.bare_server", path))
        http_port, http_pid = stack.enter_context(server("scripts.bench.static_server", work / "data", "data"))
        config = node.store()
        (key,) = read_key_file(config.options["key_file"])
        assert isinstance(key, ScopedKey)
        store = open_store(config)
        stack.callback(store.close)
        cores = len(os.sched_getaffinity(0))
        pinned = not options.unpinned and pin([node.process.pid, bare_pid, http_pid])
        rivals: list[Threads] = [
            Sockets("bare", bare_port, [bare_pid], _bare_head),
            HttpClient(http_port, [http_pid]),
            Sockets("node", node.port, [node.process.pid], partial(_node_head, key)),
        ]
        for rival in rivals:
            stack.callback(rival.close)
        cases = []
        for concurrency in concurrencies:
            choice = choose("node", "host", "native-tcp")
            (transport,) = open_transports(config, store, choice, {"threads": str(concurrency)})
            ours = Ours(transport, node.process.pid, object_size)
            for size in sizes:
                cases.append(measure([*rivals, ours], object_size, size, concurrency, options.rounds))
                show(cases[-1])
            transport.close()
    if options.out is not None:
        document = {"schema": "kvctl.bench-node/1", "cores": cores, "pinned": pinned, "cases": cases}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
