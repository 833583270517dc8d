"""`RetryStore`: any store, with its transient failures tried again by one policy. No other retry exists.

Pauses have full jitter. Only errors that say `retryable` are tried again. A conditional put whose answer was
lost may have landed: when its retry then loses to "somebody", the object is read back, and content equal to
ours counts as ours. So writers that race for a lock or lease must write something of their own into it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Protocol, TypeVar, runtime_checkable

from kvctl.core.cancel import CancelToken
from kvctl.core.context import RetryPolicy
from kvctl.core.errors import ConflictError, KvctlError, NotFoundError
from kvctl.transports.api import Copied, ObjectInfo, Store, StoreCapabilities, UploadInfo
from kvctl.transports.wrapper import copier

T = TypeVar("T")


@runtime_checkable
class PagedList(Protocol):
    """A store whose lists can be had page by page, so that only a failed page is asked for again. Without it, a
    broken list starts over and skips. `lists_in_order`: pages come bytewise sorted.
    """

    @property
    def lists_in_order(self) -> bool: ...
    def list_page(self, prefix: str, token: str) -> tuple[Sequence[ObjectInfo], str]:
        """A page and the token of the next one; '' is the first and behind the last."""
        ...


def from_pages(page: Callable[[str], tuple[Sequence[ObjectInfo], str]], *, in_order: bool) -> Iterator[ObjectInfo]:
    """All objects of a paged list in bytewise order: as pages come in, or sorted once all are there."""
    everything: list[ObjectInfo] = []
    token = ""
    while True:
        items, token = page(token)
        if in_order:
            yield from items
        else:
            everything.extend(items)
        if not token:
            break
    everything.sort(key=lambda item: item.key.encode())
    yield from everything


class RetryStore:
    """See `kvctl.transports.api.Store`. Thread-safe. `retries` counts the tries beyond the first;
    `on_retry(what, error, pause_seconds)` is called before each pause.

    Raises what the last try raised; InterruptedRunError when `cancel` asks to stop during a pause.
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy | None = None,
        *,
        cancel: CancelToken | None = None,
        on_retry: Callable[[str, KvctlError, float], None] | None = None,
    ) -> None:
        self.inner = inner
        self.policy = policy or RetryPolicy()
        self.retries = 0
        self._cancel = cancel or CancelToken()
        self._on_retry = on_retry
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return self.inner.capabilities

    def stat(self, key: str) -> ObjectInfo:
        return self._call(f"stat {key}", lambda: self.inner.stat(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every key once, in order, even when pages fail: a try after a failure goes on behind the last key."""
        if isinstance(self.inner, PagedList):
            paged = self.inner
            yield from from_pages(
                lambda token: self._call(f"list {prefix}", lambda: paged.list_page(prefix, token)),
                in_order=paged.lists_in_order,
            )
            return
        last: str | None = None
        items = iter(self.inner.list(prefix))
        while True:

            def following(last: str | None = last) -> ObjectInfo | None:
                nonlocal items
                try:
                    for item in items:
                        if last is None or item.key.encode() > last.encode():
                            return item
                except KvctlError:
                    items = iter(self.inner.list(prefix))  # a generator that raised is spent
                    raise
                return None

            found = self._call(f"list {prefix}", following)
            if found is None:
                return
            last = found.key
            yield found

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._call(f"get {key}", lambda: self.inner.get(key, start, length))

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        lost = False

        def once() -> ObjectInfo:
            nonlocal lost
            try:
                return self.inner.put(key, data, if_absent=if_absent, if_version=if_version)
            except ConflictError:
                mine = self._read_back(key, data) if lost else None
                if mine is None:
                    raise
                return mine
            except KvctlError as problem:
                lost = lost or problem.retryable
                raise

        return self._call(f"put {key}", once)

    def _read_back(self, key: str, data: bytes | memoryview) -> ObjectInfo | None:
        """The object's info when it holds exactly `data`."""
        try:
            info = self.stat(key)
            if info.size != len(data) or self.get(key) != data:
                return None
            # the version belongs to the bytes just compared only when it is still the same
            return info if self.stat(key).version == info.version else None
        except NotFoundError:
            return None

    def copy(self, source: str, key: str, *, if_version: str) -> Copied:
        inner = copier(self.inner)
        return self._call(f"copy {source}", lambda: inner.copy(source, key, if_version=if_version))

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        what = f"delete {keys[0]}" if len(keys) == 1 else f"delete {len(keys)} keys"
        self._call(what, lambda: self.inner.delete(keys, if_version=if_version))

    def now(self) -> datetime:
        return self._call("read the clock", self.inner.now)

    def uploads(self) -> Iterator[UploadInfo]:
        return iter(self._call("list uploads", lambda: [*self.inner.uploads()]))

    def abort(self, upload: UploadInfo) -> None:
        self._call(f"abort the upload of {upload.key}", lambda: self.inner.abort(upload))

    def close(self) -> None:
        self.inner.close()

    def _call(self, what: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except KvctlError as problem:
            if not problem.retryable:
                raise
            return self._again(what, function, problem)

    def _again(self, what: str, function: Callable[[], T], first: KvctlError) -> T:
        # imported on the first failure: tenacity costs 60 ms of CPU
        from tenacity import (
            RetryCallState,
            Retrying,
            retry_if_exception,
            stop_after_attempt,
            stop_before_delay,
            wait_random_exponential,
        )

        failed: KvctlError | None = first

        def attempt() -> T:
            nonlocal failed
            if failed is not None:  # the first try has run already; its failure sets the first pause
                problem, failed = failed, None
                raise problem
            return function()

        def before_pause(state: RetryCallState) -> None:
            with self._lock:
                self.retries += 1
            problem = state.outcome.exception() if state.outcome else None
            if self._on_retry and isinstance(problem, KvctlError):
                self._on_retry(what, problem, state.upcoming_sleep)

        def pause(seconds: float) -> None:
            self._cancel.wait(seconds)
            self._cancel.check(f"waiting to try again: {what}")

        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, KvctlError) and error.retryable),
            stop=stop_after_attempt(self.policy.attempts) | stop_before_delay(self.policy.stall_timeout),
            wait=wait_random_exponential(multiplier=self.policy.base, max=self.policy.cap),
            before_sleep=before_pause,
            sleep=pause,
            reraise=True,
        )
        result: T = retrying(attempt)
        return result
