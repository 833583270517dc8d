"""Progress on stderr: a bar on a terminal, a line every ten seconds in a pipe, JSON lines on demand, or nothing.
SIGUSR1 asks for a line at any time. tqdm is imported when a bar is drawn.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Final, NoReturn

from kvctl.cli.output import Output
from kvctl.core.units import format_seconds, format_size, gigabytes_per_second

if TYPE_CHECKING:
    import tqdm

EVERY_SECONDS: Final = 10.0
SCHEMA: Final = "kvctl.progress/1"


class Quiet:
    """Counts, says nothing by itself; knows its status when asked. Base of the others. Thread-safe."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.lock = threading.Lock()
        self.label = ""
        self.total: int | None = None
        self.done = 0
        self.started = time.monotonic()

    def begin(self, label: str, total_bytes: int | None) -> None:
        with self.lock:
            self.label, self.total, self.done = label, total_bytes, 0
            self.started = time.monotonic()

    def advance(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes

    def note(self, message: str) -> None:
        self.output.note(message)

    def end(self) -> None:
        return

    def status(self) -> str:
        """'loading: 1.5 GiB of 4 GiB (37 %), 0.81 GB/s, 2 s, 3.1 s to go'."""
        seconds = time.monotonic() - self.started
        rate = gigabytes_per_second(self.done, seconds)
        parts = [format_size(self.done)]
        if self.total:
            parts = [f"{format_size(self.done)} of {format_size(self.total)} ({100 * self.done // self.total} %)"]
        parts += [f"{rate:.2f} GB/s", format_seconds(seconds)]
        if self.total and 0 < self.done < self.total:
            parts.append(f"{format_seconds(seconds * (self.total - self.done) / self.done)} to go")
        return f"{self.label or 'starting'}: {', '.join(parts)}"


class Plain(Quiet):
    """A line every `every` seconds, also while nothing moves; none for what ends sooner."""

    def __init__(self, output: Output, every: float = EVERY_SECONDS) -> None:
        super().__init__(output)
        self.every = every
        self.over = threading.Event()
        self.ticker: threading.Thread | None = None

    def begin(self, label: str, total_bytes: int | None) -> None:
        self.end()
        super().begin(label, total_bytes)
        self.over = threading.Event()
        self.ticker = threading.Thread(target=self._tick, args=(self.over,), daemon=True, name="kvctl-progress")
        self.ticker.start()

    def _tick(self, over: threading.Event) -> None:
        while not over.wait(self.every):
            self.line()

    def line(self) -> None:
        self.output.note(self.status())

    def end(self) -> None:
        """Ends the phase; once more is harmless."""
        ticker, self.ticker = self.ticker, None
        if ticker is not None:
            self.over.set()
            ticker.join()
            self.last()

    def last(self) -> None:
        return


class JsonLines(Plain):
    """One JSON object per line: at the start and the end of a phase, once a second between, and notes."""

    def __init__(self, output: Output, every: float = 1.0) -> None:
        super().__init__(output, every)

    def begin(self, label: str, total_bytes: int | None) -> None:
        super().begin(label, total_bytes)
        self._event("begin")

    def line(self) -> None:
        self._event("progress")

    def last(self) -> None:
        self._event("end")

    def _event(self, event: str) -> None:
        self.output.event(
            {
                "schema": SCHEMA,
                "event": event,
                "label": self.label,
                "bytes": self.done,
                "total_bytes": self.total,
                "seconds": round(time.monotonic() - self.started, 3),
            }
        )

    def note(self, message: str) -> None:
        self.output.event({"schema": SCHEMA, "event": "note", "message": message})


class Bar(Quiet):
    """A tqdm bar; notes appear above it."""

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self.bar: tqdm.tqdm[NoReturn] | None = None

    def begin(self, label: str, total_bytes: int | None) -> None:
        super().begin(label, total_bytes)
        from tqdm import tqdm

        self._close()
        bar: tqdm[NoReturn] = tqdm(
            total=total_bytes,
            desc=label,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            file=sys.stderr,
            leave=False,
            dynamic_ncols=True,
            mininterval=0.2,
        )
        with self.lock:
            self.bar = bar

    def advance(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            if self.bar is not None:
                self.bar.update(nbytes)

    def note(self, message: str) -> None:
        with self.lock:
            if self.bar is not None:
                self.bar.clear()
            self.output.note(message)
            if self.bar is not None:
                self.bar.refresh()

    def end(self) -> None:
        self._close()

    def _close(self) -> None:
        with self.lock:
            if self.bar is not None:
                self.bar.close()
                self.bar = None


def make_progress(kind: str, output: Output) -> Quiet:
    """The progress of --progress; 'auto' is a bar on a terminal, plain lines elsewhere, nothing with -q."""
    if kind == "auto":
        kind = "none" if output.quiet else "bar" if sys.stderr.isatty() else "plain"
    made: dict[str, type[Quiet]] = {"bar": Bar, "plain": Plain, "json": JsonLines, "none": Quiet}
    return made[kind](output)
