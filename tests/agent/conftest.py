"""Agents for tests, in folders with short names: a unix socket's path has 107 bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.agent.agents import AgentProcess

Start = Callable[..., AgentProcess]


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvagent-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Starts agents, each in a folder of its own."""
    count = iter(range(100))
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(
            AgentProcess.start(place / f"a{next(count)}", *arguments, **options)
        )


@pytest.fixture
def agent(start: Start) -> AgentProcess:
    return start(peers=True)
