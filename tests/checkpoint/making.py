"""What the tests of checkpoints make: a model of twelve shards in a slot, checkpoints of it, latencies."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvctl.checkpoint.create import CreateRequest, create
from kvctl.checkpoint.pace import Limits
from kvctl.checkpoint.shards import SlotShards
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.testing.models import LlamaShape
from kvctl.transfer.report import Report
from tests.agent.agents import AgentProcess

SHAPE = LlamaShape(layers=2, hidden=512, inner=1024, vocab=2048)  # 13 MB


def checkpoint(
    agent: AgentProcess,
    to: StoreConfig,
    *,
    slot: str = "m",
    ctx: Context | None = None,
    keep_last: int | None = None,
) -> Report:
    shards = SlotShards(slot, socket=agent.socket)
    try:
        return create(shards, CreateRequest(to, Limits(), keep_last), ctx or Context())
    finally:
        shards.close()


class Told:
    """Latencies that a test sets: `gap` while the baseline is measured, `later` once the checkpoint runs."""

    resolution = "told"

    def __init__(self, gap: float, later: float) -> None:
        self._gap = gap
        self._later = later

    @property
    def baseline(self) -> bool:
        """Whether the caller measures the baseline. By the thread, not by a clock: it holds on a slow machine too."""
        return threading.current_thread().name != "kvctl-pace"

    def take(self) -> Sequence[float]:
        return [self._gap if self.baseline else self._later] * 40

    def close(self) -> None:
        return
