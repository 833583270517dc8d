"""`nixl-obj`: objects of an S3 store by NIXL's OBJ back end, plain or with one of its RDMA engines.

What NIXL leaves open is closed here: it reports a range past the end, or an answer that was too short, as done, so the
size is known first and the last byte of each range is watched; it has one error for everything, so a HEAD afterwards
says what it was; it cannot call a transfer off, so what is given up is quarantined.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final, Literal
from urllib.parse import urlsplit

from kvctl.core.errors import (
    KvctlError,
    SizeMismatchError,
    StalledError,
    TransientError,
    UsageError,
    VersionChangedError,
)
from kvctl.memory.buffers import Buffer
from kvctl.transports.api import HOST_KINDS, Capabilities, ObjectInfo, Op, Registration, Store, StoreConfig
from kvctl.transports.options import choice, number
from kvctl.transports.threaded import AbandonedError, OpCancelledError, ThreadedTransport
from kvctl_nixl.agent import Agent, NixlError, Transfer
from kvctl_nixl.memory import Desk, Known
from kvctl_nixl.obj_params import choose_build, connection, passed_on
from kvctl_nixl.places import Keys, S3Place, bare
from kvctl_nixl.quarantine import QUARANTINE
from kvctl_nixl.witness import Witness

PIECE: Final = 64 << 20
_OWN: Final = ("threads", "deadline", "build")
_MOST: Final = 5 << 30  # S3's limit of one PUT
_PAUSE: Final = (0.00005, 0.002)  # seconds between two looks at a transfer: from, to
_CLOSE_SECONDS: Final = 5.0  # how long `close` lets what is in flight end
# What the last byte of a range is before it is read; where the object has the same byte, the range is read once more
# over the other one. Zero would be the commonest of last bytes.
_WATCHED: Final = (0xA5, 0x5A)
_AGENT_LOCK: Final = threading.Lock()


class NixlObj(ThreadedTransport):
    """See `kvctl.transports.api.Transport`. One agent for all threads; they take turns at it."""

    name = "nixl-obj"

    def __init__(
        self,
        place: S3Place,
        endpoint: str,
        *,
        threads: int,
        deadline: float,
        build: str = "cu12",
        params: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(Capabilities(memory_kinds=HOST_KINDS, max_in_flight=threads, one_sided=True, zero_copy=False))
        self.endpoint = endpoint
        self._place = place
        self._deadline = deadline
        self._build = build
        self._params = {"num_threads": str(threads), **(params or {})}
        self._known = Known()
        self._witness = Witness(place.stat)
        self._numbers = itertools.count(1)
        self._desks_lock = threading.Lock()
        self._desks: dict[str, Desk] = {}
        self._closing = threading.Event()
        self._desk()  # what cannot be made is told now, not in the middle of a load

    def register(self, buffer: Buffer) -> Registration:
        super().register(buffer)
        return self._known.add(buffer)

    def perform(self, op: Op) -> int:
        QUARANTINE.release_ended()
        return self._write(op) if op.kind == "write" else self._read(op)

    def describe(self, op: Op) -> str:
        """What an operation asks for, for -v."""
        key = self._place.full_key(op.key)
        return f"nixl-obj: {op.kind} {self.endpoint} {key} [{op.offset}, {op.offset + op.length})"

    def _given_up(self) -> str:
        return "at the end of the run" if self._closing.is_set() else f"after {self._deadline:g} s"

    def close(self) -> None:
        self._closing.set()
        super().close()
        with self._desks_lock:
            desks, self._desks = list(self._desks.values()), {}
        for desk in desks:
            with desk.lock:
                idle = desk.agent.running == 0
            if idle:
                desk.close()
            else:
                desk.agent.abandon()

    # -- one operation ---------------------------------------------------------------------------------------------

    def _read(self, op: Op) -> int:
        if op.length <= 0:
            raise UsageError(f"{self._place.url}: {op.key}: a read of {op.length} bytes makes no sense")
        name = f"{self._place.url}: {op.key}"
        started = time.monotonic()
        info, requests = self._witness.recent(op.key), 0
        if info is None or op.version is None or info.version != op.version:
            info, requests = self._witness.since(op.key, started)
        _check(op, info, name)
        for done in range(0, op.length, PIECE):
            requests += self._read_piece(op, done, min(PIECE, op.length - done), name)
        if op.version is not None:
            info, more = self._witness.since(op.key, time.monotonic())
            requests += more
            _check(op, info, name)
        return requests

    def _read_piece(self, op: Op, done: int, length: int, name: str) -> int:
        last = op.buffer_offset + done + length - 1
        for tries, watched in enumerate(_WATCHED, start=1):
            op.buffer.view[last] = watched
            self._move(op, done, length)
            if op.buffer.view[last] != watched:
                return tries
        raise SizeMismatchError(
            f"{name}: the answer was shorter than the range [{op.offset + done}, {op.offset + done + length})",
            cause="NIXL reported it as done, its last byte never came",
            hint="what is in between, a proxy or a cache, changes answers: use the server's own endpoint",
        )

    def _write(self, op: Op) -> int:
        name = f"{self._place.url}: {op.key}"
        if op.offset != 0 or (op.object_size is not None and op.object_size != op.length):
            raise UsageError(f"{name}: nixl-obj writes whole objects only")
        if op.length > _MOST:
            raise UsageError(
                f"{name}: an object of {op.length} bytes, S3 takes {_MOST} in one request",
                hint="push it into a repo: that stores it in stripes",
            )
        self._move(op, 0, op.length)
        info, requests = self._witness.since(op.key, time.monotonic())
        if info.size != op.length:
            raise TransientError(f"{name}: {info.size} of {op.length} bytes were written", hint="another writer?")
        return 1 + requests

    # -- moving bytes ----------------------------------------------------------------------------------------------

    def _move(self, op: Op, done: int, length: int) -> None:
        """One transfer of one descriptor: of several, one may fail while others still run."""
        if self.is_cancelled(op.id):
            raise OpCancelledError
        desk = self._desk()
        number = next(self._numbers)  # a number that two keys share reads the wrong object, silently
        view = op.view  # while it is out, the memory stays mapped
        try:
            with (
                desk.memory(op.buffer, op.buffer_offset + done, length) as (kind, address, device),
                _object(desk, self._place.full_key(op.key), number),
            ):
                way: Literal["READ", "WRITE"] = "WRITE" if op.kind == "write" else "READ"
                remote = [(op.offset + done, length, number)]
                with desk.lock:
                    transfer = desk.agent.start(way, (kind, [(address, length, device)]), ("OBJ", remote))
                self._wait(op, desk, transfer)
        except NixlError as problem:
            raise self._explain(op, problem) from None
        finally:
            view.release()
        if self.is_cancelled(op.id):
            raise OpCancelledError

    def _wait(self, op: Op, desk: Desk, transfer: Transfer) -> None:
        """Until it ends. A cancelled one too: NIXL has no way to call it off."""
        deadline = time.monotonic() + self._deadline
        pause = _PAUSE[0]
        while True:
            with desk.lock:
                if transfer.poll():
                    return
            now = time.monotonic()
            if self._closing.is_set():
                deadline = min(deadline, now + _CLOSE_SECONDS)
            if now > deadline:
                break
            time.sleep(pause)
            pause = min(pause * 2, _PAUSE[1])
        QUARANTINE.keep(op.buffer, desk, lambda: _has_ended(desk, transfer))
        raise AbandonedError(
            StalledError(
                f"{self._place.url}: {op.key}: given up in flight {self._given_up()}",
                cause="NIXL cannot call a transfer off: its memory is not used again",
                hint="check the server; --transport-opt deadline=SECONDS allows more",
            )
        )

    def _desk(self) -> Desk:
        """The agent for the credentials of now; renewed ones get a new agent."""
        keys = self._place.access.credentials()
        if keys is None:
            raise UsageError(
                f"{self._place.url}: nixl-obj has no unsigned requests", hint="--transport s3 reads public buckets"
            )
        mark = f"{keys.access_key}\n{keys.secret_key}\n{keys.token or ''}"
        with self._desks_lock:
            desk = self._desks.get(mark)
            if desk is None:
                desk = self._desks[mark] = Desk(self._make_agent(keys), self._known)
            return desk

    def _make_agent(self, keys: Keys) -> Agent:
        params = {**connection(self._place.access, self.endpoint, keys), **self._params}
        parts = urlsplit(self.endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with _AGENT_LOCK, _quiet_sdk():
            return Agent("OBJ", params, build=self._build, port=port)

    def _explain(self, op: Op, problem: NixlError) -> KvctlError:
        """NIXL has one error for a missing key, refused keys, no bucket, a busy or broken server: ask the server."""
        name = f"{self._place.url}: {op.key}"
        try:
            info, _ = self._witness.since(op.key, time.monotonic())
            if op.kind == "read":
                _check(op, info, name)
        except KvctlError as error:
            if op.kind == "read" or error.code != "not_found":
                return error
            # the bucket is there, as the HEAD of a key in it said so: the write itself was refused or failed
        return TransientError(
            f"{name}: NIXL could not {op.kind} it",
            cause=f"{problem}; a HEAD right after it finds nothing wrong",
            hint="--transport s3 shows what the server answers",
        )


def _has_ended(desk: Desk, transfer: Transfer) -> bool:
    with desk.lock:
        try:
            return transfer.poll()
        except NixlError:
            return True


@contextlib.contextmanager
def _object(desk: Desk, key: str, number: int) -> Iterator[None]:
    with desk.lock:
        registered = desk.agent.register("OBJ", [(0, 0, number, key)])
    try:
        yield
    finally:
        with desk.lock, contextlib.suppress(NixlError):
            desk.agent.deregister(registered)


@contextlib.contextmanager
def _quiet_sdk() -> Iterator[None]:
    """While the AWS SDK inside NIXL is set up: it has keys, so it need not ask the metadata address, and it must not
    try again by itself. Only then: other parts of this process may use the metadata service.
    """
    wanted = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1", "AWS_RETRY_MODE": "standard"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check(op: Op, info: ObjectInfo, name: str) -> None:
    """That the object is the version and size that is wanted. Raises KvctlError."""
    if op.version is not None and info.version != op.version:
        raise VersionChangedError(
            f"{name} changed while loading",
            cause=f"ETag {op.version} became {info.version}",
            hint="run it again to load the new version",
        )
    if op.object_size is not None and info.size != op.object_size:
        raise SizeMismatchError(
            f"{name} has {info.size} bytes, expected {op.object_size}",
            hint="the object was replaced or cut off: upload it again",
            details={"actual_size": info.size, "expected_size": op.object_size},
        )
    if op.offset + op.length > info.size:
        raise SizeMismatchError(
            f"{name} is shorter than it must be: it has {info.size} bytes, wanted up to {op.offset + op.length}",
            hint="the object is cut off: upload it again",
            details={"actual_size": info.size, "expected_size": op.offset + op.length},
        )


def open_transport(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> NixlObj:
    """Options: threads, deadline (seconds), build=auto|cu12|cu13, and the back end's parameters."""
    build = choice(options, "build", ("auto", "cu12", "cu13"))
    params = passed_on(options, _OWN)
    place: S3Place = bare(store, "access", "full_key")
    return NixlObj(
        place,
        endpoint.rstrip("/") if endpoint is not None else place.access.endpoints[0],
        threads=number(options, "threads", 4, 1, 64),
        deadline=number(options, "deadline", 300, 1, 86400),
        build=choose_build(build, params),
        params=params,
    )
