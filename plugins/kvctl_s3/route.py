"""The way to one endpoint of a store: where to connect, and how a request's head is written and signed."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from kvctl.transports.wire import Connection
from kvctl_s3.access import Access
from kvctl_s3.settings import uses_path_style
from kvctl_s3.signing import EMPTY_PAYLOAD, Signer, encode_path


class Route:
    """Immutable; `connect` and `head` may be called from any thread, a `Signer` belongs to one at a time."""

    def __init__(self, access: Access, endpoint: str) -> None:
        settings = access.settings
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        path_style = uses_path_style(endpoint, settings.bucket, settings.addressing)
        self.endpoint = endpoint
        self._access = access
        self._host = host if path_style else f"{settings.bucket}.{host}"
        self._port = parts.port or (443 if secure else 80)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._host_header = shown if parts.port is None else f"{shown}:{parts.port}"
        self._root = f"/{settings.bucket}/" if path_style else "/"
        self._bucket_path = f"/{settings.bucket}" if path_style else "/"
        self._tls = access.tls_context if secure else None

    def connect(self, receive_buffer: int = 0, *, timeout: float | None = None) -> Connection:
        """`timeout`: seconds without a byte, instead of those of the settings. Raises OSError."""
        settings = self._access.settings
        return Connection(
            self._host,
            self._port,
            tls=self._tls,
            connect_timeout=settings.connect_timeout,
            timeout=settings.timeout if timeout is None else timeout,
            receive_buffer=receive_buffer,
        )

    def source(self, key: str) -> str:
        """An object as the header `x-amz-copy-source` names it."""
        return encode_path(f"/{self._access.settings.bucket}/{key}")

    def url(self, key: str) -> str:
        """Where a request for `key` goes; it holds no secret."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{self._host_header}{encode_path(self._root + key)}"

    def signer(self) -> Signer:
        return Signer(self._access.region)

    def head(
        self,
        signer: Signer,
        method: str,
        key: str | None,
        extra: str = "",
        *,
        query: str = "",
        payload: str = EMPTY_PAYLOAD,
        amz: Sequence[tuple[str, str]] = (),
    ) -> bytes:
        """The head of a request for an object, or for the bucket (`key` None). `extra`: more header lines, each with
        its line end. `amz`: `x-amz-*` headers, which are signed. `query` is encoded and sorted. Raises AuthError
        without credentials.
        """
        path = self._bucket_path if key is None else encode_path(self._root + key)
        credentials = self._access.credentials()
        signed = amz
        if credentials is not None:
            signed = signer.headers(
                method, self._host_header, path, credentials, query=query, payload=payload, more=amz
            )
        auth = "".join(f"{name}: {value}\r\n" for name, value in signed)
        target = f"{path}?{query}" if query else path
        return (
            f"{method} {target} HTTP/1.1\r\nhost: {self._host_header}\r\nuser-agent: kvctl\r\n{auth}{extra}\r\n"
        ).encode("latin-1")
