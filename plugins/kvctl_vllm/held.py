"""What weights this process's engine holds: the one place where loader, swap and connector agree on it."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """`source`: the address they came from. `digest`: model digest (`kvctl help format`), None while nobody knows it.
    `generation`: one more with each change in this process. `names`: of the checkpoint's tensors, where kvctl read
    them.
    """

    source: str
    digest: str | None
    generation: int
    names: tuple[str, ...] = ()


_lock = threading.Lock()
_held = Held("", None, 0)


def held() -> Held:
    return _held


def now_holds(source: str, digest: str | None, names: tuple[str, ...] = ()) -> Held:
    """Other weights, from now on."""
    global _held  # noqa: PLW0603 - one engine per process
    with _lock:
        _held = Held(source, digest, _held.generation + 1, names)
        return _held


def restore(before: Held) -> Held:
    """The weights of `before` again, as a generation of their own."""
    return now_holds(before.source, before.digest, before.names)


def learn_digest(generation: int, digest: str) -> None:
    """The digest of that generation, if it is still the one held."""
    global _held  # noqa: PLW0603
    with _lock:
        if _held.generation == generation:
            _held = Held(_held.source, digest, generation, _held.names)
