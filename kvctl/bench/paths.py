"""`bench paths`: every path to a user's own store that can run here, side by side with the ceiling of its medium.

A test object goes under a fresh prefix and is removed. Rounds are interleaved: in each round every rival reads once per
size and concurrency, beginning with another one each time, so that what disturbs the machine disturbs all of them. Only
reads are measured.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from urllib.request import urlopen

from kvctl.bench.bare_rdma import RdmaRival, why_not
from kvctl.bench.ceilings import CEILING, READINTO, Ceiling, make_ceiling
from kvctl.bench.rivals import Batch, Memory, Range, Rival, TransportRival, check_content
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import KvctlError, PartialError, UsageError
from kvctl.core.units import MIB, format_size, gigabytes_per_second
from kvctl.transfer.lanes import percentile
from kvctl.transports import registry
from kvctl.transports.api import Store
from kvctl.transports.retry import RetryStore
from kvctl.transports.scratch import below, fresh_prefix, sweep

SCHEMA: Final = "kvctl.bench-paths/1"
KEY: Final = "object.bin"
SIZES: Final = (64 << 10, MIB, 4 * MIB, 16 * MIB)
CONCURRENCIES: Final = (1, 4)
MOST_BYTES: Final = 1024 * MIB
MOST_AT_ONCE: Final = 1024
_LEAST_OBJECT: Final = 64 * MIB
_RDMA_RANK: Final = 30  # of transports that move bytes by RDMA
RDMA_CEILING: Final = "ceiling-rdma"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Sizes in bytes, `seconds` per measurement, `transport` 'auto' for every one that can run here."""

    sizes: Sequence[int] = SIZES
    concurrencies: Sequence[int] = CONCURRENCIES
    rounds: int = 3
    seconds: float = 0.5
    transport: str = "auto"
    transport_options: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False


@dataclass(slots=True)
class Cell:
    """One path at one size and concurrency. Rates are medians over the rounds, latencies over all requests; CPU
    seconds per decimal GB. `of_ceiling` is the median of the rounds' own ratios to `ceiling`, the name of the one that
    this path is held to; `p50_ratio` how many times the ceiling's p50 a request took.
    """

    path: str
    size: int
    concurrency: int
    requests: int
    bytes: int
    gb_per_s: float
    gb_per_s_rounds: list[float]
    p50_s: float
    p99_s: float
    client_cpu_s_per_gb: float
    server_cpu_s_per_gb: float | None
    ceiling: str = ""
    of_ceiling: float | None = None
    p50_ratio: float | None = None


@dataclass(slots=True)
class StoreResult:
    """`ceiling` and `rdma_ceiling`: how each was measured, or why not. `passed_over`: what is faster than the choice of
    `auto`, and why it does not run. `failed`: what broke while it was measured. `left`: objects that are still there.
    """

    name: str
    url: str
    prefix: str
    ceiling: str
    rdma_ceiling: str
    server_cpu: str
    auto: str
    auto_reason: str
    passed_over: list[tuple[str, str]]
    unavailable: list[dict[str, str]]
    cells: list[Cell] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PathsResult:
    options: BenchOptions
    started: str
    stores: list[StoreResult] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": SCHEMA,
            "started": self.started,
            "seconds": self.seconds,
            "host": {
                "cpus": len(os.sched_getaffinity(0)),
                "system": f"{platform.system()} {platform.release()} {platform.machine()}",
                "python": platform.python_version(),
            },
            "rounds": self.options.rounds,
            "seconds_per_measurement": self.options.seconds,
            "stores": [asdict(store) for store in self.stores],
        }

    def require_measured(self) -> None:
        """Raises PartialError when a path broke, or test objects are left behind."""
        for store in self.stores:
            if store.failed:
                first = store.failed[0]
                raise PartialError(
                    f"{len(store.failed)} paths to {store.url} could not be measured: "
                    f"{', '.join(item['path'] for item in store.failed)}",
                    cause=first["error"],
                    hint="`kvctl transports check` says whether they keep their promises",
                )
            if store.left and not self.options.keep:
                raise PartialError(
                    f"test objects are left under {store.url}/{store.prefix}", hint="remove the prefix by hand"
                )


def bench_paths(stores: Sequence[tuple[str, StoreConfig]], options: BenchOptions, ctx: Context) -> PathsResult:
    """Measure every (name, store). Raises UsageError for options that mean nothing, and a store's own error when the
    test object cannot be stored or removed.
    """
    if any(size <= 0 for size in options.sizes) or any(count <= 0 for count in options.concurrencies):
        raise UsageError("sizes and concurrencies are positive")
    if max(options.sizes) > MOST_BYTES or max(options.concurrencies) > MOST_AT_ONCE:
        raise UsageError(
            f"a request of more than {format_size(MOST_BYTES)}, or more than {MOST_AT_ONCE} at once, is not measured",
            hint="the test object and every request's memory are kept in host memory",
        )
    if options.transport_options and options.transport == "auto":
        raise UsageError("--transport-opt needs --transport: options belong to one", hint="name the transport")
    result = PathsResult(options, datetime.now(UTC).isoformat(timespec="seconds"))
    started = time.monotonic()
    for name, config in stores:
        result.stores.append(_bench_store(name, config, options, ctx))
    result.seconds = time.monotonic() - started
    return result


def _bench_store(name: str, config: StoreConfig, options: BenchOptions, ctx: Context) -> StoreResult:
    asked = registry.open_store(config)
    try:
        choice = registry.choose(config.scheme, "host", options.transport, stores=((config, asked),))
        specs, unavailable = _specs(config, asked, options.transport)
    finally:
        asked.close()
    prefix = fresh_prefix("bench")
    place = below(config, prefix)
    found = StoreResult(
        name,
        config.url,
        prefix,
        ceiling="",
        rdma_ceiling="",
        server_cpu="",
        auto=choice.spec.name,
        auto_reason=choice.reason,
        passed_over=list(choice.passed_over),
        unavailable=unavailable,
    )
    if found.name == config.url and config.endpoints:
        found.notes.append(f"over {', '.join(config.endpoints)}, requests in turn")

    def wrapped(store: Store) -> Store:
        return RetryStore(store, ctx.retry)

    data = memoryview(os.urandom(max(_LEAST_OBJECT, 2 * max(options.sizes))))
    try:
        with ExitStack() as stack:
            store = wrapped(registry.open_store(place))
            stack.callback(store.close)
            ctx.progress.note(f"{name}: storing {format_size(len(data))} under {place.url}/")
            version = store.put(KEY, data).version
            _measure(found, place, specs, version, data, options, ctx, stack)
    finally:
        found.left = [KEY] if options.keep else sweep(place, wrapped)
    return found


def _specs(config: StoreConfig, store: Store, name: str) -> tuple[list[registry.TransportSpec], list[dict[str, str]]]:
    """What is measured, and what cannot be and why."""
    specs: list[registry.TransportSpec] = []
    unavailable: list[dict[str, str]] = []
    for spec in sorted(registry.transport_specs().values(), key=lambda item: (-item.rank, item.name)):
        if (spec.schemes and config.scheme not in spec.schemes) or name not in {"auto", spec.name}:
            continue
        reason, hint = _refusal(spec, config, store, named=name != "auto")
        if reason:
            unavailable.append({"path": spec.name, "reason": reason, "hint": hint})
        else:
            specs.append(spec)
    return specs, unavailable


def _refusal(spec: registry.TransportSpec, config: StoreConfig, store: Store, *, named: bool) -> tuple[str, str]:
    """(why a transport is not measured, how to get it); empty when it is."""
    if "host" not in spec.memory_kinds:
        kinds = ", ".join(sorted(spec.memory_kinds))
        return f"it moves bytes to {kinds} memory: `scripts/gpu-check` measures it", ""
    probed = registry.probe(spec)
    if not probed.available:
        return probed.reason, probed.hint or spec.install_hint
    if named:
        return "", ""
    if spec.rank < 0:
        return "it runs only when asked for by name", f"--transport {spec.name}"
    return registry.unserved(spec, ((config, store),)), ""


def _measure(
    found: StoreResult,
    place: StoreConfig,
    specs: Sequence[registry.TransportSpec],
    version: str,
    data: memoryview,
    options: BenchOptions,
    ctx: Context,
    stack: ExitStack,
) -> None:
    most, largest = max(options.concurrencies), max(options.sizes)
    memory = Memory(max(2, most), largest)
    stack.callback(memory.close)
    endpoint = place.endpoints[0] if place.endpoints else ""
    ceiling: Ceiling | None = None
    try:
        ceiling = make_ceiling(place, endpoint, KEY, data, options.transport_options)
    except (KvctlError, OSError) as error:
        found.failed.append({"path": CEILING, "error": str(error)})
    rivals: list[Rival] = []
    if ceiling is not None:
        stack.callback(ceiling.close)
        rivals += ceiling.rivals
        found.ceiling = ceiling.how
    if any(spec.rank == _RDMA_RANK or spec.name == "s3-rdma" for spec in specs):
        _add_rdma(found, rivals, data, stack)
    for spec in specs:
        try:
            opened = _open(spec, place, version, len(data), most, options, found)
        except KvctlError as error:
            found.failed.append({"path": spec.name, "error": str(error)})
            continue
        stack.callback(opened.close)
        rivals.append(opened)
    warm = _ranges(len(data), min(options.sizes))
    for rival in list(rivals):
        try:
            check_content(rival, memory, warm, data)
        except (KvctlError, OSError) as error:
            rivals.remove(rival)
            found.failed.append({"path": rival.name, "error": str(error)})
    server = _ServerCpu(place, endpoint, ceiling)
    found.server_cpu = server.how
    _rounds(found, rivals, memory, len(data), server, options, ctx)


def _add_rdma(found: StoreResult, rivals: list[Rival], data: memoryview, stack: ExitStack) -> None:
    """The ceiling of the RDMA paths beside that of the others."""
    reason = why_not()
    if reason:
        found.rdma_ceiling = f"not measured: {reason}"
        return
    try:
        bare = RdmaRival(RDMA_CEILING, data)
    except KvctlError as error:
        found.rdma_ceiling = f"not measured: {error}"
        return
    stack.callback(bare.close)
    rivals.append(bare)
    found.rdma_ceiling = (
        f"bare RDMA WRITEs between two queue pairs of {bare.port.device} of this host, into the same memory: no "
        "server, no protocol, no network beyond the device"
    )


def _open(
    spec: registry.TransportSpec,
    place: StoreConfig,
    version: str,
    size: int,
    most: int,
    options: BenchOptions,
    found: StoreResult,
) -> TransportRival:
    """The transport, with as many threads as the largest concurrency needs, where it lets them be told."""
    chosen = dict(options.transport_options)
    choice = registry.Choice(spec, "measured")

    def opened() -> TransportRival:
        store = registry.open_store(place)
        try:
            ways = registry.open_transports(place, store, choice, chosen)
        except BaseException:
            store.close()
            raise
        return TransportRival(spec.name, store, ways, KEY, version, size)

    rival = opened()
    if rival.room < most and "threads" not in chosen and any(option.name == "threads" for option in spec.options):
        rival.close()
        chosen["threads"] = str(most)
        found.notes.append(f"{spec.name} ran with threads={most}, for {most} requests at once")
        rival = opened()
    if rival.room < most:
        found.notes.append(f"{spec.name} works on {rival.room} requests at once; further ones waited")
    return rival


def _ranges(total: int, size: int) -> list[Range]:
    """The object in pieces of `size`."""
    return [(start, size) for start in range(0, total - size + 1, size)]


def _rounds(
    found: StoreResult,
    rivals: Sequence[Rival],
    memory: Memory,
    total: int,
    server: _ServerCpu,
    options: BenchOptions,
    ctx: Context,
) -> None:
    dead: set[str] = set()
    cells = len(options.sizes) * len(options.concurrencies)
    for index, size in enumerate(options.sizes):
        for place, concurrency in enumerate(options.concurrencies):
            taken: dict[str, list[tuple[Batch, float | None]]] = {rival.name: [] for rival in rivals}
            number = index * len(options.concurrencies) + place + 1
            ctx.progress.note(f"{found.name}: {format_size(size)} x {concurrency} ({number} of {cells})")
            ranges = _ranges(total, size)
            for turn in range(options.rounds):
                shift = turn % len(rivals) if rivals else 0
                for rival in [*rivals[shift:], *rivals[:shift]]:
                    ctx.cancel.check("measuring")
                    if rival.name in dead:
                        continue
                    before = server.now(rival.name)
                    try:
                        batch = rival.batch(memory, ranges, concurrency, options.seconds)
                    except (KvctlError, OSError) as error:
                        dead.add(rival.name)
                        found.failed.append({"path": rival.name, "error": str(error)})
                        continue
                    after = server.now(rival.name)
                    spent = after - before if before is not None and after is not None else None
                    taken[rival.name].append((batch, spent))
            found.cells += _cells(taken, size, concurrency)


def _cells(taken: Mapping[str, Sequence[tuple[Batch, float | None]]], size: int, concurrency: int) -> list[Cell]:
    made: list[Cell] = []
    for path, rounds in taken.items():
        if not rounds:
            continue
        batches = [batch for batch, _ in rounds]
        moved = sum(batch.bytes for batch in batches)
        requests = [seconds for batch in batches for seconds in batch.requests]
        servers = [spent for _, spent in rounds if spent is not None]
        rates = [gigabytes_per_second(batch.bytes, batch.wall) for batch in batches]
        made.append(
            Cell(
                path,
                size,
                concurrency,
                requests=len(requests),
                bytes=moved,
                gb_per_s=statistics.median(rates),
                gb_per_s_rounds=rates,
                p50_s=percentile(requests, 0.5),
                p99_s=percentile(requests, 0.99),
                client_cpu_s_per_gb=sum(batch.cpu for batch in batches) / (moved / 1e9),
                server_cpu_s_per_gb=sum(servers) / (moved / 1e9) if len(servers) == len(rounds) else None,
            )
        )
    by_name = {cell.path: cell for cell in made}
    for cell in made:
        if cell.path in {CEILING, RDMA_CEILING}:
            continue
        spec = registry.transport_specs().get(cell.path)
        rdma = spec is not None and (spec.rank == _RDMA_RANK or spec.name == "s3-rdma")
        ceiling = by_name.get(RDMA_CEILING if rdma else CEILING)
        if ceiling is not None:
            pairs = zip(cell.gb_per_s_rounds, ceiling.gb_per_s_rounds, strict=False)
            cell.ceiling = ceiling.path
            cell.of_ceiling = statistics.median(mine / its for mine, its in pairs if its)
            cell.p50_ratio = cell.p50_s / ceiling.p50_s if ceiling.p50_s else None
    return made


class _ServerCpu:
    """CPU seconds of the other end: the ceiling's own server, and a storage node by its /metrics."""

    def __init__(self, place: StoreConfig, endpoint: str, ceiling: Ceiling | None) -> None:
        self._ceiling = ceiling
        self._url = ""
        self.how = "unknown: the server does not tell"
        if place.scheme == "file":
            self.how = "none: the client reads the files itself"
        if place.scheme == "node":
            way = endpoint or place.url.removeprefix("node://").partition("/")[0]
            scheme = "https" if place.options.get("tls") == "true" else "http"
            self._url = f"{way if '://' in way else f'{scheme}://{way}'}/metrics"
            self.how = "the node's process_cpu_seconds_total at /metrics before and after each measurement"
            try:
                self._node()
            except (OSError, ValueError) as problem:
                self._url, self.how = "", f"unknown: {way} gives no /metrics ({problem})"

    def now(self, path: str) -> float | None:
        if path == RDMA_CEILING:
            return None
        if path in {CEILING, READINTO}:
            return self._ceiling.server_cpu(path) if self._ceiling is not None else None
        if not self._url:
            return None
        try:
            return self._node()
        except (OSError, ValueError):
            return None

    def _node(self) -> float:
        with urlopen(self._url, timeout=5) as answer:  # noqa: S310 - http(s) of the user's own node
            text: str = answer.read(1 << 20).decode("utf-8", "replace")
        for line in text.splitlines():
            if line.startswith("process_cpu_seconds_total "):
                return float(line.split()[1])
        raise ValueError("no process_cpu_seconds_total in it")
