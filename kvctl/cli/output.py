"""The one place that prints. Data goes to stdout, everything else to stderr, and all of it through `redact`."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TextIO

from kvctl.core.errors import CapacityError, EnvError, KvctlError

Format = Literal["human", "json", "jsonl"]
Style = Literal["red", "yellow", "cyan", "bold", "dim"]

ERROR_SCHEMA = "kvctl.error/1"
_CODES: Mapping[Style, str] = {"red": "31;1", "yellow": "33", "cyan": "36", "bold": "1", "dim": "2"}


def redact(text: str) -> str:
    # imported when there is something to say: help has nothing to hide and should cost little
    from kvctl.core import redact as module

    return module.redact(text)


def visible(text: str) -> str:
    from kvctl.cli import tables

    return tables.visible(text)


def _json(value: object, indent: int | None = None) -> str:
    import json

    from kvctl.core.redact import redact_json

    # what no JSON can hold is shown as text: a message must come out whatever an error carries
    return json.dumps(redact_json(value), indent=indent, ensure_ascii=False, default=str)


class Output:
    """Formats and prints. Thread-safe: progress lines come from other threads."""

    def __init__(self, form: Format = "human", *, color: str = "auto", quiet: bool = False, verbose: int = 0) -> None:
        self.form = form
        self.color = color
        self.quiet = quiet
        self.verbose = verbose
        self.told = False  # an error was: there is one for each run
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
        self._note(visible(message))

    def _note(self, message: str) -> None:
        if not self.quiet:
            self._write(sys.stderr, redact(message))

    def status(self, message: str) -> None:
        """For the person who asked for it (a signal): on stderr even with -q."""
        self._write(sys.stderr, redact(message))

    def detail(self, message: str) -> None:
        """On stderr with -v."""
        if self.verbose:
            self._note(self.style(visible(message), "dim"))

    def event(self, value: Mapping[str, Any]) -> None:  # Any: JSON
        """A JSON line on stderr (progress on demand)."""
        self._write(sys.stderr, _json(value))

    def warning(self, message: str) -> None:
        self._note(f"{self.style('warning', 'yellow')}: {visible(message)}")

    def error(self, error: KvctlError, exit_code: int) -> None:
        """The one shape of errors: three lines for people, one JSON line otherwise; always on stderr."""
        self.told = True
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
        lines = [f"{self.style('error', 'red')}: {visible(error.what)}"]
        if error.cause:
            lines.append(f"{self.style('cause', 'bold')}: {visible(error.cause)}")
        if error.hint:
            lines.append(f"{self.style('hint', 'cyan')}: {visible(error.hint)}")
        self.status("\n".join(lines))

    def ask(self, question: str) -> bool:
        """Yes or no from the terminal; no without one."""
        return self.prompt(f"{question} [y/N]").lower() in {"y", "yes"}

    def prompt(self, question: str) -> str:
        """A line typed by the person, stripped; empty when there is no terminal to ask at."""
        if not stdin_is_terminal():
            return ""
        from kvctl.cli.signals import leaving_at_once

        with leaving_at_once():
            with self._lock:
                sys.stderr.write(redact(visible(f"{question} ")))
                sys.stderr.flush()
            return sys.stdin.readline().strip()

    def flush(self) -> None:
        self._write(sys.stdout, "")

    def _write(self, stream: TextIO, text: str) -> None:
        line = text if not text or text.endswith("\n") else text + "\n"
        with self._lock:
            try:
                try:
                    stream.write(line)
                except UnicodeEncodeError:
                    stream.write(_escaped(line, stream.encoding or "ascii"))
                stream.flush()
            except OSError as error:
                _abandon(stream)
                # who reads stdout may leave (`| head`), and nobody has to hear messages: the work goes on, and its exit
                # code is its own
                if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                    raise _unwritable(error) from error


def _unwritable(error: OSError) -> KvctlError:
    kind = CapacityError if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} else EnvError
    return kind("stdout cannot be written", cause=error.strerror, hint="the output is not complete")


def _escaped(text: str, encoding: str) -> str:
    """What a terminal or pipe of another encoding cannot show, as JSON writes it: so that JSON stays JSON."""
    import json

    return "".join(
        character if character.encode(encoding, "ignore") else json.dumps(character)[1:-1] for character in text
    )


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _abandon(stream: TextIO) -> None:
    """Point the stream at /dev/null, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test's has no descriptor
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


def open_closed_streams() -> None:
    """Where the caller closed stdin, stdout or stderr, put /dev/null: the next file that is opened would take its
    number, and get what any library prints.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good
