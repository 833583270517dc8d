"""Tensor parallelism: each rank reads its slices and its heads, and what several ranks store any engine picks up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import IncompatibleError
from kvctl.engines.api import SwapRequest
from kvctl.engines.registry import open_engine
from kvctl_vllm.ranks import SHM
from tests.vllm import tiny
from tests.vllm.conftest import apart, eventually
from tests.vllm.engines import Engine

pytestmark = pytest.mark.engine


def test_two_ranks_and_one_share_their_sessions(
    models: Callable[..., Path], launch: Callable[..., Engine], llama: Engine, node_repo: str
) -> None:
    before = {*Path(SHM).glob("kvctl-kv-*")}
    pair = launch(models(), {"repo": node_repo, "min_tokens": 16}, extra=["--tensor-parallel-size", "2"])
    assert pair.info()["ranks"] == 2
    assert "over-fetch" in pair.log.read_text()
    one, two = tiny.tokens(700, 80), tiny.tokens(700, 81)
    by_one = llama.complete(one, kvctl={"session": "ranks/one"})
    llama.stored(llama.info()["kv"]["stores"])
    by_two = pair.complete(two, kvctl={"session": "ranks/two"})
    pair.stored(1)
    assert pair.info()["kv"]["stores"] == 1
    found = pair.complete(one, kvctl={"session": "ranks/one", "push": False})
    assert found.cached >= 688
    assert found.tokens == by_one.tokens
    assert apart(found.logprobs, by_one.logprobs) <= 1e-4
    found = llama.complete(two, kvctl={"session": "ranks/two", "push": False})
    assert found.cached >= 688
    assert found.tokens == by_two.tokens
    assert apart(found.logprobs, by_two.logprobs) <= 1e-4
    assert pair.said("is not divided as the rules say") == 0
    assert pair.info()["kv"]["lost"] == 0
    eventually("what the second rank gave was taken", lambda: not {*Path(SHM).glob("kvctl-kv-*")} - before)
    adapter = open_engine(pair.url, Context())
    with pytest.raises(IncompatibleError, match="several ranks"):
        adapter.swap(SwapRequest(str(models(seed=1))))
    adapter.close()
    assert pair.complete(one, kvctl={"push": False, "pull": False}).tokens == by_one.tokens
    pair.stop()
