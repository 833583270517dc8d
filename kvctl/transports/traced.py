"""`TracedTransport`: any transport, telling each request as it is handed over (`-v`). Shows no credentials: what it
tells is the method, the URL or key, and the range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvctl.transports.api import Op, Transport
from kvctl.transports.wrapper import TransportWrapper


class TracedTransport(TransportWrapper):
    """See `kvctl.transports.api.Transport`. A transport that has `describe(op) -> str` says itself what it sends."""

    def __init__(self, inner: Transport, tell: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._tell = tell
        self._describe: Callable[[Op], str] = getattr(inner, "describe", None) or self._plain

    def _plain(self, op: Op) -> str:
        return f"{self.inner.name}: {op.kind} {op.key} [{op.offset}, {op.offset + op.length})"

    def submit(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self._tell(self._describe(op))
        self.inner.submit(ops)
