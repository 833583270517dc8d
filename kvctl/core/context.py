"""What every use case gets from its caller: where to report, when to stop, how to retry, what is configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvctl.core.cancel import CancelToken
from kvctl.core.events import NotesOnly, NullProgress, Progress

if TYPE_CHECKING:
    from kvctl.core.config import Config


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with full jitter: the pause before try n+1 is uniform in
    [0, min(cap, base * 2**n)] seconds. An operation that made no progress for `stall_timeout` seconds, or
    failed `attempts` times, is given up.
    """

    base: float = 0.1
    cap: float = 5.0
    attempts: int = 10
    stall_timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class Context:
    """Carried through every use case. `verbose`: 0 quiet .. 2 each request."""

    progress: Progress = field(default_factory=NullProgress)
    cancel: CancelToken = field(default_factory=CancelToken)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    config: Config | None = None
    verbose: int = 0

    @property
    def trace(self) -> Callable[[str], None] | None:
        """Where each request is told, with -v."""
        return self.progress.note if self.verbose else None

    def quiet(self) -> Context:
        """The same, with a progress that passes notes on and counts nothing."""
        return replace(self, progress=NotesOnly(self.progress))
