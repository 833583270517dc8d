"""How requests with an RDMA token are written and what answers to them mean: the seam, and the form that storage nodes
and other servers of the public protocol have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from kvctl.core.errors import KvctlError, MemberDownError
from kvctl.transports.api import Op, Store, StoreConfig
from kvctl.transports.node_auth import RDMA_HEADERS
from kvctl.transports.options import choice
from kvctl.transports.wire import Connection, Head, ProtocolError
from kvctl_native.errors import from_connection
from kvctl_native.route import Route, encode_key
from kvctl_native.settings import Place, parse_place
from kvctl_native.store import NodeStore
from kvctl_native.transport import NodeDialect, bare_store


class Talk(Protocol):
    """Thread-safe. `endpoint` and `url` (of the store) are for messages, `server` what they call it; `host`: whose
    addresses may connect back.
    """

    @property
    def endpoint(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def server(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def timeout(self) -> float:
        """Seconds that an answer may take."""
        ...

    def describe(self, op: Op) -> str:
        """The request of an operation, for -v, without its token."""
        ...

    def connect(self) -> Connection:
        """Raises OSError."""
        ...

    def head(self, op: Op, token: str | None) -> bytes:
        """The request's head; the token is empty for an empty object, None for a PUT with a body."""
        ...

    def refusal(self, op: Op, head: Head, body: bytes) -> KvctlError: ...
    def broken(self, op: Op, problem: Exception) -> KvctlError: ...
    def refuses_address(self, problem: KvctlError) -> bool:
        """Whether the server said that it does not connect to the token's address."""
        ...


class NodeTalk:
    """See Talk. The token is part of what the node's own token is bound to."""

    server = "a storage node"

    def __init__(self, store: NodeStore, place: Place, *, header: str, plain: bool) -> None:
        """`header` carries the token; `plain`: keys without `/v1`."""
        self.endpoint = place.url
        self.url = store.url
        self.host = place.host
        self._store = store
        self._header = header
        self._plain = plain
        self._route = Route(store.access, place)
        self._dialect = NodeDialect(store, place, 0)
        self.timeout = self._dialect.timeout

    def describe(self, op: Op) -> str:
        where = f"{self.endpoint}{'' if self._plain else '/v1'}/{encode_key(self._store.full_key(op.key))}"
        span = "" if op.kind == "write" else f" bytes={op.offset}-{op.offset + op.length - 1}"
        return f"{'PUT' if op.kind == 'write' else 'GET'} {where}{span} ({self._header})"

    def connect(self) -> Connection:
        return self._route.connect()

    def head(self, op: Op, token: str | None) -> bytes:
        reads = op.kind == "read"
        return self._route.head(
            "GET" if reads else "PUT",
            self._store.full_key(op.key),
            span=(op.offset, op.offset + op.length - 1) if reads else None,
            if_match=op.version if reads else None,
            length=None if reads else op.length if token is None else 0,
            rdma=token or "",
            rdma_header=self._header,
            plain=self._plain,
        )

    def refusal(self, op: Op, head: Head, body: bytes) -> KvctlError:
        found = self._dialect.refusal(op, head, body)
        if found.details.get("code") == "no_rdma":
            found.hint = "load with --transport native-tcp; `kvctl node serve --rdma require` says what the node lacks"
        if found.details.get("code") != MemberDownError.code:
            return found
        return MemberDownError(
            f"{self.url}: {op.key}: the node cannot reach this host's memory",
            cause=found.cause,
            hint="check the RDMA network between the two (RoCE is UDP port 4791); --transport native-tcp goes without",
            details=found.details,
        )

    def broken(self, op: Op, problem: Exception) -> KvctlError:
        return self._dialect.broken(op, problem)

    def refuses_address(self, problem: KvctlError) -> bool:
        # the codes of refusals for want of rights are others
        return problem.details.get("code") == "auth"


def serves(config: StoreConfig, store: Store) -> str:
    """Why a node does not offer RDMA, empty when it does. Raises MemberDownError when it does not answer."""
    bare = bare_store(store, config)
    place, endpoint = bare.access.places[0], bare.routes[0]
    try:
        connection = endpoint.connect()
        try:
            connection.send(f"GET /healthz HTTP/1.1\r\nhost: {place.host_header}\r\nuser-agent: kvctl\r\n\r\n".encode())
            head = connection.read_head()
            page = json.loads(connection.read_small(head) or b"{}")
        finally:
            connection.close()
    except OSError as problem:
        raise from_connection(place.url, problem, doing="health") from None
    except (ProtocolError, ValueError):
        page = {}
    told = page.get("rdma") if isinstance(page, dict) else None
    if told is True:
        return ""
    return f"the node at {place.url} {'has no RDMA' if told is False else 'does not say that it has RDMA'}"


def node_talk(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> NodeTalk:
    """Options: dialect, path. Raises UsageError."""
    header = RDMA_HEADERS[0] if choice(options, "dialect", ("scal", "s3")) == "scal" else RDMA_HEADERS[1]
    bare = bare_store(store, config)
    places = bare.access.places
    place = places[0] if endpoint is None else parse_place(endpoint, tls=places[0].tls)
    return NodeTalk(bare, place, header=header, plain=choice(options, "path", ("v1", "plain")) == "plain")
