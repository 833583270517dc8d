"""The lab, made ready once per session, and guests for a module of tests or for one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.rdma_lab.guests import Guests
from scripts.rdma_lab.places import MISSING, Lab, LabError
from scripts.rdma_lab.prepare import boot, prepare

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.rdma)


@pytest.fixture(scope="session")
def lab() -> Lab:
    """Ready to run; builds what is missing, which takes minutes the first time. A skip says what this machine lacks
    and how to get it; anything else that fails is a failure.
    """
    try:
        ready = prepare(lambda text: print(f"rdma-lab: {text}", file=sys.stderr))
        boot(ready)
    except LabError as problem:
        if problem.code != MISSING:
            raise
        pytest.skip(f"no RDMA lab: {problem}; `scripts/rdma-lab prepare` makes it")
    return ready


@pytest.fixture(scope="session")
def inside() -> dict[str, str]:
    """Environment of jobs: this checkout and this Python, nothing of the user's."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}", "ROOT": str(ROOT)}


@pytest.fixture
def start_guests(lab: Lab, inside: dict[str, str]) -> Iterator[Callable[..., Guests]]:
    """`start_guests(name, .., **as Guests)`: guests of one test, ended after it."""
    with ExitStack() as stack:
        yield lambda *names, **options: stack.enter_context(
            Guests(lab, names, folder=str(ROOT), environment=inside, **options)
        )


@pytest.fixture(scope="module")
def pair(lab: Lab, inside: dict[str, str]) -> Iterator[Guests]:
    """Guests `a` and `b`, shared by a module's tests: leave them as they were."""
    with Guests(lab, ("a", "b"), folder=str(ROOT), environment=inside) as guests:
        yield guests
