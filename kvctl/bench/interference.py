"""`bench interference`: what a checkpoint does to a running engine's tokens: the gaps between them without one, with an
unpaced and with a paced one, and with a plain copy as a script would make it, interleaved round by round.
"""

from __future__ import annotations

import os
import statistics
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
from kvctl.checkpoint.shards import LiveShards, ShardSource, SlotShards, cut, parts_of
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import PartialError, UsageError
from kvctl.engines.api import EngineAdapter, Sample
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.lanes import open_member, percentile
from kvctl.transfer.report import Report
from kvctl.weights.safetensors import parse_header

SCHEMA: Final = "kvctl.bench-interference/1"
KINDS: Final = ("baseline", "unpaced", "paced", "plain copy")
ENOUGH: Final = 100  # steps of a measurement that its p99 is taken from
_LOOK: Final = 1.0
_LARGEST: Final = 64 << 20  # bytes that an engine gives at once
_PATIENCE: Final = 6  # times the seconds of a measurement, for an engine whose steps are slow


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
    """One way, over all rounds. Seconds; `change_s`: of the p99 against the baseline of the same round, the median.
    `samples`: gaps between tokens, `steps`: of the engine, which each gives a token to every stream. `busy_s`: how long
    copies ran. `pacing`: what each paced one reported.
    """

    name: str
    samples: int = 0
    steps: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    p99_rounds_s: list[float] = field(default_factory=list)
    change_s: float = 0.0
    bytes: int = 0
    copies: int = 0
    busy_s: float = 0.0
    pacing: list[Mapping[str, Any]] = field(default_factory=list)  # Any: JSON


class Watch:
    """The engine's own notes of its steps, asked for when a stretch has ended and not before: asking costs it time."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        self._found = adapter.samples(time.time())

    def begin(self) -> None:
        """From now on, by the engine's clock."""
        self._found = self._adapter.samples(self._found.until)

    def end(self, after: float = 0.0) -> list[Sample]:
        """Tokens since `after` seconds after `begin`, whose whole gap lies in that."""
        start = self._found.until
        self._found = self._adapter.samples(start)
        if not self._found.raw:
            return list(self._found.samples)
        return [item for item in self._found.samples if item.at - item.gap >= start + after]

    def steps(self, tokens: Sequence[Sample]) -> int:
        """Of the engine, each of which gives all streams their tokens at one moment; where it tells moments."""
        return len({token.at for token in tokens}) if self._found.raw else len(tokens)

    def close(self) -> None:
        self._adapter.close()


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
        watch = stack.enter_context(closing(Watch(open_engine())))
        paced = stack.enter_context(closing(EngineLatencies(open_engine())))
        run = _Runs(options, open_engine, ctx, paced)
        ctx.progress.note(f"{options.rounds} rounds of {len(kinds)} measurements of {options.seconds:g} s")
        for number in range(options.rounds):
            for shift in range(len(kinds)):
                name = kinds[(number + shift) % len(kinds)]  # each begins another round
                ctx.cancel.check("measuring")
                tokens = run.measure(name, watch, found[name])
                found[name].steps += watch.steps(tokens)
                gaps[name].append([token.gap for token in tokens])
                ctx.progress.note(
                    f"round {number + 1}, {name}: p99 {1000 * percentile(gaps[name][-1], 0.99):.1f} ms "
                    f"of {len(gaps[name][-1])} gaps"
                )
        resolution = paced.resolution
    return document_of(options, found, gaps, resolution)


class _Runs:
    def __init__(
        self, options: InterferenceOptions, open_engine: Callable[[], EngineAdapter], ctx: Context, paced: Latencies
    ) -> None:
        self._options = options
        self._open = open_engine
        self._ctx = ctx
        self._paced = paced

    def measure(self, name: str, watch: Watch, kind: Kind) -> list[Sample]:
        """The tokens while the thing is done again and again, for so many seconds, and only while it is done."""
        seconds, began = self._options.seconds, time.monotonic()
        found: list[Sample] = []
        while (left := began + seconds - time.monotonic()) > 0 or watch.steps(found) < ENOUGH:
            if left < (1 - _PATIENCE) * seconds:
                raise PartialError(
                    "the engine makes too few steps to measure",
                    cause=f"{watch.steps(found)} in {seconds - left:.0f} s, {ENOUGH} are the least",
                    hint="give it traffic, with --streams or otherwise",
                )
            watch.begin()
            if name == "baseline":
                self._ctx.cancel.wait(max(left, _LOOK))
                self._ctx.cancel.check("measuring")
                found += watch.end()
                continue
            started, quiet, report = time.monotonic(), 0.0, None
            if name == "plain copy":
                nbytes = self._plain()
            else:
                report = self._checkpoint(self._options.limits if name == "paced" else Limits())
                quiet, nbytes = report.setup_s, report.written  # before that a paced one takes its own baseline
            found += watch.end(quiet)
            kind.busy_s += time.monotonic() - started - quiet
            kind.bytes += nbytes
            kind.copies += 1
            if report is not None:
                self._remove(report)
                if name == "paced":
                    kind.pacing.append(report.extra["pacing"])
        return found

    def _checkpoint(self, limits: Limits) -> Report:
        options = self._options
        with closing(self._source()) as source:
            return create(source, CreateRequest(options.to, limits), self._ctx.quiet(), latencies=self._paced)

    def _remove(self, report: Report) -> None:
        member = open_member(self._options.to.url, 0, self._options.to, self._ctx)
        try:
            Catalog(member.store).remove(str(report.extra["id"]))
            member.store.delete(["LATEST"])
        finally:
            member.store.close()

    def _source(self) -> ShardSource:
        options = self._options
        kind, _, rest = options.source.partition(":")
        if kind == "slot":
            return SlotShards(rest)
        if kind == "engine":
            return LiveShards(EngineWeights(self._open(), rest), options.shard_bytes)
        raise UsageError(f"{options.source!r} is no live source", hint="slot:NAME or engine:URL")

    def _plain(self) -> int:
        """All tensors, in the largest reads that there are, then one file, as a script would: no pace, no thought."""
        with closing(EngineWeights(self._open(), self._options.engine)) as live:
            ((raw, size),) = cut(live.tensors(), 1 << 62)
            buffer = HostBuffer(len(raw) + size)
            try:
                buffer.view[: len(raw)] = raw
                at = len(raw)
                for parts in parts_of(parse_header(raw, buffer.nbytes, "plain").tensors, lambda: _LARGEST):
                    length = sum(part.length for part in parts)
                    live.read(parts, buffer.view[at : at + length])
                    at += length
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


def document_of(
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
