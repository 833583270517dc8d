"""The lab, made ready once per session; guests for a module of tests or for one. A conftest imports them by name."""

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

__all__ = ["figure", "inside", "lab", "pair", "run_inside", "start_guests"]

Figure = Callable[[str, object], None]

ROOT = Path(__file__).resolve().parents[2]


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
        pytest.skip(f"no RDMA lab: {problem}")
    return ready


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """`figure(what, value)`: for the list of what was measured, at the end of the run."""
    return lambda what, value: record_property(what, str(value))


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


@pytest.fixture
def run_inside(start_guests: Callable[..., Guests], figure: Figure) -> Callable[..., str]:
    """`run_inside(file, seconds)`: a file of tests in a guest of its own, which talks to itself; all must pass there,
    none may be skipped. Gives what pytest printed.
    """

    def run(file: str, seconds: float) -> str:
        guests = start_guests("a")
        done = guests["a"].run(f"python -m pytest -q -p no:cacheprovider -o addopts= {file}", seconds=seconds)
        said = f"{done.out}\n{done.err}"
        assert done.code == 0, said[-6000:]
        last = done.out.strip().splitlines()[-1]
        assert "passed" in last
        assert "skipped" not in last, said[-6000:]
        figure(f"{file} in a guest", last)
        return done.out

    return run
