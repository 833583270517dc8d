"""`TracedTransport`: any transport, telling each request as it is handed over (`-v`). Shows no credentials: what it
tells is the method, the URL or key, and the range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvctl.memory.buffers import Buffer
from kvctl.transports.api import Capabilities, Completion, Op, Registration, Transport


class TracedTransport:
    """See `kvctl.transports.api.Transport`. A transport that has `describe(op) -> str` says itself what it sends."""

    def __init__(self, inner: Transport, tell: Callable[[str], None]) -> None:
        self.inner = inner
        self._tell = tell
        self._describe: Callable[[Op], str] = getattr(inner, "describe", None) or self._plain

    def _plain(self, op: Op) -> str:
        return f"{self.inner.name}: {op.kind} {op.key} [{op.offset}, {op.offset + op.length})"

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def register(self, buffer: Buffer) -> Registration:
        return self.inner.register(buffer)

    def submit(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self._tell(self._describe(op))
        self.inner.submit(ops)

    def poll(self, timeout: float | None) -> list[Completion]:
        return self.inner.poll(timeout)

    def cancel(self, ids: Sequence[int]) -> None:
        self.inner.cancel(ids)

    def close(self) -> None:
        self.inner.close()
