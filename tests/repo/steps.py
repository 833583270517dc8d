"""Deterministic interleavings: actors are threads that run one at a time, from one store call to the next."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import KvctlError
from kvctl.transports.api import ObjectInfo, Store, StoreCapabilities, UploadInfo
from kvctl.transports.registry import open_store


class HookedStore:
    """Calls `hook(name of the call, key)` before every call of the store behind it."""

    def __init__(self, inner: Store, hook: Callable[[str, str], None]) -> None:
        self.inner = inner
        self.hook = hook

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return self.inner.capabilities

    def stat(self, key: str) -> ObjectInfo:
        self.hook("stat", key)
        return self.inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.hook("list", prefix)
        return iter([*self.inner.list(prefix)])

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.hook("get", key)
        return self.inner.get(key, start, length)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        self.hook("put", key)
        return self.inner.put(key, data, if_absent=if_absent, if_version=if_version)

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        self.hook("delete", " ".join(keys))
        self.inner.delete(keys, if_version=if_version)

    def now(self) -> datetime:
        return self.inner.now()

    def uploads(self) -> Iterator[UploadInfo]:
        return iter(self.inner.uploads())

    def abort(self, upload: UploadInfo) -> None:
        self.inner.abort(upload)

    def close(self) -> None:
        self.inner.close()


def hooked(hook: Callable[[str, str], None]) -> Callable[[StoreConfig], Store]:
    """An opener of stores whose calls are hooked."""
    return lambda config: HookedStore(open_store(config), hook)


class Actor:
    """A function on its own thread. `error` is the KvctlError it ended with, `result` what it returned."""

    def __init__(self, name: str, run: Callable[[Actor], object]) -> None:
        self.name = name
        self.result: object = None
        self.error: KvctlError | None = None
        self.bug: BaseException | None = None
        self.ended = False
        self.steps: list[str] = []
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, args=(run,), daemon=True)
        self._thread.start()

    def _main(self, run: Callable[[Actor], object]) -> None:
        self._go.acquire()
        try:
            self.result = run(self)
        except KvctlError as error:
            self.error = error
        except BaseException as error:  # shown by the test
            self.bug = error
        self.ended = True
        self._stopped.release()

    def hook(self, call: str, key: str) -> None:
        """Give way; go on when the scheduler says so."""
        self.steps.append(f"{self.name}: {call} {key}")
        self._stopped.release()
        self._go.acquire()

    def step(self) -> None:
        self._go.release()
        self._stopped.acquire()


def run_random(actors: Sequence[Actor], seed: int) -> list[str]:
    """Run the actors to their ends in an order drawn from `seed`: mostly one goes on, sometimes another takes
    over. Returns the steps in order."""
    choose = random.Random(seed)
    stickiness = choose.choice([0.0, 0.5, 0.8, 0.95])
    trace: list[str] = []
    current = choose.choice(actors)
    while running := [actor for actor in actors if not actor.ended]:
        if current.ended or choose.random() >= stickiness:
            current = choose.choice(running)
        _advance(current, trace)
    return trace


def run_switching(actors: Sequence[Actor], switches: Sequence[int]) -> tuple[list[str], int]:
    """Run the first actor, and the next one (in a circle) after `switches[i]` more steps each; then each to its
    end. Returns the steps and how many there were."""
    trace: list[str] = []
    turn = 0
    for length in switches:
        for _ in range(length):
            if actors[turn % len(actors)].ended:
                break
            _advance(actors[turn % len(actors)], trace)
        turn += 1
    for offset in range(len(actors)):
        actor = actors[(turn + offset) % len(actors)]
        while not actor.ended:
            _advance(actor, trace)
    return trace, len(trace)


def _advance(actor: Actor, trace: list[str]) -> None:
    before = len(actor.steps)
    actor.step()
    trace.extend(actor.steps[before:])
    if actor.bug is not None:
        raise actor.bug
