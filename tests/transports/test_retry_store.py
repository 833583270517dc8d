"""RetryStore: what is tried again, what is not, and what a lost answer means."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pytest

from kvctl.core.cancel import CancelToken
from kvctl.core.context import RetryPolicy
from kvctl.core.errors import (
    AuthError,
    ConflictError,
    InterruptedRunError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    ThrottledError,
    TransientError,
)
from kvctl.transports.api import ObjectInfo
from kvctl.transports.mem import MemStore
from kvctl.transports.retry import RetryStore

QUICK = RetryPolicy(base=0.0001, cap=0.001, attempts=4)


class Flaky(MemStore):
    """A mem store whose next calls fail with the given errors, before or after they took effect."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.before: list[KvctlError] = []
        self.after: list[KvctlError] = []
        self.calls = 0
        self.break_list_at: list[int] = []

    def _trip(self, pending: list[KvctlError]) -> None:
        if pending:
            raise pending.pop(0)

    def stat(self, key: str) -> ObjectInfo:
        self.calls += 1
        self._trip(self.before)
        return super().stat(key)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        self.calls += 1
        self._trip(self.before)
        info = super().put(key, data, if_absent=if_absent, if_version=if_version)
        self._trip(self.after)
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.calls += 1
        stop = self.break_list_at.pop(0) if self.break_list_at else -1
        for number, item in enumerate(super().list(prefix)):
            if number == stop:
                raise TransientError("a page was lost")
            yield item

    def now(self) -> datetime:
        self._trip(self.before)
        return super().now()


@pytest.fixture
def flaky(request: pytest.FixtureRequest) -> Flaky:
    return Flaky(f"retry-{request.node.name}")


def test_transient_failures_are_tried_again_and_counted(flaky: Flaky) -> None:
    flaky.put("k", b"x")
    notes: list[tuple[str, str]] = []
    store = RetryStore(flaky, QUICK, on_retry=lambda what, error, pause: notes.append((what, str(error))))
    flaky.before = [ThrottledError("slow down"), MemberDownError("reset")]
    assert store.stat("k").size == 1
    assert (store.retries, flaky.calls) == (2, 4)
    assert notes == [("stat k", "slow down"), ("stat k", "reset")]


def test_errors_that_cannot_change_are_not_tried_again(flaky: Flaky) -> None:
    store = RetryStore(flaky, QUICK)
    flaky.before = [AuthError("no")]
    with pytest.raises(AuthError):
        store.stat("k")
    with pytest.raises(NotFoundError):
        store.stat("k")
    assert (flaky.calls, store.retries) == (2, 0)


def test_gives_up_after_the_policys_attempts_with_the_last_error(flaky: Flaky) -> None:
    store = RetryStore(flaky, QUICK)
    flaky.before = [TransientError(f"no {number}") for number in range(9)]
    with pytest.raises(TransientError, match="no 3"):
        store.stat("k")
    assert flaky.calls == QUICK.attempts


def test_list_resumes_behind_the_last_key(flaky: Flaky) -> None:
    keys = [f"a/{number:03}" for number in range(20)]
    for key in keys:
        flaky.put(key, b"")
    flaky.calls = 0
    flaky.break_list_at = [7, 0, 15]
    assert [item.key for item in RetryStore(flaky, QUICK).list("a/")] == keys
    assert flaky.calls == 4


def test_a_conditional_put_whose_answer_was_lost_is_ours(flaky: Flaky) -> None:
    store = RetryStore(flaky, QUICK)
    flaky.after = [MemberDownError("reset after the put")]
    info = store.put("lock", b"mine", if_absent=True)
    assert flaky.get("lock") == b"mine"
    assert info.version == flaky.stat("lock").version


def test_a_lost_answer_does_not_make_another_writers_object_ours(flaky: Flaky) -> None:
    store = RetryStore(flaky, QUICK)
    MemStore(flaky.url.removeprefix("mem://")).put("lock", b"theirs")
    flaky.before = [MemberDownError("reset before the put")]
    with pytest.raises(ConflictError):
        store.put("lock", b"mine", if_absent=True)


def test_a_plain_conflict_is_not_read_back(flaky: Flaky) -> None:
    flaky.put("lock", b"mine")
    with pytest.raises(ConflictError):
        RetryStore(flaky, QUICK).put("lock", b"mine", if_absent=True)


def test_a_stop_request_ends_the_waiting(flaky: Flaky) -> None:
    cancel = CancelToken()
    cancel.request(2)
    flaky.before = [TransientError("x")]
    with pytest.raises(InterruptedRunError):
        RetryStore(flaky, QUICK, cancel=cancel).now()
