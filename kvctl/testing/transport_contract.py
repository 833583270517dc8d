"""The contract of `kvctl.transports.api.Transport`, as pytest tests that any transport can be held to.

Subclass `TransportContract` in a test module (as `TestMyTransport`) and override the fixture `case`. Raw access
goes past the transport under test. Needs pytest.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import pytest

from kvctl.core.errors import EnvError, KvctlError, NotFoundError, SizeMismatchError, UsageError, VersionChangedError
from kvctl.testing.buffers import GUARD, GuardedBuffer
from kvctl.transports.api import Completion, Op, Status, Transport

SIZE: Final = 73 * 4096  # of whole pages, so that transports with an alignment can read it all
DATA: Final = random.Random(1).randbytes(SIZE)
_PIECE: Final = 4096
_SECONDS: Final = 60.0  # a test that waits longer has found a hang


@dataclass(frozen=True)
class TransportCase:
    """`open` makes the transport under test over a place with nothing in it. `raw_put` stores an object and
    returns its version; `raw_get` reads it whole. `slow` makes reads take long from now on (then the test of
    cancelling a running operation means something).
    """

    open: Callable[[], Transport]
    raw_put: Callable[[str, bytes], str]
    raw_get: Callable[[str], bytes]
    slow: Callable[[], None] | None = None


def drive(transport: Transport, ops: Sequence[Op]) -> dict[int, Completion]:
    """Submit `ops` and wait for all; each must end exactly once."""
    transport.submit(ops)
    return collect(transport, len(ops))


def collect(transport: Transport, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while len(found) < count:
        finished = transport.poll(_SECONDS)
        assert finished, f"only {len(found)} of {count} operations ended"
        for item in finished:
            assert item.id not in found, f"operation {item.id} ended twice"
            found[item.id] = item
    return found


class TransportContract:
    """Override `case`."""

    @pytest.fixture
    def case(self) -> TransportCase:
        raise NotImplementedError("override the fixture `case`")

    @pytest.fixture
    def transport(self, case: TransportCase) -> Iterator[Transport]:
        transport = case.open()
        yield transport
        transport.close()

    @pytest.fixture
    def buffer(self) -> Iterator[GuardedBuffer]:
        buffer = GuardedBuffer(SIZE + 8192)
        yield buffer
        buffer.close()

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 1), (1, 1), (0, SIZE), (SIZE - 1, 1), (4095, 2), (4096, 4096), (8192, 65536), (13, 70_001), (1, SIZE - 2)],
    )
    def test_a_read_fills_exactly_its_range(
        self, case: TransportCase, transport: Transport, offset: int, length: int
    ) -> None:
        version = case.raw_put("k", DATA)
        for place in (0, 1, 4095, 4096):
            buffer = GuardedBuffer(SIZE + 8192)
            done = drive(transport, [Op(7, "read", "k", offset, length, buffer, place, version, SIZE)])[7]
            unit = transport.capabilities.alignment
            if any(value % unit for value in (offset, length, place)):
                _assert_failed(done, UsageError)
                buffer.check()
            else:
                assert (done.status, done.error, done.nbytes) == (Status.DONE, None, length)
                assert done.started <= done.finished
                assert done.requests >= 1
                assert buffer.view[place : place + length] == DATA[offset : offset + length]
                buffer.check((place, place + length))
            buffer.close()

    def test_the_end_of_an_object_of_odd_size(self, case: TransportCase, transport: Transport) -> None:
        if transport.capabilities.alignment > 1:
            return
        version = case.raw_put("odd", DATA[:12_345])
        buffer = GuardedBuffer(12_345)
        done = drive(transport, [Op(1, "read", "odd", 4096, 8249, buffer, 4096, version, 12_345)])[1]
        assert (done.status, done.error) == (Status.DONE, None)
        assert buffer.view[4096:] == DATA[4096:12_345]
        buffer.check((4096, 12_345))
        buffer.close()

    def test_a_read_needs_neither_version_nor_size(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        case.raw_put("k", DATA)
        done = drive(transport, [Op(1, "read", "k", 0, 4096, buffer)])[1]
        assert done.status is Status.DONE
        assert buffer.view[:4096] == DATA[:4096]

    def test_another_version_fails_and_touches_nothing(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        old = case.raw_put("k", DATA)
        case.raw_put("k", DATA[::-1])
        done = drive(transport, [Op(1, "read", "k", 0, 4096, buffer, 0, old, SIZE)])[1]
        _assert_failed(done, VersionChangedError, "k", "changed while loading")
        buffer.check()

    def test_another_size_fails_with_both_sizes(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        version = case.raw_put("k", DATA)
        done = drive(transport, [Op(1, "read", "k", 0, 4096, buffer, 0, version, SIZE + 4096)])[1]
        _assert_failed(done, SizeMismatchError, "k", str(SIZE), str(SIZE + 4096))
        # with one-sided writes the bytes are there before the answer that tells the size
        buffer.check(*([(0, 4096)] if transport.capabilities.one_sided else []))

    @pytest.mark.parametrize("offset", [0, SIZE - 4096, SIZE, SIZE + 4096])
    def test_a_range_past_the_end_fails(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer, offset: int
    ) -> None:
        version = case.raw_put("k", DATA)
        length = max(0, SIZE - offset) + transport.capabilities.alignment
        done = drive(transport, [Op(1, "read", "k", offset, length, buffer, 4096, version)])[1]
        _assert_failed(done, SizeMismatchError, str(SIZE))
        buffer.check((4096, 4096 + length))

    def test_a_missing_object_is_not_found_by_name(self, transport: Transport, buffer: GuardedBuffer) -> None:
        done = drive(transport, [Op(1, "read", "no/such", 0, 4096, buffer)])[1]
        _assert_failed(done, NotFoundError, "no/such")
        buffer.check()

    @pytest.mark.parametrize(
        "sizes", [(SIZE,), (1, SIZE - 1), (7,) * 3_000 + (SIZE - 21_000,), (70_000, 4096, 1, 90_000)]
    )
    def test_a_read_fills_its_parts_in_turn(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer, sizes: tuple[int, ...]
    ) -> None:
        length = sum(sizes)
        offset = SIZE - length
        version = case.raw_put("k", DATA)
        places: list[tuple[int, int]] = []
        at = 0
        for size in sizes:  # one byte apart, so that a byte too many is seen
            places.append((at, at + size))
            at += size + 1
        parts = tuple(buffer.view[start:end] for start, end in places)
        done = drive(transport, [Op(3, "read", "k", offset, length, buffer, 0, version, SIZE, parts=parts)])[3]
        if not transport.capabilities.scatter:
            _assert_failed(done, UsageError)
            buffer.check()
            return
        assert (done.status, done.error, done.nbytes) == (Status.DONE, None, length)
        assert b"".join(parts) == DATA[offset:]
        buffer.check(*places)
        late = Op(4, "read", "k", offset, length + 1, buffer, 0, version, parts=(*parts, buffer.view[at : at + 1]))
        _assert_failed(drive(transport, [late])[4], SizeMismatchError, str(SIZE))
        del parts, late

    def test_landed_is_told_at_most_once_and_of_reads_that_are_done_only(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        version = case.raw_put("k", DATA)
        told: list[tuple[int, bytes]] = []
        ops = [
            Op(
                number, "read", key, 0, 4096, buffer, number * 4096, version if key == "k" else None,
                landed=lambda n=number: told.append((n, bytes(buffer.view[n * 4096 : (n + 1) * 4096]))),  # type: ignore[misc]
            )
            for number, key in enumerate(["k", "no/such", "k", "k"])
        ]  # fmt: skip
        done = drive(transport, ops)
        assert [done[number].status is Status.DONE for number in range(4)] == [True, False, True, True]
        assert len(told) == len({number for number, _ in told})
        assert {number for number, _ in told} <= {0, 2, 3}
        assert {data for _, data in told} <= {DATA[:4096]}

    def test_many_operations_in_flight_end_once_each(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        version = case.raw_put("k", DATA)
        piece = 4096
        count = SIZE // piece
        ops = [
            Op(number, "read", "k", number * piece, piece, buffer, number * piece, version, SIZE)
            for number in range(count)
        ]
        random.Random(2).shuffle(ops)
        done = drive(transport, ops)
        assert {item.status for item in done.values()} == {Status.DONE}
        assert buffer.view[: count * piece] == DATA[: count * piece]
        buffer.check((0, count * piece))
        assert transport.poll(0) == []

    def test_one_failure_does_not_disturb_the_others(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        version = case.raw_put("k", DATA)
        ops = [
            Op(
                number,
                "read",
                "missing" if number % 3 == 1 else "k",
                number * 4096,
                4096,
                buffer,
                number * 4096,
                version,
            )
            for number in range(30)
        ]
        ops = [replace(op, version=None) if op.key == "missing" else op for op in ops]
        done = drive(transport, ops)
        good = [op for op in ops if op.key == "k"]
        assert all(done[op.id].status is Status.DONE for op in good)
        assert all(done[op.id].status is Status.FAILED for op in ops if op.key == "missing")
        assert all(buffer.view[op.offset : op.offset + 4096] == DATA[op.offset : op.offset + 4096] for op in good)
        buffer.check(*((op.offset, op.offset + 4096) for op in good))

    def test_cancelled_operations_end_and_are_not_touched_again(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        version = case.raw_put("k", DATA)
        piece = 4096
        count = SIZE // piece
        transport.submit(
            [
                Op(number, "read", "k", number * piece, piece, buffer, number * piece, version, SIZE)
                for number in range(count)
            ]
        )
        transport.cancel(range(1, count, 2))
        for item in collect(transport, count).values():
            start = item.id * piece
            if item.status is Status.CANCELLED:
                assert item.id % 2 == 1
                assert item.nbytes == 0
                buffer.view[start : start + piece] = bytes([GUARD]) * piece
            else:
                assert item.status is Status.DONE or transport.capabilities.one_sided
                assert buffer.view[start : start + piece] == DATA[start : start + piece]
                buffer.view[start : start + piece] = bytes([GUARD]) * piece
        transport.close()
        buffer.check()

    def test_a_running_operation_can_be_cancelled(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        version = case.raw_put("k", DATA)
        if case.slow is not None:
            case.slow()
        transport.submit([Op(1, "read", "k", 0, SIZE, buffer, 0, version, SIZE)])
        if case.slow is not None:
            assert transport.poll(0.2) == []
        transport.cancel([1])
        done = collect(transport, 1)[1]
        allowed = {Status.CANCELLED} if case.slow is not None else {Status.CANCELLED, Status.DONE}
        assert done.status in allowed | ({Status.UNKNOWN} if transport.capabilities.one_sided else set())

    def test_cancelling_what_has_ended_or_never_was_means_nothing(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        case.raw_put("k", DATA)
        op = Op(1, "read", "k", 0, 4096, buffer)
        assert drive(transport, [op])[1].status is Status.DONE
        transport.cancel([1, 99])
        assert drive(transport, [op])[1].status is Status.DONE

    def test_writes(self, case: TransportCase, transport: Transport, buffer: GuardedBuffer) -> None:
        buffer.view[4096 : 4096 + SIZE] = DATA
        done = drive(transport, [Op(1, "write", "dir/new", 0, SIZE, buffer, 4096, object_size=SIZE)])[1]
        if not transport.capabilities.writes:
            _assert_failed(done, UsageError)
            with pytest.raises(NotFoundError):
                case.raw_get("dir/new")
            return
        assert (done.status, done.nbytes, done.error) == (Status.DONE, SIZE, None)
        assert case.raw_get("dir/new") == DATA
        assert buffer.view[4096 : 4096 + SIZE] == DATA

    @pytest.mark.parametrize("sizes", [(SIZE,), (1, SIZE - 1), (7,) * 3_000 + (SIZE - 21_000,)])
    def test_a_write_takes_its_parts_in_turn(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer, sizes: tuple[int, ...]
    ) -> None:
        data = memoryview(DATA)
        ends = list(accumulate(sizes))
        parts = tuple(data[end - size : end] for size, end in zip(sizes, ends, strict=True))
        op = Op(1, "write", "dir/parts", 0, SIZE, buffer, object_size=SIZE, parts=parts)
        done = drive(transport, [op])[1]
        if not (transport.capabilities.gather and transport.capabilities.writes):
            _assert_failed(done, UsageError)
            with pytest.raises(NotFoundError):
                case.raw_get("dir/parts")
            return
        assert (done.status, done.nbytes, done.error) == (Status.DONE, SIZE, None)
        assert case.raw_get("dir/parts") == DATA
        buffer.check()

    def test_an_empty_object_can_be_written(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        if not transport.capabilities.writes:
            return
        assert drive(transport, [Op(1, "write", "empty", 0, 0, buffer, object_size=0)])[1].status is Status.DONE
        assert case.raw_get("empty") == b""

    def test_a_write_of_a_part(self, case: TransportCase, transport: Transport, buffer: GuardedBuffer) -> None:
        if not transport.capabilities.writes:
            return
        case.raw_put("k", DATA)
        done = drive(transport, [Op(1, "write", "k", 4096, 4096, buffer, 0, object_size=SIZE)])[1]
        if transport.capabilities.ranged_write:
            assert done.status is Status.DONE
            assert case.raw_get("k") == DATA[:4096] + bytes([GUARD]) * 4096 + DATA[8192:]
        else:
            _assert_failed(done, UsageError, "k")
            assert case.raw_get("k") == DATA

    def test_a_reader_sees_an_old_or_a_new_object_whole(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        if not transport.capabilities.writes:
            return
        old, new = b"o" * SIZE, b"n" * SIZE
        case.raw_put("k", old)
        buffer.view[:SIZE] = new
        seen: list[bytes] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                seen.append(case.raw_get("k"))

        reader = threading.Thread(target=read)
        reader.start()
        done = drive(transport, [Op(number, "write", "k", 0, SIZE, buffer, object_size=SIZE) for number in range(5)])
        stop.set()
        reader.join()
        assert {item.status for item in done.values()} == {Status.DONE}
        assert set(seen) <= {old, new}
        assert case.raw_get("k") == new

    def test_poll_without_operations_returns_nothing(self, transport: Transport) -> None:
        assert transport.poll(0) == []
        assert transport.poll(0.01) == []

    def test_close_ends_what_is_queued_and_may_be_called_twice(
        self, case: TransportCase, transport: Transport, buffer: GuardedBuffer
    ) -> None:
        case.raw_put("k", DATA)
        transport.submit([Op(number, "read", "k", 0, 4096, buffer) for number in range(50)])
        transport.close()
        transport.close()
        statuses = {item.status for item in collect(transport, 50).values()}
        assert statuses <= {Status.DONE, Status.CANCELLED}
        with pytest.raises(KvctlError):
            transport.submit([Op(1, "read", "k", 0, 4096, buffer)])

    def test_it_takes_only_memory_of_its_kinds(self, transport: Transport) -> None:
        for kind in ("host", "pinned", "shared", "cuda", "tape"):
            buffer = GuardedBuffer(4096)
            buffer.kind = kind
            if kind in transport.capabilities.memory_kinds:
                transport.register(buffer).close()
            else:
                with pytest.raises(EnvError):
                    transport.register(buffer)
            buffer.close()

    def test_no_view_of_the_buffer_outlives_its_operation(self, case: TransportCase, transport: Transport) -> None:
        version = case.raw_put("k", DATA)
        buffer = GuardedBuffer(SIZE)
        kept = drive(
            transport,
            [
                Op(1, "read", "k", 0, SIZE, buffer, 0, version, SIZE),
                Op(2, "read", "k", 0, 4096, buffer, 0, "other", SIZE),
                Op(3, "read", "k", 0, 4096, buffer, 0, version, SIZE + 1),
                Op(4, "read", "missing", 0, 4096, buffer),
            ],
        )
        buffer.close()  # BufferError when a view is still held
        assert len(kept) == 4


def _pieces(buffer: GuardedBuffer, version: str) -> list[Op]:
    """Reads that together copy all whole pieces of DATA to the start of the buffer."""
    return [
        Op(number, "read", "k", number * _PIECE, _PIECE, buffer, number * _PIECE, version, SIZE)
        for number in range(SIZE // _PIECE)
    ]


def _assert_failed(done: Completion, kind: type[KvctlError], *words: str) -> None:
    assert done.status is Status.FAILED
    assert isinstance(done.error, kind), repr(done.error)
    assert done.nbytes == 0
    for word in words:
        assert word in f"{done.error} {done.error.cause or ''}", f"{word!r} is not in {done.error}"
