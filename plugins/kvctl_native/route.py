"""The way to one endpoint of a node: where to connect, and how a request's head is written and given its token."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from kvctl.transports.node_auth import RDMA_HEADERS, TOKEN_HEADER, Asked
from kvctl.transports.wire import Connection
from kvctl_native.settings import NodeAccess, Place


@lru_cache(maxsize=4096)
def encode_key(key: str) -> str:
    """A key as it stands in a target."""
    return quote(key, safe="/-._~")


class Route:
    """Immutable; may be used from any thread."""

    def __init__(self, access: NodeAccess, place: Place) -> None:
        self.endpoint = place.url
        self._access = access
        self._place = place
        self._tls = access.tls_context if place.tls else None
        self._start = lru_cache(maxsize=1024)(self._start_of)

    def connect(self, receive_buffer: int = 0) -> Connection:
        """Raises OSError."""
        return Connection(
            self._place.host,
            self._place.port,
            tls=self._tls,
            connect_timeout=self._access.connect_timeout,
            timeout=self._access.timeout,
            receive_buffer=receive_buffer,
        )

    def read_head(self, key: str, first: int, last: int, version: str | None) -> bytes:
        """`head` of a GET of a range, for the many that there are: the node's quick way expects just this form."""
        target, start = self._start(key)
        span = f"bytes={first}-{last}"
        match = f'"{version}"' if version is not None else ""
        token = ""
        if self._access.key is not None:
            token = f"{TOKEN_HEADER}: {self._access.key.token(Asked('GET', target, span, match))}\r\n"
        condition = f"if-match: {match}\r\n" if match else ""
        return f"{start}{token}range: {span}\r\n{condition}\r\n".encode("latin-1")

    def _start_of(self, key: str) -> tuple[str, str]:
        target = f"/v1/{encode_key(key)}"
        return target, f"GET {target} HTTP/1.1\r\nhost: {self._place.host_header}\r\nuser-agent: kvctl\r\n"

    def head(
        self,
        method: str,
        key: str,
        *,
        query: str = "",
        span: tuple[int, int] | None = None,
        if_match: str | None = None,
        if_absent: bool = False,
        length: int | None = None,
        rdma: str = "",
        rdma_header: str = RDMA_HEADERS[0],
        plain: bool = False,
    ) -> bytes:
        """The head of a request for `key` (empty: the node's lists). `span`: first and last byte. `rdma`: a token that
        names memory, in the header of its dialect. `plain`: without `/v1`.
        """
        target = f"{'/' if plain else '/v1/'}{encode_key(key)}{'?' if query else ''}{query}"
        asked = Asked(
            method,
            target,
            "" if span is None else f"bytes={span[0]}-{span[1]}",
            "" if if_match is None else f'"{if_match}"',
            "*" if if_absent else "",
            rdma,
        )
        lines = [f"{method} {target} HTTP/1.1", f"host: {self._place.host_header}", "user-agent: kvctl"]
        if self._access.key is not None:
            lines.append(f"{TOKEN_HEADER}: {self._access.key.token(asked)}")
        for name, value in (
            ("range", asked.range),
            ("if-match", asked.if_match),
            ("if-none-match", asked.if_none_match),
            (rdma_header, rdma),
        ):
            if value:
                lines.append(f"{name}: {value}")
        if length is not None:
            lines.append(f"content-length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
