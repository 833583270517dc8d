"""Checkpoints of weights that change under the copy, and paces that follow what an engine tells."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvctl.checkpoint import catalog, names
from kvctl.checkpoint import pacing as pacing_module
from kvctl.checkpoint.create import CreateRequest, create
from kvctl.checkpoint.engine import EngineLatencies, EngineWeights
from kvctl.checkpoint.gentle import NICE
from kvctl.checkpoint.latency import Latencies
from kvctl.checkpoint.pace import ENOUGH, Limits
from kvctl.checkpoint.pacing import missed
from kvctl.checkpoint.shards import LiveShards, LiveTensor, LiveWeights
from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context
from kvctl.core.errors import ConflictError
from kvctl.core.events import NullProgress
from kvctl.engines.api import EngineAdapter, EngineInfo, Part, Sample, Samples, WeightSet, WeightTensor
from kvctl.transfer.report import Report
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest
from tests.checkpoint.making import Told

TENSORS = [LiveTensor(f"layer.{number}.weight", "F32", (256, 64)) for number in range(8)]


class Trainer:
    """Weights that are updated in place at the reads that `updates` counts; every value of a generation is its number,
    so that a mix shows. See `LiveWeights`.
    """

    name = "engine:test"

    def __init__(self, updates: Sequence[int], *, holds: bool = True) -> None:
        self._updates = set(updates)
        self._holds = holds
        self._held = False
        self._reads = 0
        self.number = 0

    def tensors(self) -> Sequence[LiveTensor]:
        return TENSORS

    def side_files(self) -> Mapping[str, bytes]:
        return {"config.json": b"{}"}

    def generation(self) -> str:
        return str(self.number)

    def again(self) -> None:
        return

    def read(self, parts: Sequence[Part], view: memoryview) -> None:
        at = 0
        for part in parts:
            self._reads += 1
            if self._reads in self._updates and not self._held:
                self.number += 1
            view[at : at + part.length] = bytes([self.number]) * part.length
            at += part.length
        assert at == len(view)

    @contextlib.contextmanager
    def held(self, seconds: float) -> Iterator[bool]:
        self._held = self._holds
        yield self._holds
        self._held = False

    def close(self) -> None:
        return


@pytest.fixture
def to(tmp_path: Path) -> StoreConfig:
    return parse_store(str(tmp_path / "ck"))


def checkpoint(
    live: LiveWeights, to: StoreConfig, limits: Limits | None = None, latencies: Latencies | None = None
) -> Report:
    # two tensors a shard
    request = CreateRequest(to, limits or Limits(), baseline_seconds=0.5)
    return create(LiveShards(live, 2 * TENSORS[0].nbytes), request, Context(), latencies=latencies)


def values(to: StoreConfig) -> set[int]:
    """Every byte value of the latest checkpoint's tensors."""
    root = Path(to.url.removeprefix("file://"))
    place = root / (root / names.LATEST).read_text().strip()
    found: set[int] = set()
    for path in place.glob("*.safetensors"):
        data = path.read_bytes()
        found |= set(data[8 + int.from_bytes(data[:8], "little") :])
    return found


def test_weights_that_stand_still_are_copied_once_into_a_folder_with_an_index(to: StoreConfig) -> None:
    report = checkpoint(Trainer([]), to)
    assert (report.extra["restarts"], report.objects, report.tensors) == (0, 4, 8)
    assert values(to) == {0}
    assert catalog.verify(to, None, Context()).verified.state == "full"
    loaded = run_load(LoadRequest(f"{to.url}/{report.extra['id']}"), Context())
    assert loaded.tensors == 8


@pytest.mark.parametrize("update", [1, 5, 8])
def test_an_update_in_the_middle_makes_it_begin_again_and_generations_never_mix(to: StoreConfig, update: int) -> None:
    report = checkpoint(Trainer([update]), to)
    assert report.extra["restarts"] == 1
    assert values(to) == {1}
    assert report.extra["generation"] == "1"


def test_updates_all_the_time_are_held_back_at_last(to: StoreConfig) -> None:
    report = checkpoint(Trainer(range(1, 1000)), to)
    assert report.extra["restarts"] == 3
    assert len(values(to)) == 1
    assert "updates were held back for the last copy" in report.notes


def test_where_updates_cannot_be_held_back_it_gives_up_and_says_so(to: StoreConfig) -> None:
    before = checkpoint(Trainer([]), to).extra["id"]
    with pytest.raises(ConflictError, match="updated faster than it can be copied"):
        checkpoint(Trainer(range(1, 1000), holds=False), to)
    assert catalog.ls(to, Context())["latest"] == before
    assert values(to) == {0}


class Engine:
    """An adapter over weights in this process: updates wait for the lease, and come in when it ends."""

    def __init__(self) -> None:
        self.number = 0
        self.leased_until = 0.0
        self.renewed = self.released = 0
        self.update_at_read = 0
        self._reads = 0

    def info(self) -> EngineInfo:
        return EngineInfo("toy", "1", "toy", "nowhere", None, self.number, paused=False)

    def weights(self, *, lease_seconds: float = 60.0) -> WeightSet:
        self.leased_until = time.monotonic() + lease_seconds
        tensors = tuple(WeightTensor(item.name, item.dtype, item.shape, item.nbytes) for item in TENSORS)
        return WeightSet(self.number, None, tensors, {"config.json": b"{}"})

    def renew(self, lease_seconds: float) -> None:
        self.renewed += 1
        self.leased_until = time.monotonic() + lease_seconds

    def read(self, weights: WeightSet, tensor: str, offset: int, into: memoryview) -> None:
        self._reads += 1
        if self._reads == self.update_at_read:
            self.number += 1  # its lease had ended
        if weights.generation != self.number:
            raise ConflictError("the engine holds another generation by now")
        into[:] = bytes([self.number]) * len(into)

    def release(self) -> None:
        self.released += 1

    def samples(self, since: float) -> Samples:
        now = time.time()
        return Samples(tuple(Sample(now - 0.01 * number, 0.01) for number in range(30)), now)

    def close(self) -> None:
        return


def as_adapter(engine: Engine) -> EngineAdapter:
    found: Any = engine  # Any: what a checkpoint does not use is left out
    adapter: EngineAdapter = found
    return adapter


def test_an_engine_is_copied_under_its_lease_and_an_update_after_it_begins_again(to: StoreConfig) -> None:
    engine = Engine()
    engine.update_at_read = 6
    live = EngineWeights(as_adapter(engine), "http://x")
    report = checkpoint(live, to)
    live.close()
    assert report.extra["restarts"] == 1
    assert report.extra["generation"] == "1"
    assert values(to) == {1}
    assert engine.released == 1


def test_raw_samples_of_an_engine_set_the_pace(to: StoreConfig) -> None:
    latencies = EngineLatencies(as_adapter(Engine()))
    report = checkpoint(Trainer([]), to, Limits(budget=0.001, max_rate=1e9, min_rate=1e8), latencies)
    pacing = report.extra["pacing"]
    assert pacing["by"] == "latency"
    assert pacing["baseline_p99_s"] == 0.01
    assert pacing["resolution"] == "raw inter-token samples of the engine"
    assert missed(report) == ""


def test_a_missed_budget_and_a_missed_deadline_are_told_and_the_checkpoint_is_whole(
    to: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing_module, "WINDOW_SECONDS", 0.1)
    # half a MB at 200 kB/s: 2.5 s at least, and many windows
    limits = Limits(budget=0.001, max_rate=2e5, min_rate=1e5, deadline=1.0)
    report = checkpoint(Trainer([]), to, limits, Told(0.01, 0.05))
    pacing = report.extra["pacing"]
    assert pacing["budget_missed"]
    assert pacing["deadline_missed"]
    assert pacing["backoffs"] > 0
    assert missed(report) == "p99 was 40.0 ms over the baseline, the budget was 1 ms; the deadline had passed"
    assert values(to) == {0}


class Slow(Told):
    """An engine whose step takes longer than a look at it: two samples each time it is asked."""

    looks = 0

    def take(self) -> Sequence[float]:
        self.looks += self.baseline
        return [self._gap] * 2


def test_a_baseline_takes_longer_where_the_engine_tells_little(
    to: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing_module, "_PATIENCE", 600)  # a look may take long on a busy machine
    source = LiveShards(Trainer([]), 2 * TENSORS[0].nbytes)
    request = CreateRequest(to, Limits(budget=0.001, max_rate=1e9, min_rate=1e8), baseline_seconds=0.2)
    latencies = Slow(0.4, 0.4)
    report = create(source, request, Context(), latencies=latencies)
    assert report.extra["pacing"]["baseline_p99_s"] == 0.4
    # what came before counts for nothing; then until there is enough, where two looks of 0.1 s are usual
    assert latencies.looks == 1 + ENOUGH // 2


def test_one_with_a_pace_gives_way_on_the_processors_and_the_caller_stays_as_it_is(to: StoreConfig) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    class Looking(Trainer):
        def read(self, parts: Sequence[Part], view: memoryview) -> None:
            seen.append(os.getpriority(os.PRIO_PROCESS, 0))
            super().read(parts, view)

    plain = create(LiveShards(Looking([])), CreateRequest(to), Context())
    assert (set(seen), plain.extra["pacing"]["nice"]) == ({here}, here)
    seen.clear()
    paced = create(LiveShards(Looking([])), CreateRequest(to, Limits(max_rate=1e9)), Context())
    assert (set(seen), paced.extra["pacing"]["nice"]) == ({max(here, NICE)}, max(here, NICE))
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


def test_a_least_rate_that_was_not_kept_is_told(to: StoreConfig) -> None:
    class Late(Trainer):
        def read(self, parts: Sequence[Part], view: memoryview) -> None:
            time.sleep(0.1)
            super().read(parts, view)

    report = checkpoint(Late([]), to, Limits(max_rate=1e9, min_rate=1e9))
    assert any(note.startswith("slower than --min-rate") for note in report.notes)


class Vanishing(Told):
    """An engine that tells nothing any more once the checkpoint runs."""

    def take(self) -> Sequence[float]:
        return super().take() if self.baseline else []


def test_an_engine_whose_samples_vanish_is_paced_by_rate_alone_and_that_is_said(
    to: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing_module, "WINDOW_SECONDS", 0.1)
    told: list[str] = []

    class Notes(NullProgress):
        def note(self, message: str) -> None:
            told.append(message)

    request = CreateRequest(to, Limits(budget=0.001, max_rate=4e5, min_rate=1e5), baseline_seconds=0.5)
    source = LiveShards(Trainer([]), 2 * TENSORS[0].nbytes)
    report = create(source, request, Context(progress=Notes()), latencies=Vanishing(0.01, 0.01))
    assert report.extra["pacing"]["by"] == "rate alone at the end: the latencies vanished"
    assert report.extra["pacing"]["highest_rate"] == 4e5
    assert not report.extra["pacing"]["budget_missed"]
    assert any("tells no latencies any more" in note for note in told)
    assert values(to) == {0}
