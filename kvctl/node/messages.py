"""HTTP/1.1 heads, both ways: requests parsed by httptools, strictly; answers written. Pure but for the date."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote_to_bytes

import httptools

from kvctl.core.errors import (
    AuthError,
    CapacityError,
    ConflictError,
    IncompatibleError,
    KvctlError,
    NotFoundError,
    SizeMismatchError,
    TransientError,
    UsageError,
)

_RANGE: Final = re.compile(r"^bytes=(?:(\d{1,19})-(\d{0,19})|-(\d{1,19}))$")
_HEX_PAIRS: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}
_STATUS_OF: Final[tuple[tuple[type[KvctlError], int], ...]] = (
    (ConflictError, 412), (NotFoundError, 404), (AuthError, 403), (CapacityError, 507), (TransientError, 503),
    (SizeMismatchError, 416), (IncompatibleError, 501), (UsageError, 400),
)  # fmt: skip


class HttpError(Exception):
    """An answer that is no success. `close`: the connection cannot be used after it."""

    def __init__(
        self, status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None, close: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers: dict[str, str] = dict(headers or {})
        self.close = close


def as_http(error: KvctlError) -> HttpError:
    """The answer for an error of ours; one that has no status of its own tells nothing of the inside."""
    for kind, status in _STATUS_OF:
        if isinstance(error, kind):
            return HttpError(status, error.code, str(error))
    return HttpError(500, "internal", "the node failed; its log says more")


@dataclass(frozen=True, slots=True)
class Request:
    """A request's head. `target` as sent; `path` decoded, without the query; header names in lower case."""

    method: str
    target: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    keep_alive: bool
    length: int

    def get(self, name: str) -> str:
        """A header's value, empty where absent; `name` in lower case."""
        return self.headers.get(name, "")


class _Collector:
    """What httptools calls back."""

    def __init__(self) -> None:
        self.url = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.keep_alive = False
        self.parser: httptools.HttpRequestParser | None = None

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True
        # asked here: once the message is complete the parser has forgotten `Connection`
        self.keep_alive = self.parser is not None and self.parser.should_keep_alive()


def parse_request(head: bytes, max_headers: int) -> Request:
    """The request whose head, with its empty line, is `head`. Raises HttpError that closes."""
    seen = _Collector()
    seen.parser = parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # whatever it would become, it gets an answer in HTTP/1.1
    except httptools.HttpParserError as problem:
        raise _malformed(str(problem)) from None
    if not seen.complete or parser.get_http_version() not in {"1.0", "1.1"}:
        raise _malformed("no HTTP/1.1 request")
    if len(seen.fields) > max_headers:
        raise HttpError(431, "too_many_headers", f"more than {max_headers} headers", close=True)
    headers: dict[str, str] = {}
    for name, value in seen.fields:
        known = name.decode("latin-1").lower()
        if known in headers:
            raise _malformed(f"two headers {known}")
        headers[known] = value.decode("latin-1").strip(" \t")
    if "transfer-encoding" in headers:
        raise HttpError(411, "length_required", "send Content-Length, not chunks", close=True)
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or len(length) > 19:
        raise _malformed("Content-Length is no number")
    method = parser.get_method().decode("ascii")
    target = seen.url.decode("latin-1")
    raw_path, _, raw_query = seen.url.partition(b"?")
    if not raw_path.startswith(b"/"):
        raise _malformed("a target that is no path")
    return Request(method, target, _decode(raw_path), _parse_query(raw_query), headers, seen.keep_alive, int(length))


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """(offset, length) of a `Range` header; None without one. Raises HttpError 400, or 416 with the size."""
    if not text:
        return None
    match = _RANGE.match(text.replace(" ", ""))
    if match is None:
        raise HttpError(400, "range", "one range of bytes=A-B, A- or -N is understood")
    if match[3] is not None:
        length = min(int(match[3]), size)
        start = size - length
    else:
        start = int(match[1])
        last = min(int(match[2]), size - 1) if match[2] else size - 1
        if match[2] and int(match[2]) < start:
            raise HttpError(400, "range", "a range that ends before it starts")
        length = last - start + 1
    if length <= 0:
        raise HttpError(416, "size", f"the object has {size} bytes", headers={"content-range": f"bytes */{size}"})
    return start, length


def answer_head(status: int, length: int, headers: Mapping[str, str] | None = None, *, close: bool = False) -> bytes:
    """The head of an answer, ready to send."""
    extra = header_lines(headers or {})
    ending = "connection: close\r\n" if close else ""
    # RFC 9110: no length with 204
    size = "" if status == 204 else f"content-length: {length}\r\n"
    line = f"HTTP/1.1 {status} {_PHRASES.get(status, 'Status')}"
    text = f"{line}\r\nserver: kvctl\r\ndate: {http_date()}\r\n{extra}{size}{ending}\r\n"
    return text.encode("latin-1", "replace")


def header_lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def error_body(error: HttpError) -> bytes:
    return json.dumps({"code": error.code, "message": error.message}).encode()


def http_date(seconds: float | None = None) -> str:
    """As HTTP writes a time, in English whatever the locale."""
    return _date(int(time.time() if seconds is None else seconds))


@lru_cache(maxsize=1024)
def _date(seconds: int) -> str:
    moment = time.gmtime(seconds)
    day = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")[moment.tm_wday]
    month = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")[moment.tm_mon - 1]
    return (
        f"{day}, {moment.tm_mday:02} {month} {moment.tm_year:04} "
        f"{moment.tm_hour:02}:{moment.tm_min:02}:{moment.tm_sec:02} GMT"
    )


def parse_version(text: str, header: str) -> str | None:
    """The version in `If-Match: "v"`; None where the header is absent. Raises HttpError."""
    if not text:
        return None
    if len(text) < 3 or text[0] != '"' or text[-1] != '"' or '"' in text[1:-1]:
        raise HttpError(400, "condition", f'{header}: one version in quotes is understood ("..")')
    return text[1:-1]


def _decode(raw: bytes) -> str:
    if b"%" not in raw and raw.isascii():
        return raw.decode("ascii")
    if _HEX_PAIRS.search(raw):
        raise HttpError(400, "key", "a broken percent escape")
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise HttpError(400, "key", "a path that is no UTF-8") from None


def _parse_query(raw: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in raw.split(b"&") if raw else ():
        name, _, value = part.partition(b"=")
        key = _decode(name)
        if key in found:
            raise HttpError(400, "query", f"two values of {key[:40]!r}")
        found[key] = _decode(value.replace(b"+", b" "))
    return found


def _malformed(why: str) -> HttpError:
    return HttpError(400, "malformed", why, close=True)
