"""What the answer to a request with an RDMA token must say before the bytes in memory count. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvctl.core.errors import IncompatibleError
from kvctl.transports.api import Op
from kvctl.transports.http.ranges import check_read
from kvctl.transports.wire import Head

_HINT: Final = "what is in between, a proxy or a cache, changes answers: use the server's own endpoint"


def check_empty(name: str, head: Head) -> None:
    """That no body came with it: the bytes went by RDMA or nowhere. Raises IncompatibleError."""
    if head.chunked or head.content_length not in {0, None} or head.rest:
        raise IncompatibleError(
            f"{name}: a body came where the bytes should have gone by RDMA",
            cause=f"{head.content_length} bytes" if head.content_length is not None else "of unknown length",
            hint="the server does not know the token's header: use a transport without RDMA there",
        )


def check_placed(name: str, op: Op, head: Head) -> None:
    """That exactly the range, of the version and size that were asked for, was placed. Raises as `check_read` does: the
    answer has to say what one with a body would.
    """
    check_empty(name, head)
    as_if = replace(head, headers={**head.headers, "content-length": [str(op.length)]})
    check_read(op, as_if, name, whole=False, versions=True, hint=_HINT)
