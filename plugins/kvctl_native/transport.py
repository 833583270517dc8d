"""The `native-tcp` transport: a storage node's dialect of the bulk transport over HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from kvctl.core.errors import KvctlError
from kvctl.transports.api import Op, Store, StoreConfig
from kvctl.transports.http.bulk import HttpTransport
from kvctl.transports.http.pump import wanted
from kvctl.transports.http.ranges import check_read, expected_read, object_size
from kvctl.transports.options import check_names, number
from kvctl.transports.wire import Connection, Head
from kvctl.transports.wrapper import innermost
from kvctl_native.errors import from_connection, from_status, parse_error_body
from kvctl_native.route import Route, encode_key
from kvctl_native.settings import Place, parse_access, parse_place
from kvctl_native.store import NodeStore

_OPTIONS: Final = ("compiled", "receive_buffer", "threads")
# The head of a node's answer to a ranged GET, without its empty line, as the node's quick way writes it.
_ANSWER: Final = re.compile(
    rb"HTTP/1\.1 206 Partial Content\r\n"
    rb"date: [ -~]+\r\n"
    rb'etag: "([!#-~]+)"\r\n'
    rb"content-range: bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})\r\n"
    rb"content-length: ([0-9]{1,19})"
)
_HINT: Final = "what is in between, a proxy or a cache, changes answers: use the node's own endpoint"


class NodeDialect:
    """See `kvctl.transports.http.dialect.Dialect`."""

    server = "a storage node"

    def __init__(self, store: NodeStore, place: Place, receive_buffer: int) -> None:
        self.endpoint = place.url
        self.url = store.url
        self.timeout = store.access.timeout
        self._store = store
        self._route = Route(store.access, place)
        self._receive_buffer = receive_buffer
        self._full_key = lru_cache(maxsize=1024)(store.full_key)

    def describe(self, op: Op) -> str:
        url = f"{self.endpoint}/v1/{encode_key(self._store.full_key(op.key))}"
        return f"PUT {url}" if op.kind == "write" else f"GET {url} bytes={op.offset}-{op.offset + op.length - 1}"

    def refuse(self, op: Op) -> None:
        """A node takes objects of any size; its limit is its own answer."""

    def connect(self) -> Connection:
        return self._route.connect(self._receive_buffer)

    def read_head(self, op: Op) -> bytes:
        return self._route.read_head(self._full_key(op.key), op.offset, op.offset + op.length - 1, op.version)

    def write_head(self, op: Op) -> bytes:
        return self._route.head("PUT", self._store.full_key(op.key), length=op.length)

    def fits(self, op: Op, head: bytes) -> bool:
        match = _ANSWER.fullmatch(head)
        if match is None:
            return False
        version, first, last, total, length = match.groups()
        return (
            int(length) == op.length
            and int(first) == op.offset
            and int(last) == op.offset + op.length - 1
            and (op.object_size is None or int(total) == op.object_size)
            and (op.version is None or version == op.version.encode("latin-1"))
        )

    def expected(self, op: Op) -> tuple[bytes, bytes]:
        return expected_read(op)

    def check(self, op: Op, head: Head) -> None:
        check_read(op, head, f"{self.url}: {op.key}", whole=False, versions=True, hint=_HINT)

    def check_written(self, op: Op, body: bytes) -> None:
        """A node's status says it all."""

    def refusal(self, op: Op, head: Head, body: bytes) -> KvctlError:
        code, message = parse_error_body(body)
        return from_status(
            self.url, op.key, head.status, code, message, doing=op.kind,
            object_size=max(op.object_size or 0, op.offset + op.length), actual_size=object_size(head),
        )  # fmt: skip

    def broken(self, op: Op, problem: Exception) -> KvctlError:
        return from_connection(self.endpoint, problem, doing=f"{op.kind} {op.key}")

    def try_differently(self, op: Op, problem: KvctlError) -> bool:
        return False


def bare_store(store: Store, config: StoreConfig) -> NodeStore:
    """The node's store inside whatever wraps it, so that the key file is read once."""
    inner = innermost(store)
    return inner if isinstance(inner, NodeStore) else NodeStore(parse_access(config))


def open_transport(
    config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]
) -> HttpTransport:
    """Options: threads, receive_buffer (bytes, 0: the kernel's own), compiled=auto|true|false."""
    check_names("native-tcp", options, _OPTIONS)
    bare = bare_store(store, config)
    places = bare.access.places
    place = places[0] if endpoint is None else parse_place(endpoint, tls=places[0].tls)
    dialect = NodeDialect(bare, place, number(options, "receive_buffer", 0, 0, 1 << 30))
    threads = number(options, "threads", 4, 1, 256)
    return HttpTransport(dialect, name="native-tcp", threads=threads, plain=not place.tls, compiled=wanted(options))
