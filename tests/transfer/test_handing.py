"""Bytes that have arrived: where they land, on which thread they are looked at, in which memory they wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import pytest

from kvctl.core.errors import NotFoundError
from kvctl.memory.arena import Arena
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.execute import Executor
from kvctl.transfer.tasks import Place, Task
from kvctl.transports.api import Op
from tests.transfer.scripted import DATA, PIECE, Landing, Scripted, Straggler, close, context, lanes_of, pieces


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
    halves = Halves()
    arena = Arena(8, PIECE)
    straggler = Straggler()
    lanes = lanes_of(Scripted(straggler, scatter=True), Scripted(straggler, scatter=True))
    stats = Executor(lanes, context(), arena=arena).run(halves.tasks([0, 1]))
    close(lanes)
    assert stats.hedge_wins >= 1
    halves.check()
    arena.close()
