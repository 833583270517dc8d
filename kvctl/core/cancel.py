"""Two-stage cancellation. The first signal asks to stop (drain, keep the journal), the second aborts."""

from __future__ import annotations

import threading

from kvctl.core.errors import InterruptedRunError


class CancelToken:
    """Set by the CLI's signal handlers, read by loops. `stopping`: issue nothing new, drain within
    `drain_seconds`. `aborting`: give up what is in flight. Thread-safe.
    """

    drain_seconds = 10.0

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._abort = threading.Event()
        self.signum = 0

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def aborting(self) -> bool:
        return self._abort.is_set()

    def request(self, signum: int) -> None:
        """First call: stop in order. Second call: abort."""
        if self._stop.is_set():
            self._abort.set()
        self.signum = self.signum or signum
        self._stop.set()

    def check(self, doing: str) -> None:
        """Raises InterruptedRunError when asked to stop; call it between steps that leave a good state."""
        if self.stopping:
            raise InterruptedRunError(f"stopped while {doing}", signum=self.signum)

    def wait(self, seconds: float) -> bool:
        """Sleep that a stop request ends; True when it did."""
        return self._stop.wait(seconds)
