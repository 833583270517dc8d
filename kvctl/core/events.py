"""What running code tells its caller: progress and notes. The caller (CLI, API) decides what is shown."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Thread-safe. `begin` may be called again for the next phase; `advance` counts bytes."""

    def begin(self, label: str, total_bytes: int | None) -> None: ...
    def advance(self, nbytes: int) -> None: ...
    def note(self, message: str) -> None:
        """A line for the person or the log: a warning, a choice, a member that failed."""
        ...

    def end(self) -> None: ...


class NullProgress:
    """Says nothing."""

    def begin(self, label: str, total_bytes: int | None) -> None:
        return

    def advance(self, nbytes: int) -> None:
        return

    def note(self, message: str) -> None:
        return

    def end(self) -> None:
        return


class NotesOnly(NullProgress):
    """Passes notes on and counts nothing: for an inner run whose bytes the outer one counts in its own way."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def note(self, message: str) -> None:
        self._progress.note(message)
