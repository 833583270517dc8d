"""The agents of `tests/agent`, for checkpoints of their slots."""

from __future__ import annotations

from tests.agent.conftest import agent, place, start

__all__ = ["agent", "place", "start"]
