"""The executor on real lanes (mem, file) and on lanes that fail in set ways."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from kvctl.core.addresses import parse_store
from kvctl.core.cancel import CancelToken
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import (
    IntegrityError,
    InterruptedRunError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    StalledError,
    ThrottledError,
    TransientError,
    VersionChangedError,
)
from kvctl.memory.arena import Arena
from kvctl.memory.buffers import Buffer, HostBuffer
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import Lane, open_lanes, open_member
from kvctl.transfer.tasks import Place, Task
from kvctl.transports.api import Capabilities, Op, Registration
from kvctl.transports.threaded import OpCancelledError, ThreadedTransport

QUICK = RetryPolicy(base=0.001, cap=0.01, stall_timeout=1.0)
DATA = random.Random(7).randbytes(1 << 20)
PIECE = 64 << 10


def context(retry: RetryPolicy = QUICK) -> Context:
    return Context(retry=retry)


class Scripted(ThreadedTransport):
    """Serves DATA; before each read it does what `script(op)` says: raises, sleeps or nothing."""

    name = "scripted"

    def __init__(
        self, script: object = None, in_flight: int = 4, *, scatter: bool = False, threads: int | None = None
    ) -> None:
        super().__init__(Capabilities(max_in_flight=in_flight, scatter=scatter), threads=threads)
        self.script = script
        self.seen: list[int] = []
        self.release = threading.Event()

    def perform(self, op: Op) -> int:
        self.seen.append(op.offset)
        if callable(self.script):
            self.script(self, op)
        at = op.offset
        for view in op.views:
            view[:] = DATA[at : at + len(view)]
            at += len(view)
        return 1


def lanes_of(*transports: Scripted, same_member: bool = False) -> list[Lane]:
    return [Lane(0 if same_member else n, f"m{n}", "", transport) for n, transport in enumerate(transports)]


def pieces(members: Sequence[int], buffer: HostBuffer | None, **more: object) -> list[Task]:
    return [
        Task(tuple(Place(m, "k") for m in members), at, PIECE, buffer=buffer, buffer_offset=at, **more)  # type: ignore[arg-type]  # test options
        for at in range(0, len(DATA), PIECE)
    ]


def close(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.transport.close()


def test_every_byte_lands_and_counts_are_exact() -> None:
    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(), Scripted())
    stats = Executor(lanes, context(), hedge=False).run(pieces([0, 1], buffer))
    close(lanes)
    assert bytes(buffer.view) == DATA
    assert stats.tasks == stats.requests == len(DATA) // PIECE
    assert stats.bytes == sum(lane.bytes for lane in lanes) == len(DATA)
    assert (stats.retries, stats.hedges) == (0, 0)
    buffer.close()


@pytest.mark.parametrize("scheme", ["mem", "file"])
def test_real_stores(scheme: str, tmp_path: Path) -> None:
    urls = [f"mem://exec-{n}" if scheme == "mem" else str(tmp_path / str(n)) for n in range(3)]
    members = [open_member(url, n, parse_store(url), context()) for n, url in enumerate(urls)]
    for member in members:
        member.store.put("k", DATA)
    buffer = HostBuffer(len(DATA))
    opened = open_lanes(members)
    tasks = [
        Task(
            (Place(n % 3, "k", members[n % 3].store.stat("k").version),),
            at,
            PIECE,
            object_size=len(DATA),
            buffer=buffer,
            buffer_offset=at,
        )
        for n, at in enumerate(range(0, len(DATA), PIECE))
    ]
    Executor(opened.lanes, context()).run(tasks)
    opened.close()
    assert bytes(buffer.view) == DATA
    assert all(lane.bytes >= 5 * PIECE for lane in opened.lanes)
    buffer.close()


def test_only_the_failed_range_is_retried() -> None:
    failed: set[int] = set()

    def one_in_three(transport: Scripted, op: Op) -> None:
        if op.offset // PIECE % 3 == 0 and op.offset not in failed:
            failed.add(op.offset)
            raise ThrottledError("slow down")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(one_in_three))
    stats = Executor(lanes, context()).run(pieces([0], buffer))
    close(lanes)
    assert bytes(buffer.view) == DATA
    assert stats.retries == len(failed) == 6
    assert stats.requests == 16 + 6
    buffer.close()


def test_throttled_for_ever_gives_up_within_the_deadline_and_says_what_is_missing() -> None:
    def always(transport: Scripted, op: Op) -> None:
        raise ThrottledError("slow down")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(always))
    with pytest.raises(ThrottledError, match="gave up") as caught:
        Executor(lanes, context(RetryPolicy(0.001, 0.01, stall_timeout=0.2))).run(pieces([0], buffer))
    close(lanes)
    assert caught.value.exit_code == 6
    assert caught.value.details["missing_bytes"] == len(DATA)
    buffer.close()


def test_a_hang_ends_after_the_stall_timeout() -> None:
    def hang(transport: Scripted, op: Op) -> None:
        while not transport.is_cancelled(op.id):
            time.sleep(0.005)
        raise OpCancelledError

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(hang))
    with pytest.raises(StalledError):
        Executor(lanes, context(RetryPolicy(stall_timeout=0.2))).run(pieces([0], buffer))
    close(lanes)
    buffer.close()


def test_a_dead_member_with_replicas_is_reported_and_its_ranges_move() -> None:
    def dead(transport: Scripted, op: Op) -> None:
        raise MemberDownError("connection refused")

    refusing = Scripted(dead)

    def after_the_refusals(transport: Scripted, op: Op) -> None:
        while len(refusing.seen) < 3:
            time.sleep(0.001)

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(refusing, Scripted(after_the_refusals))
    executor = Executor(lanes, context())
    stats = executor.run(pieces([0, 1], buffer))
    close(lanes)
    assert bytes(buffer.view) == DATA
    assert lanes[0].down
    assert any("m0" in note and "down" in note for note in stats.notes)
    assert lanes[1].bytes == len(DATA)
    buffer.close()


def test_a_missing_object_on_one_replica_is_read_from_the_other() -> None:
    def missing(transport: Scripted, op: Op) -> None:
        raise NotFoundError("no object k")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(missing), Scripted())
    Executor(lanes, context()).run(pieces([0, 1], buffer))
    close(lanes)
    assert bytes(buffer.view) == DATA
    buffer.close()


@pytest.mark.parametrize("error", [NotFoundError("gone"), VersionChangedError("changed while loading")])
def test_fatal_errors_end_the_run(error: KvctlError) -> None:
    def fail(transport: Scripted, op: Op) -> None:
        if op.offset == 3 * PIECE:
            raise error

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(fail))
    with pytest.raises(type(error)):
        Executor(lanes, context()).run(pieces([0], buffer))
    close(lanes)
    buffer.close()


def test_a_changed_object_fails_even_when_a_replica_has_the_old_one() -> None:
    def changed(transport: Scripted, op: Op) -> None:
        raise VersionChangedError("changed while loading")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(changed), Scripted(lambda t, o: time.sleep(0.01)))
    with pytest.raises(VersionChangedError):
        Executor(lanes, context()).run(pieces([0, 1], buffer))
    close(lanes)
    buffer.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_slow_range_is_hedged_and_the_original_is_cancelled_before_hand_over(at_once: bool) -> None:
    def slow_once(transport: Scripted, op: Op) -> None:
        if op.offset == 5 * PIECE:
            while not transport.is_cancelled(op.id):
                time.sleep(0.002)
            op.view[:] = b"\xff" * op.length  # a late writer: must not be seen after the hand-over
            raise OpCancelledError

    handed: list[tuple[int, bytes]] = []
    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Landing(slow_once), Landing(lambda t, o: time.sleep(0.001)))
    tasks = pieces(
        [0, 1], buffer, on_bytes=lambda task, view: handed.append((task.offset, bytes(view))), at_once=at_once
    )
    stats = Executor(lanes, context()).run(tasks)
    close(lanes)
    assert bytes(buffer.view) == DATA
    assert sorted(handed) == [(at, DATA[at : at + PIECE]) for at in range(0, len(DATA), PIECE)]
    assert stats.hedge_wins <= stats.hedges
    buffer.close()


class Landing(Scripted):
    """Tells of bytes on the thread that moved them."""

    lands = True


class Waiting(Landing):
    """Every read is waited for."""

    def waited(self) -> int:
        return len(self.seen)


@pytest.mark.parametrize(
    ("lands", "at_once", "threads"),
    [(True, True, "kvctl-scripted"), (True, False, "kvctl-finish"), (False, True, "kvctl-finish")],
)
def test_what_waits_for_nothing_runs_on_the_thread_that_moved_the_bytes(
    lands: bool, at_once: bool, threads: str
) -> None:
    names: list[str] = []

    def look(task: Task, view: memoryview) -> None:
        assert view == DATA[task.offset : task.offset + task.length]
        names.append(threading.current_thread().name)

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Landing() if lands else Scripted())
    stats = Executor(lanes, context()).run(pieces([0], buffer, on_bytes=look, at_once=at_once))
    close(lanes)
    assert len(names) == stats.requests == stats.tasks == len(DATA) // PIECE
    assert stats.bytes == len(DATA)
    assert all(name.startswith(threads) for name in names)
    buffer.close()


def test_what_was_waited_for_is_looked_at_by_others() -> None:
    names: list[str] = []
    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Waiting(threads=1))
    look = lambda task, view: names.append(threading.current_thread().name)  # noqa: E731
    Executor(lanes, context()).run(pieces([0], buffer, on_bytes=look, at_once=True))
    close(lanes)
    assert len(names) == len(DATA) // PIECE
    assert all(name.startswith("kvctl-finish") for name in names)
    buffer.close()


def test_the_driver_sleeps_while_there_is_more_at_hand() -> None:
    """What was told to `landed` is polled with the last one that is in line."""
    started = threading.Event()
    transport = Landing(lambda t, o: started.wait(), in_flight=8, threads=1)
    buffer = HostBuffer(8 * PIECE)
    told: list[int] = []
    transport.submit(
        [
            Op(number, "read", "k", number * PIECE, PIECE, buffer, number * PIECE, landed=partial(told.append, number))
            for number in range(8)
        ]
    )
    started.set()
    done = transport.poll(None)
    assert told == [item.id for item in sorted(done, key=lambda item: item.started)] == list(range(8))
    assert transport.poll(0) == []
    transport.close()
    buffer.close()


def test_an_error_at_hand_over_ends_the_run_also_on_the_thread_that_moved_the_bytes() -> None:
    def fail(task: Task, view: memoryview) -> None:
        raise NotFoundError("nowhere to put it")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Landing())
    with pytest.raises(NotFoundError, match="nowhere to put it"):
        Executor(lanes, context()).run(pieces([0], buffer, on_bytes=fail, at_once=True))
    close(lanes)
    buffer.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_corrupt_bytes_are_read_again_then_elsewhere(at_once: bool) -> None:
    def corrupt(transport: Scripted, op: Op) -> None:
        return

    seen: dict[int, int] = {}

    def verify(task: Task, view: memoryview) -> None:
        seen[task.offset] = seen.get(task.offset, 0) + 1
        if task.offset == 0 and seen[0] <= 2:
            raise IntegrityError("leaf 0 of k is wrong")
        if bytes(view) != DATA[task.offset : task.offset + task.length]:
            raise AssertionError("wrong bytes handed over")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Landing(corrupt), Landing())
    stats = Executor(lanes, context(), hedge=False).run(pieces([0, 1], buffer, on_bytes=verify, at_once=at_once))
    close(lanes)
    assert seen[0] == 3
    assert stats.retries == 2
    buffer.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_bytes_that_stay_corrupt_fail(at_once: bool) -> None:
    def verify(task: Task, view: memoryview) -> None:
        raise IntegrityError("leaf 0 of k is wrong")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Landing())
    with pytest.raises(IntegrityError):
        Executor(lanes, context()).run(pieces([0], buffer, on_bytes=verify, at_once=at_once))
    close(lanes)
    buffer.close()


def test_an_arena_bounds_memory_and_its_slots_are_reused() -> None:
    got: dict[int, bytes] = {}
    arena = Arena(2, PIECE)
    lanes = lanes_of(Scripted())
    tasks = pieces([0], None, on_bytes=lambda task, view: got.__setitem__(task.offset, bytes(view)))
    Executor(lanes, context(), arena=arena).run(tasks)
    close(lanes)
    assert b"".join(got[at] for at in sorted(got)) == DATA
    assert arena.take() is not None
    assert arena.take() is not None
    assert arena.take() is None
    arena.close()


class Registering(Scripted):
    """Keeps what is registered with it."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[Buffer] = []
        self.ended: list[Buffer] = []

    def register(self, buffer: Buffer) -> Registration:
        self.registered.append(buffer)
        ended = self.ended

        class Ending:
            def close(self) -> None:
                ended.append(buffer)

        return Ending()


def test_shared_memory_is_registered_once_per_lane_and_let_go_with_the_run() -> None:
    arena, one, many = Arena(2, PIECE), HostBuffer(PIECE), HostBuffer(len(DATA))
    transports = [Registering(), Registering()]
    lanes = lanes_of(*transports)
    single = Task((Place(0, "k"),), 0, PIECE, buffer=one)
    tasks = [*pieces([0, 1], None), *pieces([0, 1], many), single]
    Executor(lanes, context(), arena=arena, hedge=False).run(tasks)
    for transport in transports:
        assert sorted(map(id, transport.registered)) == sorted(map(id, (arena.buffer, many)))
        assert sorted(map(id, transport.ended)) == sorted(map(id, transport.registered))
    close(lanes)


class Halves:
    """Every piece: two bytes through the arena, the first half in place, three bytes through the arena, the rest."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(len(DATA)))
        self.staged: dict[int, bytes] = {}

    def tasks(self, members: Sequence[int]) -> list[Task]:
        return [
            Task(tuple(Place(m, "k") for m in members), at, PIECE, on_bytes=self.keep, spread=partial(self.spread, at))
            for at in range(0, len(DATA), PIECE)
        ]

    def spread(self, at: int) -> list[memoryview | int]:
        half = at + PIECE // 2
        return [2, self.memory[at + 2 : half], 3, self.memory[half + 3 : at + PIECE]]

    def keep(self, task: Task, view: memoryview) -> None:
        self.staged[task.offset] = bytes(view)

    def check(self) -> None:
        for at, staged in self.staged.items():
            half = at + PIECE // 2
            assert staged == DATA[at : at + 2] + DATA[half : half + 3]
            self.memory[at : at + 2], self.memory[half : half + 3] = staged[:2], staged[2:]
        assert self.memory == DATA


@pytest.mark.parametrize("scatters", [(True, True), (False, False), (True, False)])
def test_spread_bytes_land_where_they_belong_whatever_the_transport_can(scatters: tuple[bool, ...]) -> None:
    halves = Halves()
    arena = Arena(3, PIECE)
    lanes = lanes_of(*(Scripted(scatter=scatter) for scatter in scatters))
    stats = Executor(lanes, context(), arena=arena, hedge=False).run(halves.tasks([0, 1]))
    close(lanes)
    halves.check()
    assert stats.requests == len(DATA) // PIECE
    arena.close()


def test_a_hedge_of_a_spread_read_lands_where_the_original_would_have() -> None:
    def slow_once(transport: Scripted, op: Op) -> None:
        if op.offset == 5 * PIECE:
            while not transport.is_cancelled(op.id):
                time.sleep(0.002)
            for view in op.views:
                view[:] = b"\xff" * len(view)  # a late writer: must not be seen after the hand-over
            raise OpCancelledError

    halves = Halves()
    arena = Arena(8, PIECE)
    lanes = lanes_of(Scripted(slow_once, scatter=True), Scripted(lambda t, o: time.sleep(0.001), scatter=True))
    Executor(lanes, context(), arena=arena).run(halves.tasks([0, 1]))
    close(lanes)
    halves.check()
    arena.close()


def test_stop_drains_and_tells() -> None:
    cancel = CancelToken()

    def stop_at_three(transport: Scripted, op: Op) -> None:
        if len(transport.seen) == 3:
            cancel.request(2)

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(stop_at_three, in_flight=1))
    with pytest.raises(InterruptedRunError) as caught:
        Executor(lanes, Context(cancel=cancel, retry=QUICK)).run(pieces([0], buffer))
    close(lanes)
    assert caught.value.signum == 2
    assert lanes[0].bytes == 3 * PIECE
    buffer.close()


def test_two_endpoints_one_slowed_to_a_crawl_holds_few_ranges() -> None:
    """The slow one gets its first window and no more while the fast one does the rest."""
    slow = Scripted(lambda t, o: time.sleep(0.3))
    fast = Scripted()
    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(slow, fast, same_member=True)
    Executor(lanes, context()).run(pieces([0], buffer))
    close(lanes)
    assert bytes(buffer.view) == DATA
    assert len(slow.seen) <= 2
    buffer.close()


def test_a_bug_in_a_transport_is_an_error_not_a_hang() -> None:
    def bug(transport: Scripted, op: Op) -> None:
        raise ZeroDivisionError

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(bug))
    with pytest.raises(KvctlError, match="ZeroDivisionError"):
        Executor(lanes, context()).run(pieces([0], buffer))
    close(lanes)
    buffer.close()


def test_lower_priority_values_go_first() -> None:
    transport = Scripted(in_flight=1)
    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(transport)
    tasks = [
        Task((Place(0, "k"),), at, PIECE, buffer=buffer, buffer_offset=at, priority=-at)
        for at in range(0, len(DATA), PIECE)
    ]
    Executor(lanes, context()).run(tasks)
    close(lanes)
    assert transport.seen == sorted(transport.seen, reverse=True)
    buffer.close()


def test_transient_is_the_only_retryable_class() -> None:
    assert TransientError("x").retryable
    assert not IntegrityError("x").retryable
