"""Storage nodes for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvctl.testing.nodes import NodeProcess

_PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node with keys for the tests of a module."""
    with NodeProcess.start(str(tmp_path_factory.mktemp("node"))) as running:
        yield running


@pytest.fixture
def fresh() -> str:
    """A prefix that no other test uses."""
    return f"p{next(_PREFIXES)}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Starts nodes of this test alone: `start(*arguments, **as NodeProcess.start)`; ended after it."""
    with ExitStack() as stack:
        numbers = itertools.count()

        def launch(*arguments: str, folder: Path | None = None, **options: object) -> NodeProcess:
            place = folder or tmp_path / f"node-{next(numbers)}"
            place.mkdir(exist_ok=True)
            return stack.enter_context(NodeProcess.start(str(place), *arguments, **options))  # type: ignore[arg-type]

        yield launch
