"""`TransportWrapper`: a transport around another one that passes everything on. Wrappers say what they change.
`innermost`: the store inside whatever wraps it. `copier`: a store that copies inside itself, as wrappers ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.core.errors import UsageError
from kvctl.memory.buffers import Buffer
from kvctl.transports.api import Capabilities, Completion, Copies, Op, Registration, Store, Transport


class TransportWrapper:
    """See `kvctl.transports.api.Transport`. Owns `inner`: closing it closes both."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def register(self, buffer: Buffer) -> Registration:
        return self.inner.register(buffer)

    def submit(self, ops: Sequence[Op]) -> None:
        self.inner.submit(ops)

    def poll(self, timeout: float | None) -> list[Completion]:
        return self.inner.poll(timeout)

    def cancel(self, ids: Sequence[int]) -> None:
        self.inner.cancel(ids)

    def close(self) -> None:
        self.inner.close()


def innermost(store: Store) -> Store:
    """The store that makes the calls: without retries, locks or whatever else is around it."""
    inner: Store | None = store
    while inner is not None:
        store, inner = inner, getattr(inner, "inner", None)
    return store


def copier(store: Store) -> Copies:
    """Raises UsageError for a store without the capability `copy`."""
    if not isinstance(store, Copies) or not store.capabilities.copy:
        raise UsageError(f"{store.url} copies nothing inside itself")
    return store
