"""`bench interference`: what a checkpoint does to a running engine's tokens: the gaps between them without one, with an
unpaced and with a paced one, and with a plain copy as a script would make it, interleaved round by round.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvctl.bench.plot import save
from kvctl.checkpoint.catalog import Catalog
from kvctl.checkpoint.create import CreateRequest, create
from kvctl.checkpoint.engine import EngineLatencies, EngineWeights
from kvctl.checkpoint.latency import Canary, Latencies
from kvctl.checkpoint.pace import Limits
from kvctl.checkpoint.shards import LiveShards, ShardSource, SlotShards, cut
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import PartialError, UsageError
from kvctl.engines.api import EngineAdapter
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.lanes import open_member, percentile

SCHEMA: Final = "kvctl.bench-interference/1"
KINDS: Final = ("baseline", "unpaced", "paced", "plain copy")
ENOUGH: Final = 50  # samples of a measurement that its p99 is taken from
_LOOK: Final = 0.05
_BASELINE: Final = 2.0  # seconds before each paced checkpoint, which are not counted


@dataclass(frozen=True, slots=True)
class InterferenceOptions:
    """`source`: engine:URL or slot:NAME. `to`: a folder for checkpoints, removed after each. `seconds`: of one
    measurement. `streams`: of our own, so that there are tokens; 0 where the engine has traffic.
    """

    engine: str
    source: str
    to: StoreConfig
    limits: Limits
    rounds: int = 10
    seconds: float = 20.0
    streams: int = 1
    shard_bytes: int = 1 << 30


@dataclass(slots=True)
class Kind:
    """One way, over all rounds. Seconds; `change_s`: of the p99 against the baseline of the same round, the median."""

    name: str
    samples: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    p99_rounds_s: list[float] = field(default_factory=list)
    change_s: float = 0.0
    bytes: int = 0
    copies: int = 0


class Watch:
    """Notes every gap between tokens with the moment when it was told."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._lock = threading.Lock()
        self._seen: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvctl-watch", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(_LOOK):
            gaps = self._latencies.take()
            now = time.monotonic()
            with self._lock:
                self._seen += [(now, gap) for gap in gaps]

    def between(self, start: float, end: float) -> list[float]:
        """The gaps told in [start, end), once: what is older is forgotten."""
        time.sleep(2 * _LOOK)
        with self._lock:
            found = [gap for at, gap in self._seen if start <= at < end]
            self._seen = [item for item in self._seen if item[0] >= end]
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def bench_interference(
    options: InterferenceOptions, open_engine: Callable[[], EngineAdapter], ctx: Context
) -> dict[str, Any]:  # Any: JSON
    """Raises UsageError, PartialError when the engine told too little to measure, and what the engine says."""
    kinds = [name for name in KINDS if name != "plain copy" or options.source.startswith("engine:")]
    gaps: dict[str, list[list[float]]] = {name: [] for name in kinds}
    found = {name: Kind(name) for name in kinds}
    with ExitStack() as stack:
        for _ in range(options.streams):
            stack.enter_context(closing(Canary(options.engine)))
        latencies = stack.enter_context(closing(EngineLatencies(open_engine())))
        watch = stack.enter_context(closing(Watch(latencies)))
        paced = stack.enter_context(closing(EngineLatencies(open_engine())))
        run = _Runs(options, open_engine, ctx, paced)
        ctx.progress.note(f"{options.rounds} rounds of {len(kinds)} measurements of {options.seconds:g} s")
        for number in range(options.rounds):
            for shift in range(len(kinds)):
                name = kinds[(number + shift) % len(kinds)]  # each begins another round
                ctx.cancel.check("measuring")
                gaps[name].append(run.measure(name, watch, found[name]))
                ctx.progress.note(
                    f"round {number + 1}, {name}: p99 {1000 * percentile(gaps[name][-1], 0.99):.1f} ms "
                    f"of {len(gaps[name][-1])} gaps"
                )
        resolution = latencies.resolution
    thin = [name for name in kinds for sample in gaps[name] if len(sample) < ENOUGH]
    if thin:
        raise PartialError(
            f"the engine told too few tokens to measure ({thin[0]})", cause=f"fewer than {ENOUGH} in a measurement",
            hint="give it traffic, more --streams, or --seconds",
        )  # fmt: skip
    return _document(options, found, gaps, resolution)


class _Runs:
    def __init__(
        self, options: InterferenceOptions, open_engine: Callable[[], EngineAdapter], ctx: Context, paced: Latencies
    ) -> None:
        self._options = options
        self._open = open_engine
        self._ctx = ctx
        self._paced = paced

    def measure(self, name: str, watch: Watch, kind: Kind) -> list[float]:
        """The gaps while the thing is done again and again, for so many seconds."""
        ends = time.monotonic() + self._options.seconds
        found: list[float] = []
        while True:
            start = time.monotonic()
            if start >= ends:
                return found
            if name == "baseline":
                self._ctx.cancel.wait(ends - start)
            elif name == "plain copy":
                kind.bytes += self._plain()
            else:
                limits = self._options.limits if name == "paced" else Limits()
                quiet = _BASELINE if name == "paced" else 0.0
                kind.bytes += self._checkpoint(limits, quiet)
                start += quiet
            kind.copies += name != "baseline"
            found += watch.between(start, time.monotonic())

    def _checkpoint(self, limits: Limits, quiet: float) -> int:
        options = self._options
        request = CreateRequest(options.to, limits, baseline_seconds=quiet)
        with closing(self._source()) as source:
            report = create(source, request, self._ctx.quiet(), latencies=self._paced)
        member = open_member(options.to.url, 0, options.to, self._ctx)
        try:
            Catalog(member.store).remove(str(report.extra["id"]))
            member.store.delete(["LATEST"])
        finally:
            member.store.close()
        return report.written

    def _source(self) -> ShardSource:
        options = self._options
        kind, _, rest = options.source.partition(":")
        if kind == "slot":
            return SlotShards(rest)
        if kind == "engine":
            return LiveShards(EngineWeights(self._open(), rest), options.shard_bytes)
        raise UsageError(f"{options.source!r} is no live source", hint="slot:NAME or engine:URL")

    def _plain(self) -> int:
        """All tensors, each in one read, then one file, as a script would: no pace, no thought."""
        with closing(EngineWeights(self._open(), self._options.engine)) as live:
            ((raw, size),) = cut(live.tensors(), 1 << 62)
            buffer = HostBuffer(len(raw) + size)
            try:
                buffer.view[: len(raw)] = raw
                at = len(raw)
                for tensor in sorted(live.tensors(), key=lambda item: -item.nbytes):
                    live.read(tensor.name, 0, buffer.view[at : at + tensor.nbytes])
                    at += tensor.nbytes
                if self._options.to.scheme == "file":
                    folder = self._options.to.url.removeprefix("file://")
                    os.makedirs(folder, exist_ok=True)
                    path = os.path.join(folder, ".kvctl-bench-plain")
                    with open(path, "wb") as file:
                        file.write(buffer.view)
                        file.flush()
                        os.fsync(file.fileno())
                    os.unlink(path)
                return buffer.nbytes
            finally:
                buffer.close()


def _document(
    options: InterferenceOptions, kinds: Mapping[str, Kind], gaps: Mapping[str, Sequence[list[float]]], resolution: str
) -> dict[str, Any]:  # Any: JSON
    base = [percentile(sample, 0.99) for sample in gaps["baseline"]]
    for name, kind in kinds.items():
        flat = [gap for sample in gaps[name] for gap in sample]
        kind.samples = len(flat)
        kind.p50_s, kind.p99_s = percentile(flat, 0.5), percentile(flat, 0.99)
        kind.p99_rounds_s = [percentile(sample, 0.99) for sample in gaps[name]]
        kind.change_s = statistics.median(mine - other for mine, other in zip(kind.p99_rounds_s, base, strict=True))
    changes = {name: kind.change_s for name, kind in kinds.items()}
    return {
        "schema": SCHEMA,
        "engine": options.engine,
        "source": options.source,
        "rounds": options.rounds,
        "seconds_per_measurement": options.seconds,
        "resolution": resolution,
        "limits": asdict(options.limits),
        "kinds": [asdict(kind) for kind in kinds.values()],
        "baseline_spread_s": max(base) - min(base),
        "paced_of_unpaced": changes["paced"] / changes["unpaced"] if changes["unpaced"] > 0 else None,
        "within_baseline_spread": changes["paced"] <= max(base) - min(base),
    }


def write_interference_plot(document: Mapping[str, Any], path: str) -> None:  # Any: JSON
    """p99 per round of each kind. Raises AuthError or EnvError when it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    panel = figure.subplots()
    for kind in document["kinds"]:
        rounds = range(1, len(kind["p99_rounds_s"]) + 1)
        panel.plot(rounds, [1000 * value for value in kind["p99_rounds_s"]], marker="o", label=kind["name"])
    panel.set_xlabel("round")
    panel.set_ylabel("p99 of inter-token gaps, ms")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8)
    save(figure, path)
