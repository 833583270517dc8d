"""The pure parts: the controller of the pace, retention, names, the cut into shards."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.checkpoint import names
from kvctl.checkpoint.pace import BLIND_WINDOWS, ENOUGH, Controller, Limits, p99
from kvctl.checkpoint.shards import MOST_PARTS, LiveTensor, Shard, cut, index_of, parts_of
from kvctl.checkpoint.shares import COPIED, LEAST_READ, MAPPED, MOST_READ, Shares, read_piece
from kvctl.core.errors import FormatError
from kvctl.weights.safetensors import parse_header

MS = 1e-3
WINDOWS = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(0, 60)),
    max_size=60,
)


@given(
    WINDOWS, st.one_of(st.none(), st.integers(1 << 20, 1 << 34)), st.integers(1 << 10, 1 << 20),
    st.one_of(st.none(), st.floats(1, 1000)),
)  # fmt: skip
def test_the_rate_stays_between_the_floor_and_the_ceiling(
    windows: list[tuple[float, int]], most: int | None, least: int, deadline: float | None
) -> None:
    limits = Limits(most, least, 1 * MS, deadline)
    control = Controller(limits, 1 << 34, 10 * MS)
    for number, (latency, count) in enumerate(windows):
        rate = control.window([latency] * count, float(number), number << 20)
        assert control.floor(float(number), number << 20) <= rate <= limits.ceiling


def test_it_backs_off_over_the_budget_and_comes_back_below() -> None:
    control = Controller(Limits(100e6, 1e6, 1 * MS), 1 << 40, 20 * MS)
    first = control.rate
    assert first == 25e6
    assert control.window([22 * MS] * ENOUGH, 1, 0) == first / 2
    for second in range(2, 40):
        control.window([22 * MS] * ENOUGH, second, 0)
    assert control.rate == control.floor(39, 0)
    for second in range(40, 100):
        control.window([20.5 * MS] * ENOUGH, second, 0)
    assert control.rate == 100e6
    assert control.backoffs == 39


def test_without_samples_rates_alone_pace_and_it_is_careful_when_they_come_back() -> None:
    control = Controller(Limits(100e6, 1e6, 1 * MS), 1 << 40, 20 * MS)
    for second in range(BLIND_WINDOWS):
        control.window([], second, 0)
    assert control.lost_sight
    assert control.rate == 100e6
    control.window([20 * MS] * ENOUGH, 10, 0)
    assert not control.lost_sight
    assert control.rate < 30e6


def test_windows_of_a_slow_engine_are_judged_together() -> None:
    control = Controller(Limits(100e6, 1e6, 1 * MS), 1 << 40, 20 * MS)
    first = control.rate
    for second in range(ENOUGH - 1):
        assert control.window([90 * MS], second, 0) == first
        assert not control.lost_sight
    assert control.window([90 * MS], ENOUGH, 0) == first / 2
    assert (control.windows, control.backoffs) == (1, 1)


def test_one_that_was_held_up_catches_up_at_twice_the_least_rate_at_most() -> None:
    control = Controller(Limits(100e6, 1e6, 1 * MS), int(100e6), 20 * MS)
    assert control.floor(0, 0) == pytest.approx(1e6 / 0.95)
    # after 40 of its 95 s it has done 20 s' worth
    assert control.floor(40, int(20e6)) == pytest.approx(80e6 / 55)
    assert control.floor(94, int(20e6)) == 2e6
    assert control.floor(40, int(60e6)) == 1e6
    assert Controller(Limits(1.5e6, 1e6, 1 * MS), int(100e6), 20 * MS).floor(94, int(20e6)) == 1.5e6


def test_a_deadline_raises_the_floor_as_time_runs_out() -> None:
    control = Controller(Limits(100e6, 1e6, 1 * MS, deadline=100), int(1e9), 20 * MS)
    assert control.floor(0, 0) == pytest.approx(10e6)
    assert control.window([90 * MS] * ENOUGH, 50, 0) == pytest.approx(20e6)
    assert control.floor(200, 0) == 100e6
    assert control.floor(200, int(1e9)) == 1e6


@pytest.mark.parametrize("shares", [COPIED, MAPPED])
def test_a_byte_that_is_read_hashed_and_written_is_charged_once(shares: Shares) -> None:
    assert shares.read + shares.hash + shares.write == pytest.approx(1.0)


@given(st.floats(1, 4e9), st.floats(0, 2))
def test_reads_are_about_what_is_due_in_a_step_of_the_engine(rate: float, trip: float) -> None:
    piece = read_piece(rate, COPIED, trip)
    assert LEAST_READ <= piece <= MOST_READ
    due = rate / COPIED.read * max(0.05, trip)
    if LEAST_READ < piece < MOST_READ:
        assert due - 65536 < piece <= due


def test_reads_keep_a_rate_of_24_mb_where_steps_take_40_ms_and_where_they_take_200() -> None:
    assert read_piece(24e6, COPIED, 0.04) == 2_621_440
    assert read_piece(24e6, COPIED, 0.2) / 0.2 > 0.99 * 24e6 / COPIED.read


def test_p99_is_the_nearest_rank() -> None:
    assert p99([]) == 0.0
    assert p99([float(number) for number in range(100)]) == 99.0
    assert p99([1.0, 2.0]) == 2.0


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=20), st.integers(1, 25), st.data())
def test_retention_keeps_the_newest_and_what_latest_names(stamps: list[int], keep: int, data: st.DataObject) -> None:
    idents = [f"{stamp:014d}" for stamp in stamps]
    latest = data.draw(st.sampled_from([*idents, None]) if idents else st.none())
    removed = names.to_remove(idents, keep, latest)
    left = sorted(set(idents) - set(removed))
    assert len(left) >= min(keep, len(idents))
    assert set(sorted(idents)[-keep:]) <= set(left)
    assert latest is None or latest in left
    assert len(left) <= keep + 1


def test_ids_sort_by_time_and_nothing_else_is_one() -> None:
    earlier = names.new_id(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    later = names.new_id(datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC))
    assert earlier < later
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert earlier < names.new_id(moment, earlier) < names.new_id(moment, names.new_id(moment, earlier))
    assert names.is_id(earlier)
    assert not any(names.is_id(text) for text in ("", "LATEST", "20260102", f"{earlier}x", f"x{earlier}"))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"schema": "other"}', b'{"schema": "kvctl.checkpoint/1"}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        names.parse_manifest(data, "here")
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        names.parse_partial(data)


TENSORS = st.lists(
    st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=20
)


@given(TENSORS, st.integers(1, 10000))
def test_shards_hold_every_tensor_once_and_are_right_safetensors_files(
    kinds: list[tuple[str, list[int]]], limit: int
) -> None:
    tensors = [LiveTensor(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(kinds)]
    headers = [parse_header(raw, len(raw) + size, "x") for raw, size in cut(tensors, limit)]
    found = {tensor.name: (tensor.dtype, tensor.shape) for header in headers for tensor in header.tensors}
    assert found == {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    for header in headers:
        assert header.header_size % 8 == 0
        assert header.data_size <= limit or sum(1 for tensor in header.tensors if tensor.nbytes) == 1
    index = json.loads(index_of([Shard(f"s{number}", header) for number, header in enumerate(headers)]))
    assert index["weight_map"].keys() == found.keys()


@given(TENSORS, st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_reads_are_as_long_as_asked_and_cover_every_byte_once_in_order(
    kinds: list[tuple[str, list[int]]], pieces: list[int]
) -> None:
    tensors = [LiveTensor(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(kinds)]
    ((raw, size),) = cut(tensors, 1 << 40)
    header = parse_header(raw, len(raw) + size, "x")
    asked = itertools.cycle(pieces)
    found = list(parts_of(header.tensors, lambda: next(asked)))
    lengths = [sum(part.length for part in parts) for parts in found]
    assert lengths[:-1] == list(itertools.islice(itertools.cycle(pieces), max(0, len(found) - 1)))
    assert sum(lengths) == size
    at = 0
    starts = {tensor.name: tensor.start for tensor in header.tensors}
    for part in itertools.chain.from_iterable(found):
        assert starts[part.name] + part.offset == at
        at += part.length


def test_a_read_names_a_bounded_number_of_tensors() -> None:
    ((raw, size),) = cut([LiveTensor(f"t{number}", "U8", (3,)) for number in range(2 * MOST_PARTS + 1)], 1 << 20)
    found = list(parts_of(parse_header(raw, len(raw) + size, "x").tensors, lambda: 1 << 20))
    assert [len(parts) for parts in found] == [MOST_PARTS, MOST_PARTS, 1]


def test_other_loaders_read_what_we_cut(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")
    ((raw, size),) = cut([LiveTensor("b", "U8", (3,)), LiveTensor("a", "F32", (2, 2))], 1000)
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw + bytes(range(size)))
    with safetensors.safe_open(path, "np") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert file.get_tensor("b").tolist() == [16, 17, 18]
