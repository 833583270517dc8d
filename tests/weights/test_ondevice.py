"""Loads onto a device, on the stand-in of host memory: the same plan, slots, events and verification as onto a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import CapacityError, EnvError, IntegrityError, NotFoundError, UsageError
from kvctl.memory.buffers import Buffer, HostBuffer
from kvctl.memory.devices import Device, Event, HostDevice, Span
from kvctl.repo.admin import InitOptions, init_repo
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.transfer.lanes import LaneSet
from kvctl.transfer.report import Report
from kvctl.transfer.summary import Stopwatch
from kvctl.weights import ondevice
from kvctl.weights.load import load_into, plan_load, run_load
from kvctl.weights.models import digest_model
from kvctl.weights.ondevice import DeviceTarget
from kvctl.weights.push import PushRequest, push_weights
from kvctl.weights.request import LoadRequest
from kvctl.weights.targets import Landing, MemoryTarget

SECONDS = 60.0
SHAPE = LlamaShape(layers=4, hidden=256, inner=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_llama(str(made), SHAPE, shards=3)
    return made


@pytest.fixture
def ctx() -> Context:
    return Context(retry=RetryPolicy(base=0.001, cap=0.01, stall_timeout=SECONDS))


def request_for(folder: Path, **fields: object) -> LoadRequest:
    return replace(LoadRequest(str(folder), into="memory"), **fields)  # type: ignore[arg-type]


def data(landings: Sequence[Landing]) -> list[bytes]:
    return [bytes(landing.buffer.view[landing.data_start :]) for landing in landings]


def on_cpu(request: LoadRequest, ctx: Context) -> list[bytes]:
    _, loaded = load_into(request, MemoryTarget(), ctx)
    assert loaded is not None
    return data(loaded.landings)


def onto(device: Device, request: LoadRequest, ctx: Context) -> tuple[Report, list[bytes]]:
    report, loaded = load_into(request, DeviceTarget(device), ctx)
    assert loaded is not None
    return report, data(loaded.landings)


class Counting(HostDevice):
    """Remembers what was begun, and holds each slot to what it held then."""

    def __init__(self, *, direct: bool = False) -> None:
        super().__init__(direct=direct)
        self.begun: list[tuple[int, int]] = []  # slot's offset in the staging buffer, bytes
        self.changed = 0
        self.sums: dict[int, str] = {}
        self.freed: list[Buffer] = []
        self._lock = threading.Lock()

    def copy_async(self, source: Buffer, target: Buffer, span: Span) -> Event:
        with self._lock:
            self.begun.append((span.source, span.row_bytes * span.rows))
            self.sums[id(span)] = self._sum(source, span)
        return super().copy_async(source, target, span)

    def copy(self, source: Buffer, target: Buffer, span: Span) -> None:
        if span.row_bytes and self._sum(source, span) != self.sums[id(span)]:
            self.changed += 1
        super().copy(source, target, span)

    def _sum(self, source: Buffer, span: Span) -> str:
        return xxhash.xxh3_64_hexdigest(source.view[span.source : span.source + span.source_bytes])

    def allocate(self, nbytes: int) -> HostBuffer:
        buffer = super().allocate(nbytes)
        self.freed.append(buffer)
        return buffer


class Slow(Counting):
    """Each copy waits for the next one to be begun, up to the last: reading has to go on while it runs."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self._runs = runs
        self._copied = 0
        self._more = threading.Condition()
        self.waited_in_vain = 0

    def copy_async(self, source: Buffer, target: Buffer, span: Span) -> Event:
        event = super().copy_async(source, target, span)
        with self._more:
            self._more.notify_all()
        return event

    def copy(self, source: Buffer, target: Buffer, span: Span) -> None:
        if span.row_bytes:
            self._copied += 1
            wanted = min(self._runs, self._copied + 1)
            with self._more:
                if not self._more.wait_for(lambda: len(self.begun) >= wanted, SECONDS):
                    self.waited_in_vain += 1
        super().copy(source, target, span)


def test_a_device_holds_what_host_memory_would(folder: Path, ctx: Context) -> None:
    device = Counting()
    report, found = onto(device, request_for(folder), ctx)
    assert found == on_cpu(request_for(folder), ctx)
    assert sum(nbytes for _, nbytes in device.begun) == report.fetched == report.bytes
    assert device.changed == 0
    way = report.extra["device"]
    assert (way["name"], way["staging"], way["straight_bytes"]) == ("hostdev", "host", 0)
    assert report.transport[0].name == "file"
    assert any("no transport for file:// writes into hostdev memory" in note for note in report.notes)


@pytest.mark.parametrize("rank", [0, 1])
def test_slices_of_a_rank_are_cut_apart_on_the_device(folder: Path, ctx: Context, rank: int) -> None:
    request = request_for(folder, tp_rank=rank, tp_size=2)
    device = Counting()
    _, found = onto(device, request, ctx)
    assert found == on_cpu(request, ctx)
    assert device.changed == 0


def test_two_slots_serve_a_whole_load_and_none_is_reused_before_its_copy(folder: Path, ctx: Context) -> None:
    """The slots' bytes are the same when a copy runs as when it was begun, however late that is."""
    request = request_for(folder, max_in_flight_bytes=1)
    plan_runs = len(on_runs(request, ctx))
    device = Slow(plan_runs)
    report, found = onto(device, request, ctx)
    assert found == on_cpu(request_for(folder), ctx)
    assert report.extra["device"]["slots"] == 2
    assert len({start // (report.extra["device"]["slot_bytes"]) for start, _ in device.begun}) <= 2
    assert (device.changed, device.waited_in_vain) == (0, 0)


def on_runs(request: LoadRequest, ctx: Context) -> Sequence[object]:
    return plan_load(request, ctx).runs


def test_reading_goes_on_while_a_copy_runs(folder: Path, ctx: Context) -> None:
    runs = len(on_runs(request_for(folder), ctx))
    assert runs > 2
    device = Slow(runs)
    onto(device, request_for(folder), ctx)
    assert device.waited_in_vain == 0  # each copy saw the next range arrive before it ended
    assert len(device.begun) == runs


def test_a_device_without_room_fails_before_a_byte_moves(folder: Path, ctx: Context) -> None:
    class Small(Counting):
        def __init__(self) -> None:
            super().__init__()
            self._capacity = 1 << 20  # the first shard fits

    device = Small()
    with pytest.raises(CapacityError, match="no room"):
        load_into(request_for(folder), DeviceTarget(device), ctx)
    assert device.begun == []
    for buffer in device.freed:
        with pytest.raises(ValueError, match="released"):
            len(buffer.view)


def test_a_copy_that_fails_ends_the_load_and_frees_the_device(folder: Path, ctx: Context) -> None:
    class Failing(Counting):
        def copy(self, source: Buffer, target: Buffer, span: Span) -> None:
            if span.row_bytes and len(self.begun) > 1:
                raise OSError("no more")
            super().copy(source, target, span)

    device = Failing()
    with pytest.raises(EnvError, match="no more"):
        load_into(request_for(folder), DeviceTarget(device), ctx)
    for buffer in device.freed:
        with pytest.raises(ValueError, match="released"):
            len(buffer.view)


@pytest.fixture
def repo(folder: Path, tmp_path: Path, ctx: Context) -> tuple[StoreConfig, ...]:
    stores = (parse_store(str(tmp_path / "repo")),)
    init_repo(stores, ctx, InitOptions(1 << 20, 1))
    push_weights(PushRequest(str(folder), "m", stores), ctx)
    return stores


def damage(store: StoreConfig) -> None:
    chunks = sorted(Path(store.url.removeprefix("file://")).joinpath("chunks").rglob("*"), key=lambda path: path.name)
    largest = max((path for path in chunks if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_bytes_are_verified_before_they_are_copied(repo: tuple[StoreConfig, ...], ctx: Context) -> None:
    request = LoadRequest("m", repo=repo, into="memory")
    device = Counting()
    report, found = onto(device, request, ctx)
    assert found == on_cpu(request, ctx)
    assert (report.verified.state, report.verified.bytes) == ("leaves", report.fetched)
    damage(repo[0])
    device = Counting()
    with pytest.raises(IntegrityError):
        load_into(request, DeviceTarget(device), ctx)
    # the damaged chunk was never begun: a whole load copies as much as it fetches
    assert sum(nbytes for _, nbytes in device.begun) < report.fetched


def test_transports_that_can_write_into_a_device_do_and_are_read_back(
    repo: tuple[StoreConfig, ...], ctx: Context
) -> None:
    """A repo's ranges: those that are in place go straight, the others through slots, in one load and one report."""
    request = LoadRequest("m", repo=repo, into="memory")
    runs = plan_load(request, ctx).runs
    whole = sum(run.length for run in runs if run.dest is not None)
    assert 0 < whole < sum(run.length for run in runs)
    device = Counting(direct=True)
    report, found = onto(device, request, ctx)
    assert found == on_cpu(request, ctx)
    assert report.extra["device"]["straight_bytes"] == whole
    assert report.fetched == sum(run.length for run in runs)
    assert sum(path.bytes for path in report.paths) == report.fetched
    assert (report.verified.state, report.verified.bytes) == ("leaves", report.fetched)
    assert [entry.name for entry in report.transport] == ["file"]
    assert any("cut apart or moved" in note for note in report.notes)
    damage(repo[0])
    with pytest.raises(IntegrityError):
        load_into(request, DeviceTarget(Counting(direct=True)), ctx)


def test_a_plain_folder_lands_directly_and_slices_go_through_slots(folder: Path, ctx: Context) -> None:
    device = Counting(direct=True)
    report, found = onto(device, request_for(folder), ctx)
    assert found == on_cpu(request_for(folder), ctx)
    assert device.begun == []
    assert report.extra["device"] == {"name": "hostdev", "straight_bytes": report.fetched}
    assert report.notes == []
    request = request_for(folder, tp_rank=0, tp_size=2)
    device = Counting(direct=True)
    report, found = onto(device, request, ctx)
    assert found == on_cpu(request, ctx)
    assert device.begun
    assert sum(nbytes for _, nbytes in device.begun) + report.extra["device"]["straight_bytes"] == report.bytes


class Astray(EnvError):
    """What a transport raises that cannot reach the device after all."""


def test_a_straight_way_that_fails_ends_the_load_or_falls_back_to_slots(
    folder: Path, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ondevice.DeviceLoading._attempt

    def attempt(self: ondevice.DeviceLoading, lanes: LaneSet, watch: Stopwatch) -> None:
        if self.direct:
            lanes.close()
            raise Astray("the bus is not wired")
        whole(self, lanes, watch)

    monkeypatch.setattr(ondevice.DeviceLoading, "_attempt", attempt)
    with pytest.raises(Astray):
        load_into(request_for(folder), DeviceTarget(Counting(direct=True)), ctx)
    device = Counting(direct=True)
    report, found = onto(device, request_for(folder, fallback=True), ctx)
    assert found == on_cpu(request_for(folder), ctx)
    assert sum(nbytes for _, nbytes in device.begun) == report.fetched == report.bytes
    assert any("not wired" in note for note in report.notes)
    assert all(entry.fallback for entry in report.transport)


def test_digests_that_are_required_are_read_back(folder: Path, tmp_path: Path, ctx: Context) -> None:
    sidecar = tmp_path / "digests.json"
    digest_model(str(folder), None, None, str(sidecar), ctx)
    report, _ = onto(HostDevice(), request_for(folder, digests=str(sidecar)), ctx)
    assert (report.verified.state, report.verified.why) == ("full", "read back from hostdev")
    assert report.verified.bytes == report.bytes


def test_measuring_keeps_nothing_on_the_device(folder: Path, ctx: Context) -> None:
    report = run_load(LoadRequest(str(folder), into="none", device="hostdev"), ctx)
    assert report.target == "hostdev"
    assert report.bytes == report.fetched > 0


def test_targets_that_keep_files_are_refused(folder: Path, tmp_path: Path, ctx: Context) -> None:
    with pytest.raises(UsageError, match="not on hostdev"):
        run_load(LoadRequest(str(folder), into=f"dir:{tmp_path / 'x'}", device="hostdev"), ctx)


def test_each_rank_has_a_device_of_its_own_and_the_source_is_read_once(folder: Path, ctx: Context) -> None:
    request = request_for(folder, tp_size=2)
    devices = Counting(), Counting()
    report, loaded = load_into(request, DeviceTarget(*devices), ctx)
    assert loaded is not None
    for rank, landing in enumerate(loaded.landings):
        assert data([landing]) == on_cpu(request_for(folder, tp_rank=rank, tp_size=2), ctx)
    # both got their share: what is sharded once, what is replicated twice
    assert all(device.begun for device in devices)
    assert report.fetched < report.bytes


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, None), (4, None), (2, 1)])
def test_several_devices_take_a_rank_each(folder: Path, ctx: Context, tp_size: int, tp_rank: int | None) -> None:
    request = LoadRequest(str(folder), into="none", device="hostdev:0-1", tp_size=tp_size, tp_rank=tp_rank)
    with pytest.raises(UsageError, match="take a rank each"):
        run_load(request, ctx)
    assert run_load(replace(request, tp_size=2, tp_rank=None), ctx).target == "hostdev:0-1"


def test_a_source_that_is_not_there_leaves_no_stream_behind(tmp_path: Path, ctx: Context) -> None:
    before = threading.active_count()
    with pytest.raises(NotFoundError):
        run_load(LoadRequest(str(tmp_path / "none"), into="none", device="hostdev:0-3", tp_size=4), ctx)
    assert threading.active_count() == before
