"""`Link`: the sink's side of a control channel. One thread reads answers; any thread may ask."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlsplit

from kvctl.core.errors import (
    AuthError,
    EnvError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    SizeMismatchError,
    TransientError,
    UsageError,
    VersionChangedError,
)
from kvctl_nixl.peer import frames
from kvctl_nixl.peer.frames import Header, ProtocolError

_ERRORS: Final[dict[str, type[KvctlError]]] = {
    kind.code: kind
    for kind in (AuthError, EnvError, NotFoundError, SizeMismatchError, TransientError, UsageError, VersionChangedError)
}


class Call:
    """A question that was asked. `ended` when its answer came, or none can come any more."""

    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._name = name
        self._came = threading.Event()
        self.header: Header | None = None
        self.blob = b""

    def set(self, header: Header | None, blob: bytes) -> None:
        self.header, self.blob = header, blob
        self._came.set()

    @property
    def answered(self) -> bool:
        return self.header is not None

    def wait(self, seconds: float) -> bool:
        return self._came.wait(seconds)

    def result(self) -> tuple[Header, bytes]:
        """The answer that came. Raises what the source says, or MemberDownError when it has gone."""
        if self.header is None:
            raise self._link.down(self._name)
        if "error" in self.header:
            said = {name: str(value) for name in ("cause", "hint") if (value := self.header.get(name))}
            kind = _ERRORS.get(str(self.header["error"]), TransientError)
            raise kind(f"{self._link.url}: {self.header.get('what')}", cause=said.get("cause"), hint=said.get("hint"))
        return self.header, self.blob


class Link:
    """A connection to the source at `url` (ucx://host:port). `introduce` gives the name and metadata of the agent that
    the source is to know, once it has answered; none for questions only. Raises AuthError, IncompatibleError or
    MemberDownError, and what `introduce` raises.
    """

    def __init__(
        self,
        url: str,
        key: bytes,
        *,
        introduce: Callable[[], tuple[str, bytes]] = lambda: ("", b""),
        connect: float = 5.0,
        timeout: float = 30.0,
    ) -> None:
        self.url = url
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._why = ""
        parts = urlsplit(url)
        try:
            self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=connect)
        except OSError as problem:
            raise MemberDownError(
                f"{url}: the connection failed",
                cause=problem.strerror or str(problem),
                hint="does the source run, and is the address right?",
            ) from None
        try:
            self._socket.settimeout(timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.greeting = frames.greet_source(self._socket, key, introduce)
            self._socket.settimeout(None)
        except (OSError, ProtocolError, AuthError) as problem:
            self._socket.close()
            raise _from_greeting(url, problem) from None
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._read, name="kvctl-peer-link", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> bool:
        return bool(self._why)

    def down(self, name: str) -> MemberDownError:
        return MemberDownError(
            f"{self.url}: the connection broke ({name})",
            cause=self._why or "closed",
            hint="is the source still running?",
        )

    def ask(self, header: Header, blob: bytes = b"") -> Call:
        """Raises MemberDownError."""
        name = str(header.get("name", header.get("do", "")))
        call = Call(self, name)
        with self._lock:
            if self.dead:
                raise self.down(name)
            number = next(self._numbers)
            self._calls[number] = call
        try:
            with self._sending:
                frames.send(self._socket, {"id": number, **header}, blob)
        except OSError as problem:
            self._end(problem.strerror or str(problem))
            raise self.down(name) from None
        return call

    def question(self, header: Header) -> tuple[Header, bytes]:
        """Ask and wait. Raises what the source says; MemberDownError when it says nothing in time."""
        call = self.ask(header)
        if not call.wait(self._timeout):
            raise MemberDownError(
                f"{self.url}: no answer in time ({header.get('do')})",
                cause=f"nothing for {self._timeout:g} s",
                hint="is the source stopped? timeout=SECONDS allows more",
            )
        return call.result()

    def _read(self) -> None:
        why = "the source has closed it"
        try:
            while True:
                header, blob = frames.receive(self._socket)
                with self._lock:
                    call = self._calls.pop(frames.field(header, "id", int), None)
                if call is not None:
                    call.set(header, blob)
        except (OSError, ProtocolError) as problem:
            why = str(problem)
        finally:
            self._end(why)
            self._socket.close()

    def _end(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.set(None, b"")
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end("closed here")
        self._thread.join(timeout=5)


def _from_greeting(url: str, problem: Exception) -> KvctlError:
    if isinstance(problem, AuthError):
        return AuthError(f"{url}: {problem.what}", hint=problem.hint)
    if isinstance(problem, ProtocolError):
        return IncompatibleError(f"{url}: not a kvctl peer source", cause=str(problem))
    if isinstance(problem, TimeoutError):
        return MemberDownError(f"{url}: no answer in time", cause="timed out", hint="is the source stopped?")
    return MemberDownError(f"{url}: the connection broke", cause=str(problem), hint="is the source still running?")


def pages(link: Link, prefix: str) -> Iterator[tuple[Header, bytes]]:
    """The pages of a listing."""
    import json

    after = ""
    while True:
        header, blob = link.question({"do": "list", "prefix": prefix, "after": after})
        yield header, blob
        if not header.get("more"):
            return
        after = str(json.loads(blob)[-1][0])
