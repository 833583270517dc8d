"""What the node counts, and its text form for Prometheus (exposition format 0.0.4). No I/O but /proc."""

from __future__ import annotations

import os
import resource
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Seconds; from a cached small read to a large object over a slow link.
_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "DELETE"})


class Metrics:
    """Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.sent = 0
        self.received = 0
        self.rdma_sent = 0
        self.rdma_received = 0
        self.connections = 0
        self.connections_total = 0
        self.connections_refused = 0
        self.connections_evicted = 0
        self.in_flight = 0
        self._started = time.time()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def finished(self, method: str, status: int, seconds: float) -> None:
        known = method if method in _METHODS else "other"
        self.requests[known, status] += 1
        buckets = self._buckets.setdefault(known, [0] * (len(_BOUNDS) + 1))
        buckets[bisect_left(_BOUNDS, seconds)] += 1
        # Counter holds any number; its type says int only
        self._seconds[known] += int(seconds * 1e9)

    def text(self, *, free_bytes: int, rdma: Mapping[str, float] | None) -> bytes:
        """The page that Prometheus reads."""
        out = _Page()
        out.family("kvctl_node_requests_total", "counter", "Requests answered.")
        for (method, status), count in sorted(self.requests.items()):
            out.line("kvctl_node_requests_total", count, method=method, status=str(status))
        out.family("kvctl_node_request_seconds", "histogram", "From the request's head to the last byte sent.")
        for method, buckets in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip((*map(str, _BOUNDS), "+Inf"), buckets, strict=True):
                total += count
                out.line("kvctl_node_request_seconds_bucket", total, method=method, le=bound)
            out.line("kvctl_node_request_seconds_sum", self._seconds[method] / 1e9, method=method)
            out.line("kvctl_node_request_seconds_count", total, method=method)
        out.one("kvctl_node_sent_bytes_total", "counter", "Bytes of objects sent in bodies.", self.sent)
        out.one("kvctl_node_received_bytes_total", "counter", "Bytes of objects received in bodies.", self.received)
        out.one("kvctl_node_rdma_sent_bytes_total", "counter", "Bytes written into readers' memory.", self.rdma_sent)
        out.one(
            "kvctl_node_rdma_received_bytes_total", "counter", "Bytes read from writers' memory.", self.rdma_received
        )
        out.family("kvctl_node_refusals_total", "counter", "Requests refused, by the code of the answer.")
        for code, count in sorted(self.refusals.items()):
            out.line("kvctl_node_refusals_total", count, code=code)
        out.one("kvctl_node_connections", "gauge", "Open connections.", self.connections)
        out.one("kvctl_node_connections_total", "counter", "Connections accepted.", self.connections_total)
        out.one("kvctl_node_connections_refused_total", "counter", "Beyond the limit.", self.connections_refused)
        out.one(
            "kvctl_node_connections_evicted_total", "counter", "Idle ones that made room.", self.connections_evicted
        )
        out.one("kvctl_node_requests_in_flight", "gauge", "Requests being answered.", self.in_flight)
        out.one("kvctl_node_free_bytes", "gauge", "Free space where the objects are.", free_bytes)
        for name, value in sorted((rdma or {}).items()):
            out.one(f"kvctl_node_rdma_{name}", "untyped", "From the RDMA engine.", value)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        out.one("process_cpu_seconds_total", "counter", "CPU time.", usage.ru_utime + usage.ru_stime)
        out.one("process_resident_memory_bytes", "gauge", "Resident memory.", resident_bytes())
        out.one("process_open_fds", "gauge", "Open descriptors.", len(os.listdir("/proc/self/fd")))
        out.one("process_start_time_seconds", "gauge", "Start, Unix time.", self._started)
        return out.bytes()


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class _Page:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, about: str) -> None:
        self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]

    def line(self, name: str, value: float, **labels: str) -> None:
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        self._lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")

    def one(self, name: str, kind: str, about: str, value: float) -> None:
        self.family(name, kind, about)
        self.line(name, value)

    def bytes(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()
