"""The one place that prints. Data goes to stdout, everything else to stderr, and all of it through `redact`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TextIO

from kvctl.core.errors import KvctlError

Format = Literal["human", "json", "jsonl"]
Style = Literal["red", "yellow", "cyan", "bold", "dim"]

ERROR_SCHEMA = "kvctl.error/1"
_CODES: Mapping[Style, str] = {"red": "31;1", "yellow": "33", "cyan": "36", "bold": "1", "dim": "2"}


def redact(text: str) -> str:
    # imported when there is something to say: help has nothing to hide and should cost little
    from kvctl.core import redact as module

    return module.redact(text)


def _json(value: object, indent: int | None = None) -> str:
    import json

    from kvctl.core.redact import redact_json

    return json.dumps(redact_json(value), indent=indent, ensure_ascii=False)


class StdoutClosedError(Exception):
    """The reader of stdout went away (`| head`): end quietly."""


class Output:
    """Formats and prints. Thread-safe: progress lines come from other threads."""

    def __init__(self, form: Format = "human", *, color: str = "auto", quiet: bool = False, verbose: int = 0) -> None:
        self.form = form
        self.color = color
        self.quiet = quiet
        self.verbose = verbose
        self._lock = threading.RLock()

    @property
    def human(self) -> bool:
        return self.form == "human"

    def styled(self, stream: TextIO) -> bool:
        """Whether colours go to this stream."""
        if self.color != "auto":
            return self.color == "always"
        return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()

    def style(self, text: str, how: Style, stream: TextIO | None = None) -> str:
        if not self.styled(stream or sys.stderr):
            return text
        return f"\x1b[{_CODES[how]}m{text}\x1b[0m"

    def text(self, text: str) -> None:
        """Human data, as it is."""
        self._write(sys.stdout, redact(text))

    def plain(self, text: str) -> None:
        """Text of the program itself (help, version), which cannot hold a secret."""
        self._write(sys.stdout, text)

    def result(self, document: Mapping[str, Any], human: Callable[[], str]) -> None:  # Any: JSON
        """A document that names its own schema."""
        self.document(document["schema"], document, human)

    def document(self, schema: str, value: Mapping[str, Any], human: Callable[[], str]) -> None:  # Any: JSON
        """One result: `human()` for people, else one JSON document that carries its schema."""
        if self.human:
            self.text(human())
            return
        self._write(sys.stdout, _json({"schema": schema, **value}, 2 if self.form == "json" else None))

    def rows(
        self, schema: str, name: str, rows: Iterable[Mapping[str, Any]], human: Callable[[list[Mapping[str, Any]]], str]
    ) -> None:  # Any: JSON
        """A list: a table for people, one document with `name` for json, a line per row for jsonl."""
        if self.form == "jsonl":
            for row in rows:
                self._write(sys.stdout, _json({"schema": schema, **row}))
            return
        listed = list(rows)
        self.document(schema, {name: listed}, lambda: human(listed))

    def note(self, message: str) -> None:
        """For the person, on stderr; silenced by -q."""
        if not self.quiet:
            self._write(sys.stderr, redact(message))

    def status(self, message: str) -> None:
        """For the person who asked for it (a signal): on stderr even with -q."""
        self._write(sys.stderr, redact(message))

    def detail(self, message: str) -> None:
        """On stderr with -v."""
        if self.verbose:
            self.note(self.style(message, "dim"))

    def event(self, value: Mapping[str, Any]) -> None:  # Any: JSON
        """A JSON line on stderr (progress on demand)."""
        self._write(sys.stderr, _json(value))

    def warning(self, message: str) -> None:
        self.note(f"{self.style('warning', 'yellow')}: {message}")

    def error(self, error: KvctlError, exit_code: int) -> None:
        """The one shape of errors: three lines for people, one JSON line otherwise; always on stderr."""
        if not self.human:
            self.event(
                {
                    "schema": ERROR_SCHEMA,
                    "error": {
                        "code": error.code,
                        "exit_code": exit_code,
                        "what": error.what,
                        "cause": error.cause,
                        "hint": error.hint,
                        "details": error.details,
                    },
                }
            )
            return
        lines = [f"{self.style('error', 'red')}: {error.what}"]
        if error.cause:
            lines.append(f"{self.style('cause', 'bold')}: {error.cause}")
        if error.hint:
            lines.append(f"{self.style('hint', 'cyan')}: {error.hint}")
        self.status("\n".join(lines))

    def ask(self, question: str) -> bool:
        """Yes or no from the terminal; no without one."""
        return self.prompt(f"{question} [y/N]").lower() in {"y", "yes"}

    def prompt(self, question: str) -> str:
        """A line typed by the person, stripped; empty when there is no terminal to ask at."""
        if not stdin_is_terminal():
            return ""
        with self._lock:
            sys.stderr.write(redact(f"{question} "))
            sys.stderr.flush()
        return sys.stdin.readline().strip()

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise StdoutClosedError from error

    def _write(self, stream: TextIO, text: str) -> None:
        line = text if text.endswith("\n") else text + "\n"
        with self._lock:
            try:
                stream.write(line)
                stream.flush()
            except BrokenPipeError as error:
                if stream is sys.stdout:
                    raise StdoutClosedError from error
            except UnicodeEncodeError:
                # a terminal or pipe of another encoding: escape what it cannot show
                encoding = stream.encoding or "ascii"
                stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
                stream.flush()


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def abandon_stdout() -> None:
    """Point stdout at /dev/null, so that the interpreter's last flush cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
