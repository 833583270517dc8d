"""A process that dies: at its n-th store call (before it, or right after its effect), and every call after that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvctl.core.addresses import StoreConfig
from kvctl.transports.api import ObjectInfo, Store
from kvctl.transports.registry import open_store
from tests.repo.steps import HookedStore


class Died(Exception):
    """Not a KvctlError: nothing may catch it and go on."""


class Life:
    """Counts the store calls of one run and ends it at call `at`; `after`: a put or delete still has its effect."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.at = at
        self.after = after
        self.calls = 0
        self.dead = False

    def hook(self, call: str, key: str) -> None:
        if self.dead:
            raise Died(f"{call} {key}")
        self.calls += 1
        if self.calls > self.at:
            self.dead = True
            if not (self.after and call in {"put", "delete"}):
                raise Died(f"{call} {key}")

    def opener(self, config: StoreConfig) -> Store:
        return MortalStore(open_store(config), self)


class MortalStore(HookedStore):
    """A store whose caller may be dead when the call returns."""

    def __init__(self, inner: Store, life: Life) -> None:
        super().__init__(inner, life.hook)
        self._life = life

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        info = super().put(key, data, if_absent=if_absent, if_version=if_version)
        if self._life.dead:
            raise Died(f"put {key}")
        return info

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        super().delete(keys, if_version=if_version)
        if self._life.dead:
            raise Died("delete")


def lives(*, stride: int = 1) -> Iterator[Life]:
    """Lives that end at each call in turn, both ways. Stop when one outlived its run (`dead` is still False)."""
    at = 0
    while True:
        for after in (False, True):
            life = Life(at, after=after)
            yield life
            if not life.dead:
                return
        at += stride
