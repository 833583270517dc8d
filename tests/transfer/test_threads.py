"""Threads that the system does not give, and drivers that end by a fault: told at once, never waited for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvctl.core.context import RetryPolicy
from kvctl.core.errors import CapacityError
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.execute import Executor
from kvctl.transports.api import Completion, Op
from tests.transfer.scripted import DATA, PIECE, Scripted, close, context, lanes_of, pieces


class Broken(Scripted):
    """A transport with a fault that nobody foresaw."""

    def submit(self, ops: Sequence[Op]) -> None:
        raise ZeroDivisionError(f"{len(ops)} ranges")

    def poll(self, timeout: float | None) -> list[Completion]:
        raise AssertionError("the driver has ended")


def test_a_fault_of_a_transport_ends_the_run_and_is_told() -> None:
    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Broken())
    patient = RetryPolicy(stall_timeout=3600.0)  # whoever waited for a stall would hang
    with pytest.raises(ZeroDivisionError):
        Executor(lanes, context(patient)).run(pieces([0], buffer))
    close(lanes)
    buffer.close()


def test_a_transport_works_with_the_threads_that_it_gets_and_says_when_it_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = HostBuffer(len(DATA))
    given = 1
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        nonlocal given
        if thread.name.startswith("kvctl-scripted"):
            if not given:
                raise RuntimeError("can't start new thread")
            given -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    lanes = lanes_of(Scripted())
    Executor(lanes, context()).run(pieces([0], buffer))
    close(lanes)
    assert bytes(buffer.view) == DATA
    alone = Scripted()
    with pytest.raises(CapacityError, match="can start no thread"):
        alone.submit([Op(1, "read", "k", 0, PIECE, buffer, 0)])
    alone.close()
    buffer.close()
