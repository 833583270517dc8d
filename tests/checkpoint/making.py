"""What the tests of checkpoints make: a model of twelve shards in a slot, and checkpoints of it."""

from __future__ import annotations

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
