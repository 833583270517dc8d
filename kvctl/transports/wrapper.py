"""`TransportWrapper`: a transport around another one that passes everything on. Wrappers say what they change.
`innermost`: the store inside whatever wraps it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.memory.buffers import Buffer
from kvctl.transports.api import Capabilities, Completion, Op, Registration, Store, Transport


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
