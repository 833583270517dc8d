"""The agents of `tests/agent`, for checkpoints of their slots, and one that holds a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.agent.load import load_slot
from kvctl.core.context import Context
from kvctl.testing.models import write_llama
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess
from tests.agent.conftest import agent, place, start
from tests.checkpoint.making import SHAPE

__all__ = ["agent", "place", "start"]


@pytest.fixture
def model(tmp_path: Path) -> dict[str, bytes]:
    return write_llama(str(tmp_path / "m"), SHAPE, shards=12)


@pytest.fixture
def loaded(agent: AgentProcess, model: dict[str, bytes], tmp_path: Path) -> AgentProcess:
    load_slot(LoadRequest(str(tmp_path / "m"), into="slot:m"), Context(), socket=agent.socket)
    return agent
