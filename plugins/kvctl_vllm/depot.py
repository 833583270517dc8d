"""The repo as an engine uses it: opened when first needed, one per thread, looked at anew now and then (its members may
change), and left alone for a while after it did not answer. The log hears of that once, and once when it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import IncompatibleError, IntegrityError, KvctlError
from kvctl.repo.repo import Repo

T = TypeVar("T")
log = logging.getLogger("vllm.kvctl")
FRESH: Final = 30.0  # seconds that an opened repo is used for
LONGEST: Final = 60.0  # seconds between tries of a repo that does not answer
PATIENCE: Final = RetryPolicy(base=0.05, cap=1.0, attempts=3, stall_timeout=15.0)


class Depot:
    """`rest`: seconds after a failure during which nothing is tried; twice as many after each further one. `name`: what
    the log calls it.
    """

    def __init__(self, stores: Sequence[StoreConfig], rest: float, name: str = "the KV store") -> None:
        self._name = name
        self.stores = tuple(stores)
        self.ctx = Context(retry=PATIENCE)
        self._rest = rest
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._local = threading.local()

    @property
    def resting(self) -> bool:
        return time.monotonic() < self._until

    def use(self, doing: str, work: Callable[[Repo], T]) -> T | None:
        """What `work` gives; None when the repo is left alone, or did not answer. What is wrong with single objects
        (IntegrityError, IncompatibleError) is logged, and no reason to leave it alone.
        """
        if self.resting:
            return None
        try:
            found = work(self._repo())
        except (IntegrityError, IncompatibleError) as error:
            log.warning("kvctl: %s: %s", doing, error)
            return None
        except KvctlError as error:
            self.failed(doing, error)
            return None
        except Exception as error:
            log.exception("kvctl: %s failed", doing)
            self.failed(doing, error)
            return None
        self.fine()
        return found

    def failed(self, doing: str, error: BaseException) -> None:
        self.close()
        with self._lock:
            self._failures += 1
            self._until = time.monotonic() + min(LONGEST, self._rest * 2 ** (self._failures - 1))
            first = self._failures == 1
        if first:
            log.warning(
                "kvctl: %s does not answer (%s: %s); requests compute what they cannot load until it does",
                self._name,
                doing,
                error,
            )

    def fine(self) -> None:
        with self._lock:
            back, self._failures, self._until = self._failures > 0, 0, 0.0
        if back:
            log.warning("kvctl: %s answers again", self._name)

    def _repo(self) -> Repo:
        opened: tuple[float, Repo] | None = getattr(self._local, "opened", None)
        if opened is None or time.monotonic() - opened[0] > FRESH:
            self.close()
            opened = self._local.opened = (time.monotonic(), Repo.open(self.stores, self.ctx))
        return opened[1]

    def close(self) -> None:
        """Give up the repo that this thread has open; the next use opens it again."""
        opened: tuple[float, Repo] | None = getattr(self._local, "opened", None)
        self._local.opened = None
        if opened is not None:
            opened[1].close()
