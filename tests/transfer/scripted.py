"""Lanes that do what a test says, over 1 MiB of known bytes in pieces of 64 KiB."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from kvctl.core.context import Context, RetryPolicy
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.lanes import Lane
from kvctl.transfer.tasks import Place, Task
from kvctl.transports.api import Capabilities, Op
from kvctl.transports.threaded import OpCancelledError, ThreadedTransport

QUICK = RetryPolicy(base=0.001, cap=0.01)
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

    def perform(self, op: Op) -> int:
        self.seen.append(op.offset)
        if callable(self.script):
            self.script(self, op)
        at = op.offset
        for view in op.views:
            view[:] = DATA[at : at + len(view)]
            at += len(view)
        return 1


class Landing(Scripted):
    """Tells of bytes on the thread that moved them."""

    lands = True


class Straggler:
    """A script for all lanes: the first attempt at one range ends when it is cancelled, and writes to the end."""

    def __init__(self) -> None:
        self._met = False

    def __call__(self, transport: Scripted, op: Op) -> None:
        if op.offset == 5 * PIECE and not self._met:
            self._met = True
            while not transport.is_cancelled(op.id):
                time.sleep(0.002)
            for view in op.views:
                view[:] = b"\xff" * len(view)  # a late writer: must not be seen after the hand-over
            raise OpCancelledError


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
