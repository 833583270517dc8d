"""What the answer to a request with an RDMA token must say before the bytes in memory count. Pure."""

from __future__ import annotations

import re
from typing import Final

from kvctl.core.errors import IncompatibleError, KvctlError, SizeMismatchError, VersionChangedError
from kvctl.transports.api import Op
from kvctl.transports.wire import Head
from kvctl_native.errors import from_status, parse_error_body
from kvctl_native.store import version_of

_RANGE: Final = re.compile(r"^bytes (?:(\d+)-(\d+)|\*)/(\d+)$")
_HINT: Final = "what is in between, a proxy or a cache, changes answers: use the node's own endpoint"


def check_empty(name: str, head: Head) -> None:
    """That no body came with it: the bytes went by RDMA or nowhere. Raises IncompatibleError."""
    if head.chunked or head.content_length not in {0, None} or head.rest:
        raise IncompatibleError(
            f"{name}: a body came where the bytes should have gone by RDMA",
            cause=f"{head.content_length} bytes" if head.content_length is not None else "of unknown length",
            hint="the server does not know the token's header: use native-tcp there",
        )


def check_read(name: str, op: Op, head: Head) -> None:
    """That exactly the range, of the version and size that were asked for, was placed. Raises IntegrityErrors or
    IncompatibleError.
    """
    etag = head.get("etag")
    if op.version is not None and (etag is None or version_of(etag) != op.version):
        raise VersionChangedError(
            f"{name} changed while loading",
            cause=f"version {op.version} became {etag}",
            hint="run it again to load the new version",
        )
    match = _RANGE.match(head.get("content-range") or "")
    if head.status != 206 or match is None or match[1] is None:
        raise IncompatibleError(f"{name}: an answer without a range", hint=_HINT)
    first, last, total = int(match[1]), int(match[2]), int(match[3])
    if op.object_size is not None and total != op.object_size:
        raise SizeMismatchError(
            f"{name} has {total} bytes, expected {op.object_size}",
            hint="the object was replaced or cut off: upload it again",
            details={"actual_size": total, "expected_size": op.object_size},
        )
    if (first, last) != (op.offset, op.offset + op.length - 1):
        short = last + 1 == total and first == op.offset
        raise SizeMismatchError(
            f"{name} has {total} bytes" if short else f"{name}: the node placed another range",
            cause=f"asked for {op.offset}-{op.offset + op.length - 1}, got {first}-{last}",
            hint="the object is cut off: upload it again" if short else _HINT,
            details={"actual_size": total, "expected_size": op.object_size},
        )


def refusal(url: str, op: Op, head: Head, body: bytes) -> KvctlError:
    """The error for an answer that is none of 2xx."""
    code, message = parse_error_body(body)
    match = _RANGE.match(head.get("content-range") or "")
    return from_status(
        url,
        op.key,
        head.status,
        code,
        message,
        doing=op.kind,
        object_size=max(op.object_size or 0, op.offset + op.length),
        actual_size=int(match[3]) if match else None,
    )
