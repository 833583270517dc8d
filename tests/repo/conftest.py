"""Fixtures of the repo tests; what they are made of is in `world`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.core.context import Context, RetryPolicy
from tests.repo.world import Stores, file_stores, mem_stores


@pytest.fixture
def ctx() -> Context:
    return Context(retry=RetryPolicy(base=0.0, cap=0.0, attempts=2))


@pytest.fixture(params=["mem", "file"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """A function that names n empty stores, of both kinds in turn."""
    return lambda count: mem_stores(count) if request.param == "mem" else file_stores(count, tmp_path)
