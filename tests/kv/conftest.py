"""Fixtures of the KV tests; what they are made of is in `world`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context, RetryPolicy
from tests.kv.counting import Calls, install
from tests.kv.world import file_stores, make_repo, mem_stores


@pytest.fixture
def ctx() -> Context:
    return Context(retry=RetryPolicy(base=0.0, cap=0.0, attempts=2))


@pytest.fixture(params=["mem", "file"])
def repo(request: pytest.FixtureRequest, tmp_path: Path, ctx: Context) -> tuple[StoreConfig, ...]:
    """A repo of two stores, of both kinds in turn."""
    return make_repo(mem_stores(2) if request.param == "mem" else file_stores(tmp_path, 2), ctx)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Counts of everything that memory stores are asked from now on."""
    return install(monkeypatch)
