"""The executor as a whole: real lanes (mem, file), exact counts, what it registers, and how a run ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvctl.core.addresses import parse_store
from kvctl.core.cancel import CancelToken
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import InterruptedRunError, StalledError, ThrottledError
from kvctl.memory.arena import Arena
from kvctl.memory.buffers import Buffer, HostBuffer
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import open_lanes, open_member
from kvctl.transfer.tasks import Place, Task
from kvctl.transports.api import Op, Registration
from kvctl.transports.threaded import OpCancelledError
from tests.transfer.scripted import DATA, PIECE, QUICK, Scripted, close, context, lanes_of, pieces


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


def test_throttled_for_ever_gives_up_within_the_deadline_and_says_what_is_missing() -> None:
    def always(transport: Scripted, op: Op) -> None:
        raise ThrottledError("slow down")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(always))
    with pytest.raises(ThrottledError, match="gave up") as caught:
        Executor(lanes, context(RetryPolicy(0.001, 0.01, stall_timeout=1.0))).run(pieces([0], buffer))
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
