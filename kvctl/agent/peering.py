"""One peer of a fan-out, on a thread of its own: look what it has, take what is still missing here, check it.

What the peer gives is compared with the checksum that it published, so a byte that was hurt on the way or in its
memory is noticed here. A peer that fails, stalls or gives wrong bytes is left: its ranges go back to those that
anybody may bring.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvctl.agent.generations import HAVE, HAVE_ENTRY
from kvctl.agent.peer_tree import AGENT_DOCUMENT
from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import IntegrityError, KvctlError, NotFoundError
from kvctl.memory.buffers import Buffer
from kvctl.transports.api import Completion, Op, Status, Store, Transport
from kvctl.transports.registry import choose, open_store, open_transports

WINDOW: Final = 4  # runs asked of one peer at once
LOOK_SECONDS: Final = 0.02  # between looks at what a peer has, at least
LOOK_MOST: Final = 0.25  # and when it never has anything
RETRY_SECONDS: Final = 1.0  # a peer that failed is tried again after it
CANCEL_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of an output file here and there: `offset` in the file, which is also that in `buffer`. Bytes."""

    name: str
    size: int
    buffer: Buffer
    offset: int
    length: int


class Board(Protocol):
    """What all who bring runs share. Thread-safe."""

    @property
    def over(self) -> bool: ...
    def claim(self, peer: str, has: bytearray, most: int) -> list[int]:
        """Up to `most` of the runs that `peer` has (a byte each), in the best order, that nobody brings and that are
        missing. They are the caller's to bring.
        """
        ...

    def give_back(self, run: int) -> None: ...
    def landed(self, run: int, peer: str, nbytes: int, checksum: int) -> None:
        """Raises IntegrityError when the bytes that are there now do not have this checksum."""
        ...

    def alive(self, peer: str) -> None: ...
    def dead(self, peer: str, why: str) -> None: ...
    def broken(self, error: BaseException) -> None:
        """The load cannot go on: memory may still be written to."""
        ...

    def wait(self, seconds: float) -> None: ...


@dataclass(slots=True)
class _Asked:
    """A run under way: operations that have not ended, and whether all went well."""

    run: int
    checksum: int
    left: int
    nbytes: int
    started: float
    error: KvctlError | None = None


@dataclass(slots=True)
class _Link:
    """An open way to a peer. `versions`: of its files, by name, so that it cannot change under us."""

    store: Store
    transport: Transport
    versions: dict[str, str] = field(default_factory=dict)


def peer_config(place: str, path: str, options: Mapping[str, str]) -> StoreConfig:
    # a short patience: somebody else has the same bytes
    return StoreConfig(f"node://{place}/{path}", (), {"connect_timeout": "2", "timeout": "5", **options})


def agent_at(place: str, slot: str, options: Mapping[str, str]) -> str | None:
    """Which agent answers at HOST:PORT; None when nobody does. Raises KvctlError that no waiting mends (AuthError)."""
    try:
        store = open_store(peer_config(place, slot, options))
        try:
            return str(json.loads(store.get(AGENT_DOCUMENT))["agent"])
        finally:
            store.close()
    except KvctlError as error:
        if error.exit_code == 6:
            return None
        raise


class Peer:
    """Brings runs from one agent until the board is over. `run` is its thread's whole life."""

    def __init__(
        self, place: str, path: str, options: Mapping[str, str], extents: Sequence[Sequence[Extent]], board: Board,
        *, patience: float, stall: float,
    ) -> None:  # fmt: skip
        """`path`: SLOT/FINGERPRINT. `patience`: seconds until one that never answered counts as dead; `stall`: until
        one that gave no byte does.
        """
        self.place = place
        self.transport = ""  # what the bytes came by
        self._config = peer_config(place, path, options)
        self._extents = extents
        self._board = board
        self._patience = patience
        self._stall = stall
        self._ids = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._pause = LOOK_SECONDS

    def run(self) -> None:
        started = time.monotonic()
        seen = False
        link: _Link | None = None
        while not self._board.over:
            try:
                link = link or self._open()
                if self._turn(link):
                    seen = True
                    self._board.alive(self.place)
                continue
            except NotFoundError as error:  # it has not begun, or has freed it
                if seen or time.monotonic() - started > self._patience:
                    self._board.dead(self.place, str(error))
                pause = 10 * LOOK_SECONDS
            except KvctlError as error:
                if seen or error.exit_code != 6 or time.monotonic() - started > self._patience:
                    self._board.dead(self.place, str(error))
                pause = RETRY_SECONDS if seen else 10 * LOOK_SECONDS
            except BaseException as error:
                self._board.broken(error)
                break
            self._end(link)
            link = None
            self._board.wait(pause)
        self._end(link)

    def _open(self) -> _Link:
        store = open_store(self._config)
        try:
            choice = choose("node", "shared", stores=[(self._config, store)])
            self.transport = choice.spec.name
            return _Link(store, open_transports(self._config, store, choice)[0])
        except BaseException:
            store.close()
            raise

    def _end(self, link: _Link | None) -> None:
        if link is not None:
            link.transport.close()
            link.store.close()

    def _turn(self, link: _Link) -> bool:
        """Take what the peer has and we lack, until it has no more of it. Raises KvctlError when it fails."""
        have = memoryview(link.store.get(HAVE))
        if len(have) < len(self._extents) * HAVE_ENTRY:
            raise NotFoundError(f"{self.place} loads it in another way")
        checksums = have.cast("Q").tolist()
        has = bytearray(map(bool, checksums[: len(self._extents)]))
        error: KvctlError | None = None
        took = 0
        try:
            while not self._board.over:
                room = WINDOW - len({id(asked) for asked in self._asked.values()})
                claimed = self._board.claim(self.place, has, room) if error is None and room else []
                took += len(claimed)
                for run in claimed:
                    self._ask(link, run, checksums[run])
                if not self._asked:
                    break
                error = self._collect(link) or error
        finally:
            self._withdraw(link)
        if error is not None:
            raise error
        # the less there is to take, the more seldom we look
        self._pause = LOOK_SECONDS if took else min(LOOK_MOST, 2 * self._pause)
        self._board.wait(self._pause)
        return True

    def _ask(self, link: _Link, run: int, checksum: int) -> None:
        extents = self._extents[run]
        asked = _Asked(run, checksum, len(extents), sum(item.length for item in extents), time.monotonic())
        if not extents:
            self._board.landed(run, self.place, 0, checksum)
            return
        ops: list[Op] = []
        try:
            for item in extents:
                version = link.versions.get(item.name)
                if version is None:
                    version = link.versions[item.name] = link.store.stat(item.name).version
                ops.append(
                    Op(next(self._ids), "read", item.name, item.offset, item.length, item.buffer, item.offset,
                       version, item.size)
                )  # fmt: skip
        except KvctlError:
            self._board.give_back(run)
            raise
        self._asked.update((op.id, asked) for op in ops)
        link.transport.submit(ops)

    def _collect(self, link: _Link) -> KvctlError | None:
        """Take what has come; an error of the peer, if it failed."""
        error: KvctlError | None = None
        for completion in link.transport.poll(0.1):
            error = self._ended(completion) or error
        now = time.monotonic()
        if self._asked and all(now - asked.started > self._stall for asked in self._asked.values()):
            error = error or IntegrityError(f"{self.place} gave nothing for {self._stall:g} s")
        if error is not None:
            self._withdraw(link)
        return error

    def _ended(self, completion: Completion) -> KvctlError | None:
        asked = self._asked.pop(completion.id)
        asked.left -= 1
        if completion.status is Status.UNKNOWN:
            self._board.broken(
                completion.error or IntegrityError(f"a transfer from {self.place} was abandoned in flight")
            )
        elif completion.status is not Status.DONE:
            asked.error = completion.error or IntegrityError(f"{self.place}: a read ended as {completion.status.value}")
        if asked.left:
            return None
        if asked.error is None and completion.status is not Status.UNKNOWN:
            try:
                self._board.landed(asked.run, self.place, asked.nbytes, asked.checksum)
            except KvctlError as wrong:
                asked.error = wrong
        if asked.error is not None:
            self._board.give_back(asked.run)
        return asked.error

    def _withdraw(self, link: _Link) -> None:
        """Nothing of ours is in flight when this returns, or the board knows that the memory is not safe."""
        if not self._asked:
            return
        link.transport.cancel(list(self._asked))
        deadline = time.monotonic() + CANCEL_SECONDS
        while self._asked:
            for completion in link.transport.poll(0.1):
                self._ended(completion)
            if self._asked and time.monotonic() > deadline:
                self._board.broken(IntegrityError(f"transfers from {self.place} cannot be ended"))
                return
