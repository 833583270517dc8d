"""The form of S3 servers that know `x-rdma-info`: signed requests with an empty body."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from kvctl.core.errors import KvctlError
from kvctl.transports.api import Op, Store, StoreConfig
from kvctl.transports.node_auth import RDMA_HEADERS
from kvctl.transports.wire import Connection, Head
from kvctl.transports.wrapper import innermost
from kvctl_s3.settings import check_endpoint
from kvctl_s3.store import S3Store
from kvctl_s3.transport import S3Dialect


class S3Talk:
    """See Talk. Only `host` and `x-amz-*` are signed, so the token's header needs no signature of its own."""

    server = "an S3 server"

    def __init__(self, store: S3Store, endpoint: str) -> None:
        self.endpoint = endpoint
        self.url = store.url
        self.host = urlsplit(endpoint).hostname or ""
        # the body is empty: its hash costs nothing
        self._dialect = S3Dialect(store, endpoint, sign_payload=True, receive_buffer=0)
        self.timeout = self._dialect.timeout

    def describe(self, op: Op) -> str:
        return f"{self._dialect.describe(op)} ({RDMA_HEADERS[1]})"

    def connect(self) -> Connection:
        return self._dialect.connect()

    def head(self, op: Op, token: str | None) -> bytes:
        if token is None:
            return self._dialect.write_head(op)
        head = self._dialect.read_head(op) if op.kind == "read" else self._dialect.write_head(replace(op, length=0))
        return head[:-2] + f"{RDMA_HEADERS[1]}: {token}\r\n\r\n".encode() if token else head

    def refusal(self, op: Op, head: Head, body: bytes) -> KvctlError:
        return self._dialect.refusal(op, head, body)

    def broken(self, op: Op, problem: Exception) -> KvctlError:
        return self._dialect.broken(op, problem)

    def refuses_address(self, problem: KvctlError) -> bool:
        return False


def s3_talk(config: StoreConfig, store: Store, endpoint: str | None) -> S3Talk:
    inner = innermost(store)
    bare = inner if isinstance(inner, S3Store) else S3Store(config)
    return S3Talk(bare, check_endpoint(endpoint) if endpoint is not None else bare.access.endpoints[0])
