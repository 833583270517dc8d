"""Limits and fault injection around transports: exact, without timing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvctl.core.errors import KvctlError, TransientError, UsageError
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.transport_contract import collect, drive
from kvctl.transports.api import Completion, Op, Status
from kvctl.transports.faults import FaultyStore, FaultyTransport, Rule
from kvctl.transports.limit import LimitedTransport, TokenBucket
from kvctl.transports.mem import MemStore, MemTransport


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recording(MemTransport):
    """Counts the most bytes that were in it at once."""

    def __init__(self, store: MemStore) -> None:
        super().__init__(store)
        self.inside: dict[int, int] = {}
        self.most = 0

    def submit(self, ops: Sequence[Op]) -> None:
        self.inside |= {op.id: op.length for op in ops}
        self.most = max(self.most, sum(self.inside.values()))
        super().submit(ops)

    def poll(self, timeout: float | None) -> list[Completion]:
        done = super().poll(timeout)
        for item in done:
            self.inside.pop(item.id, None)
        return done


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemStore:
    store = MemStore(f"wrap-{request.node.name}")
    store.put("k", bytes(range(256)) * 16)
    return store


def reads(buffer: GuardedBuffer, count: int, length: int = 100) -> list[Op]:
    return [Op(number, "read", "k", 0, length, buffer, number * length) for number in range(count)]


def test_a_bucket_gives_its_rate_and_no_more() -> None:
    clock = Clock()
    bucket = TokenBucket(1000.0, burst=100.0, clock=clock)
    assert bucket.take(100) == 0.0
    assert bucket.take(50) == pytest.approx(0.05)
    clock.now += 0.05
    assert bucket.take(50) == 0.0
    clock.now += 3600
    assert bucket.take(100) == 0.0  # no more than the burst was saved up
    assert bucket.take(1) > 0.0


def test_what_exceeds_the_burst_leaves_a_debt() -> None:
    clock = Clock()
    bucket = TokenBucket(1000.0, burst=100.0, clock=clock)
    assert bucket.take(5000) == 0.0
    assert bucket.take(100) == pytest.approx(5.0)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        TokenBucket(0)


@pytest.mark.parametrize(("limit", "most"), [(250, 200), (100, 100), (30, 100)])
def test_bytes_in_flight_stay_under_the_limit(store: MemStore, limit: int, most: int) -> None:
    buffer = GuardedBuffer(4096)
    inner = Recording(store)
    transport = LimitedTransport(inner, max_bytes_in_flight=limit)
    done = drive(transport, reads(buffer, 20))
    transport.close()
    buffer.close()
    assert {item.status for item in done.values()} == {Status.DONE}
    assert inner.most == most


def test_waiting_operations_are_cancelled_without_a_request(store: MemStore) -> None:
    buffer = GuardedBuffer(4096)
    clock = Clock()
    transport = LimitedTransport(MemTransport(store), bucket=TokenBucket(1000.0, burst=100.0, clock=clock))
    transport.submit(reads(buffer, 5))
    transport.cancel([1, 2, 3, 4])
    done = collect(transport, 5)
    transport.close()
    assert done[0].status is Status.DONE
    assert [(done[number].status, done[number].requests) for number in range(1, 5)] == [(Status.CANCELLED, 0)] * 4
    assert buffer.untouched(100)
    buffer.close()


def test_a_store_fails_where_the_rules_say(store: MemStore) -> None:
    faulty = FaultyStore(
        store,
        [Rule("before", "put", "a*", nth=2), Rule("after", "put", "b", error=lambda: TransientError("lost"))],
    )
    faulty.put("a", b"1")
    with pytest.raises(TransientError, match="injected"):
        faulty.put("a", b"2")
    faulty.put("a", b"3")
    with pytest.raises(TransientError, match="lost"):
        faulty.put("b", b"4")
    assert (store.get("a"), store.get("b")) == (b"3", b"4")


def test_a_seed_gives_the_same_faults_again(store: MemStore) -> None:
    def outcome(seed: int) -> list[bool]:
        faulty = FaultyStore(store, seed=seed, rate=0.5)
        results = []
        for _ in range(64):
            try:
                faulty.get("k")
                results.append(True)
            except KvctlError:
                results.append(False)
        return results

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)
    assert {*outcome(1)} == {True, False}


def test_a_transport_fails_delays_corrupts_and_replaces(store: MemStore) -> None:
    rules = [
        Rule("before", "read", nth=1),
        Rule("after", "read", nth=2),
        Rule("corrupt", "read", nth=3),
        Rule("delay", "read", nth=4, seconds=0.01),
        Rule("do", "read", nth=5, action=lambda key: void(store.put(key, b"z" * 100))),
    ]
    buffer = GuardedBuffer(4096)
    transport = FaultyTransport(MemTransport(store), rules)
    original = store.get("k", 0, 100)
    for op in reads(buffer, 5):
        done = drive(transport, [op])[op.id]
        landed = bytes(buffer.view[op.buffer_offset : op.buffer_offset + 100])
        if op.id == 0:
            assert (done.status, landed) == (Status.FAILED, b"\xa5" * 100)
        elif op.id == 1:
            assert (done.status, done.nbytes, landed) == (Status.FAILED, 0, original)
        elif op.id == 2:
            assert done.status is Status.DONE
            assert sum(one != other for one, other in zip(landed, original, strict=True)) == 1
        elif op.id == 3:
            assert (done.status, landed) == (Status.DONE, original)
        else:
            assert (done.status, landed) == (Status.DONE, b"z" * 100)
    transport.close()
    buffer.close()


def void(_: object) -> None:
    return
