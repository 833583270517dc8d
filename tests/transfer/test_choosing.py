"""What a lane does next: order, hedges, a slow endpoint, a member that is down."""

from __future__ import annotations

import time

import pytest

from kvctl.core.errors import MemberDownError, NotFoundError
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import FIRST_WINDOW
from kvctl.transfer.tasks import Place, Task
from kvctl.transports.api import Op
from tests.transfer.scripted import DATA, PIECE, Landing, Scripted, Straggler, close, context, lanes_of, pieces


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


def test_two_endpoints_one_slowed_to_a_crawl_holds_few_ranges() -> None:
    """The slow one gets its first window and no more while the fast one does the rest."""

    def when_all_were_asked_for(transport: Scripted, op: Op) -> None:
        while len(slow.seen) + len(fast.seen) < len(DATA) // PIECE:
            time.sleep(0.001)

    slow, fast = Scripted(when_all_were_asked_for), Scripted()
    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(slow, fast, same_member=True)
    Executor(lanes, context(), hedge=False).run(pieces([0], buffer))
    close(lanes)
    assert bytes(buffer.view) == DATA
    assert len(slow.seen) <= FIRST_WINDOW
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
    stats = Executor(lanes, context(), hedge=False).run(pieces([0, 1], buffer))
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


@pytest.mark.parametrize("at_once", [False, True])
def test_a_slow_range_is_hedged_and_the_original_is_cancelled_before_hand_over(at_once: bool) -> None:
    handed: list[tuple[int, bytes]] = []
    buffer = HostBuffer(len(DATA))
    straggler = Straggler()
    lanes = lanes_of(Landing(straggler), Landing(straggler))
    tasks = pieces(
        [0, 1], buffer, on_bytes=lambda task, view: handed.append((task.offset, bytes(view))), at_once=at_once
    )
    stats = Executor(lanes, context()).run(tasks)
    close(lanes)
    assert bytes(buffer.view) == DATA
    assert sorted(handed) == [(at, DATA[at : at + PIECE]) for at in range(0, len(DATA), PIECE)]
    assert 1 <= stats.hedge_wins <= stats.hedges
    buffer.close()
