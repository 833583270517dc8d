"""What follows the end of an attempt: tried again there or elsewhere, or the run fails."""

from __future__ import annotations

import time

import pytest

from kvctl.core.errors import (
    IntegrityError,
    KvctlError,
    NotFoundError,
    ThrottledError,
    TransientError,
    VersionChangedError,
)
from kvctl.memory.buffers import HostBuffer
from kvctl.transfer.execute import Executor
from kvctl.transfer.tasks import Task
from kvctl.transports.api import Op
from tests.transfer.scripted import DATA, PIECE, Landing, Scripted, close, context, lanes_of, pieces


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

    replaced = Scripted(changed)

    def after_it(transport: Scripted, op: Op) -> None:
        while not replaced.seen:
            time.sleep(0.001)

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(replaced, Scripted(after_it))
    with pytest.raises(VersionChangedError):
        Executor(lanes, context()).run(pieces([0, 1], buffer))
    close(lanes)
    buffer.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_corrupt_bytes_are_read_again_then_elsewhere(at_once: bool) -> None:
    seen: dict[int, int] = {}

    def verify(task: Task, view: memoryview) -> None:
        seen[task.offset] = seen.get(task.offset, 0) + 1
        if task.offset == 0 and seen[0] <= 2:
            raise IntegrityError("leaf 0 of k is wrong")
        if bytes(view) != DATA[task.offset : task.offset + task.length]:
            raise AssertionError("wrong bytes handed over")

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Landing(), Landing())
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


def test_a_bug_in_a_transport_is_an_error_not_a_hang() -> None:
    def bug(transport: Scripted, op: Op) -> None:
        raise ZeroDivisionError

    buffer = HostBuffer(len(DATA))
    lanes = lanes_of(Scripted(bug))
    with pytest.raises(KvctlError, match="ZeroDivisionError"):
        Executor(lanes, context()).run(pieces([0], buffer))
    close(lanes)
    buffer.close()


def test_transient_is_the_only_retryable_class() -> None:
    assert TransientError("x").retryable
    assert not IntegrityError("x").retryable
