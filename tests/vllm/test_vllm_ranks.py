"""Tensor parallelism: each rank reads its slices and its heads, and what several ranks store any engine picks up. Slow:
two workers on CPUs take minutes to start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm import tiny
from tests.vllm.conftest import apart
from tests.vllm.engines import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_two_ranks_and_one_share_their_sessions(
    models: Callable[..., Path], launch: Callable[..., Engine], llama: Engine, node_repo: str
) -> None:
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
