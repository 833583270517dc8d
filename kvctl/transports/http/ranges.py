"""What the answer to a ranged GET must say before its bytes count. Pure."""

from __future__ import annotations

import re
from typing import Final

from kvctl.core.errors import IncompatibleError, SizeMismatchError, VersionChangedError
from kvctl.transports.api import Op
from kvctl.transports.wire import Head

_RANGE: Final = re.compile(r"bytes (?:([0-9]+)-([0-9]+)|\*)/([0-9]+|\*)")
_AGAIN: Final = "the object was replaced or cut off: upload it again"


def version_of(etag: str) -> str:
    """The ETag as an opaque version: without its quotes, which servers set in some answers and not in others."""
    return etag[1:-1] if len(etag) >= 2 and etag[0] == etag[-1] == '"' else etag


def object_size(head: Head) -> int | None:
    """The size of the whole object, where the answer says it."""
    match = _RANGE.fullmatch(head.get("content-range") or "")
    return int(match[3]) if match and match[3] != "*" else None


def check_read(op: Op, head: Head, name: str, *, whole: bool, versions: bool, hint: str) -> None:
    """That the body to come is exactly the range, of the object and version that `op` asked for. `whole`: the server
    may send an object without `Content-Range` where all of it was asked for. `versions`: it must say the version.
    `hint`: what to do about an answer that no such server gives.

    Raises VersionChangedError, SizeMismatchError, IncompatibleError or ProtocolError.
    """
    etag = head.get("etag")
    if op.version is not None and (version_of(etag) != op.version if etag is not None else versions):
        raise VersionChangedError(
            f"{name} changed while loading",
            cause=f"version {op.version} became {etag}",
            hint="run it again to load the new version",
        )
    if head.chunked:
        raise IncompatibleError(
            f"{name}: the server answers a range in chunks, so its length cannot be checked", hint=hint
        )
    length = head.content_length
    if head.status == 200 and whole:
        _check_whole(op, length, name)
    else:
        _check_range(op, head, name, hint)
    if length != op.length:
        raise SizeMismatchError(
            f"{name}: the server sends {length} bytes for a range of {op.length}",
            hint=hint,
            details={"actual": length, "expected": op.length},
        )
    if len(head.rest) > op.length:
        raise SizeMismatchError(
            f"{name}: the server sent more than it announced", cause=f"{op.length} bytes", hint=hint
        )


def _check_whole(op: Op, length: int | None, name: str) -> None:
    if op.object_size is not None and length is not None and length != op.object_size:
        raise wrong_size(name, length, op.object_size)
    if op.offset != 0 or length != op.length:
        raise IncompatibleError(
            f"{name}: the server ignores Range",
            cause=f"asked for {op.length} bytes at {op.offset}, it sends all {length}",
            hint="a proxy in between? use the server's own endpoint",
        )


def _check_range(op: Op, head: Head, name: str, hint: str) -> None:
    said = head.get("content-range") or ""
    match = _RANGE.fullmatch(said)
    if head.status != 206 or match is None or match[1] is None:
        raise IncompatibleError(f"{name}: an answer without a range", cause=repr(said), hint=hint)
    first, last, total = int(match[1]), int(match[2]), match[3]
    if op.object_size is not None:
        if total == "*":
            raise IncompatibleError(f"{name}: the server does not say the object's size", cause=said)
        if int(total) != op.object_size:
            raise wrong_size(name, int(total), op.object_size)
    if (first, last) != (op.offset, op.offset + op.length - 1):
        cut = first == op.offset and total == str(last + 1)
        raise SizeMismatchError(
            f"{name} has {total} bytes" if cut else f"{name}: the server sends another range",
            cause=f"asked for {op.offset}-{op.offset + op.length - 1}, got {said}",
            hint=_AGAIN if cut else hint,
            details={"actual_size": None if total == "*" else int(total), "expected_size": op.object_size},
        )


def expected_read(op: Op) -> tuple[bytes, bytes]:
    """See `Dialect.expected`: for those who check by `check_read`."""
    if op.object_size is None:
        return b"", b""
    span = b"bytes %d-%d/%d" % (op.offset, op.offset + op.length - 1, op.object_size)
    return span, b"" if op.version is None else f'"{op.version}"'.encode("utf-8", "replace")


def wrong_size(name: str, actual: int, expected: int) -> SizeMismatchError:
    return SizeMismatchError(
        f"{name} has {actual} bytes, expected {expected}",
        hint=_AGAIN,
        details={"actual_size": actual, "expected_size": expected},
    )
