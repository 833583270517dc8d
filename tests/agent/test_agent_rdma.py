"""Slots by RDMA, over Soft-RoCE in a guest of the lab."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.fixtures import figure, inside, lab, run_inside, start_guests

__all__ = ["figure", "inside", "lab", "run_inside", "start_guests"]
pytestmark = pytest.mark.rdma


def test_inside_a_guest(run_inside: Callable[..., str]) -> None:
    run_inside("tests/agent/inside_agent.py", 400)
