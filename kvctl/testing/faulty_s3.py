"""An S3 server in memory that misbehaves on request, and logs every request: for tests, and for users who want
to see what their S3 client does then (`python -m kvctl.testing.faulty_s3 --help`).

It checks signatures in full, knows ranges, conditions, paged lists, path and virtual-host addressing, and the
faults of `Fault`.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Self, get_args

from kvctl.core.addresses import StoreConfig
from kvctl.testing import s3_protocol as s3
from kvctl.testing.faulty_s3_server import Server
from kvctl.testing.seaweed import ACCESS_KEY, SECRET_KEY

Kind = Literal[
    "latency",  # `seconds` before the answer
    "hang",  # no answer at all, until the client gives up
    "status",  # an error answer: `status`, `code`
    "drop",  # the request is carried out, the connection closed without an answer
    "reset",  # RST after `after` bytes of the body
    "truncate",  # the right Content-Length, closed after `after` bytes of the body
    "short",  # Content-Length and body `amount` bytes too short
    "overlong",  # Content-Length and body `amount` bytes too long
    "extra",  # the right Content-Length, `amount` bytes more behind it
    "chunked",  # the body in chunks, no Content-Length
    "ignore-range",  # 200 with the whole object
    "wrong-range",  # Content-Range shifted by `amount`
    "wrong-total",  # the size in Content-Range off by `amount`
    "slow",  # `rate` bytes per second
    "replace",  # before the answer, the object gets other bytes of the same size
    "garbage",  # an answer that is not HTTP
]


@dataclass
class Fault:
    """One rule. It matches requests by `methods` and key (glob `key`); of the matching ones it skips `skip`, then
    hits every `every`-th, at most `times` times (None: for ever). `fired` counts hits.
    """

    kind: Kind
    key: str = "*"
    methods: Sequence[str] = ("GET",)
    every: int = 1
    skip: int = 0
    times: int | None = None
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"
    after: int = 0
    amount: int = 1
    rate: float = 1e6
    fired: int = 0
    matched: int = 0

    def hits(self, method: str, key: str) -> bool:
        if method not in self.methods or not fnmatch.fnmatchcase(key, self.key):
            return False
        self.matched += 1
        past = self.matched - self.skip
        if past < 1 or past % self.every or (self.times is not None and self.fired >= self.times):
            return False
        self.fired += 1
        return True


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was served: `sent` bytes of body went out, `received` came in, `host` is its Host header."""

    method: str
    bucket: str
    key: str
    range: str | None
    status: int
    sent: int
    received: int
    host: str
    query: str = ""
    condition: str | None = None


@dataclass
class FaultyS3:
    """The server. `objects` maps (bucket, key) to what is stored; `log` is every request. Thread-safe enough for
    tests: rules may be added and the log read while it serves. Use as a context manager, or `start` and `close`.
    """

    buckets: set[str] = field(default_factory=lambda: {"bucket"})
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    session_token: str | None = None
    anonymous: bool = False
    region: str = "us-east-1"
    conditional_put: bool = True
    conditional_get: bool = True
    checksums: bool = True
    copies: bool = True
    page_size: int = 1000
    tls_certificate: tuple[str, str] | None = None  # PEM files: chain, key
    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    log: list[Request] = field(default_factory=list)
    objects: dict[tuple[str, str], s3.Stored] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    closing: threading.Event = field(default_factory=threading.Event)
    _versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _server: Server | None = None

    def start(self) -> Self:
        self._server = Server(self)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="faulty-s3", daemon=True).start()
        return self

    @property
    def endpoint(self) -> str:
        return f"{'https' if self.tls_certificate else 'http'}://127.0.0.1:{self.port}"

    def store(self, prefix: str = "", bucket: str = "bucket", **options: str) -> StoreConfig:
        return StoreConfig(f"s3://{bucket}/{prefix}".rstrip("/"), (self.endpoint,), options)

    def put(self, key: str, data: bytes, bucket: str = "bucket") -> s3.Stored:
        """Store `data` directly, past protocol, faults and log. The ETag is no MD5: it is a version."""
        with self.lock:
            digest = hashlib.sha256(data).hexdigest()[:16]
            stored = s3.Stored(data, f"{digest}-{next(self._versions)}", datetime.now(UTC))
            self.objects[bucket, key] = stored
            return stored

    def add(self, fault: Fault) -> Fault:
        with self.lock:
            self.faults.append(fault)
        return fault

    def clear(self) -> None:
        """Forget all rules and the log; the objects stay."""
        with self.lock:
            self.faults.clear()
            self.log.clear()

    def requests(self, method: str | None = None, key: str = "*") -> list[Request]:
        with self.lock:
            return [
                item
                for item in self.log
                if (method is None or item.method == method) and fnmatch.fnmatchcase(item.key, key)
            ]

    def waits_for_nobody(self) -> bool:
        """Whether all that clients have sent so far, those that have gone included, was carried out."""
        assert self._server is not None
        return not self._server.connections

    def record(self, *fields: Any) -> None:  # Any: the fields of `Request`, in order
        with self.lock:
            self.log.append(Request(*fields))

    def hit(self, method: str, key: str) -> dict[str, Fault]:
        with self.lock:
            return {fault.kind: fault for fault in self.faults if fault.hits(method, key)}

    def close(self) -> None:
        self.closing.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.end_connections()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def parse_fault(text: str) -> Fault:
    """'KIND,name=value,..', for example 'status,every=3,status=503' or 'truncate,key=*.safetensors,after=1000'."""
    kind, *pairs = text.split(",")
    if kind not in get_args(Kind):
        raise argparse.ArgumentTypeError(f"{kind!r} is no fault; known: {', '.join(get_args(Kind))}")
    fault = Fault(kind)  # type: ignore[arg-type] # checked above
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name == "methods":
            fault.methods = tuple(value.split("+"))
        elif name in {"key", "code"}:
            setattr(fault, name, value)
        elif name in {"every", "skip", "times", "status", "after", "amount"}:
            setattr(fault, name, int(value))
        elif name in {"seconds", "rate"}:
            setattr(fault, name, float(value))
        else:
            raise argparse.ArgumentTypeError(f"a fault has no {name!r}")
    return fault


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted; the endpoint and then each request is a line on stdout."""
    parser = argparse.ArgumentParser(prog="python -m kvctl.testing.faulty_s3", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=None)
    parser.add_argument("--anonymous", action="store_true", help="ask for no signature")
    parser.add_argument("--fault", type=parse_fault, action="append", default=[], help=parse_fault.__doc__)
    options = parser.parse_args(arguments)
    server = FaultyS3(
        buckets=set(options.bucket or ["bucket"]), anonymous=options.anonymous, port=options.port, faults=options.fault
    )
    with server, contextlib.suppress(KeyboardInterrupt):
        sys.stdout.write(f"{server.endpoint}  AWS_ACCESS_KEY_ID={ACCESS_KEY} AWS_SECRET_ACCESS_KEY={SECRET_KEY}\n")
        shown = 0
        while True:
            for item in server.log[shown:]:
                sys.stdout.write(
                    f"{item.status} {item.method} {item.bucket}/{item.key} {item.range or ''} {item.sent}\n"
                )
                shown += 1
            sys.stdout.flush()
            time.sleep(0.2)


if __name__ == "__main__":
    main()
