"""A run that stands still in its middle: what a test does meanwhile is done in the middle, on a slow machine too."""

from __future__ import annotations

import threading

from kvctl.core.events import NullProgress

SECONDS = 120.0


class Halt(NullProgress):
    """The progress of a run that stands still once its first bytes have arrived, until `go_on`."""

    def __init__(self) -> None:
        self._begun = False
        self._there = threading.Event()
        self._on = threading.Event()

    def begin(self, label: str, total_bytes: int | None) -> None:
        self._begun = True

    def advance(self, nbytes: int) -> None:
        if self._begun:
            self._there.set()
            self._on.wait(SECONDS)

    def wait(self) -> None:
        """Until it stands still."""
        assert self._there.wait(SECONDS), "no byte has arrived"

    def go_on(self) -> None:
        self._on.set()
