"""A real vLLM with its agent's KV tiers ahead of a repo: the next engine restores from memory, and from the repo when
the agent is gone, with equal tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvctl.testing.nodes import NodeProcess
from tests.agent.agents import AgentProcess, eventually
from tests.vllm import tiny
from tests.vllm.conftest import apart, repo_over
from tests.vllm.engines import Engine

pytestmark = pytest.mark.engine
COLD = 1e-4  # log-probabilities apart from a cold run
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, K and V, heads, dim, F32
PROMPT = 768


def test_the_next_engine_restores_from_memory_and_without_the_agent_from_the_repo(
    nodes: Sequence[NodeProcess], models: Callable[..., Path], launch: Callable[..., Engine]
) -> None:
    repo = repo_over([node.store("tiers") for node in nodes])
    with tempfile.TemporaryDirectory(prefix="kvagent-") as short:
        folder = Path(short) / "a"
        serve = ("--kv-repo", repo, "--kv-memory", "64MiB")
        with AgentProcess.start(folder, *serve) as agent:
            settings = {"repo": repo, "min_tokens": 16, "agent": agent.socket, "rest": 0.2}
            _through_the_agents_life(agent, serve, lambda: launch(models(), settings))


def _through_the_agents_life(agent: AgentProcess, serve: Sequence[str], start: Callable[[], Engine]) -> None:
    prompt = tiny.tokens(PROMPT, 90)
    first = start()
    cold = first.complete(prompt)
    first.stored(1)
    kv = first.info()["kv"]
    assert (kv["stores"], kv["held"], kv["dropped"]) == (1, 0, 0)
    assert {name: (use["requests"], use["hits"]) for name, use in kv["tiers"].items()} == {
        "memory": (1, 0), "shared": (1, 0),
    }  # fmt: skip
    first.stop(kill=True)
    assert agent.tiers()["memory"]["written"] == 1

    second = start()
    try:
        found = second.complete(prompt, kvctl={"push": False})
        assert found.kvctl["found"] == PROMPT
        assert found.tokens == cold.tokens
        assert apart(found.logprobs, cold.logprobs) <= COLD
        use = second.info()["kv"]["tiers"]
        assert use == {
            "memory": {"requests": 1, "hits": 1, "tokens": PROMPT, "bytes": PROMPT * TOKEN_BYTES, "hit_rate": 1.0}
        }
        tiers = agent.tiers()
        assert (tiers["memory"]["requests"], tiers["memory"]["hits"], tiers["memory"]["hit_rate"]) == (2, 1, 0.5)
        assert (tiers["memory"]["tokens"], tiers["memory"]["bytes"]) == (PROMPT, PROMPT * TOKEN_BYTES)
        assert (tiers["shared"]["requests"], tiers["shared"]["hits"]) == (1, 0)

        agent.kill()
        for _ in range(2):
            second.reset()
            found = second.complete(prompt, kvctl={"push": False})
            assert found.kvctl["found"] == PROMPT
            assert found.tokens == cold.tokens
        assert second.info()["kv"]["tiers"]["shared"]["tokens"] == 2 * PROMPT
        assert second.said("tiers are gone") == 1

        with AgentProcess.start(agent.folder, *serve) as again:

            def from_memory() -> bool:
                second.reset()
                before = second.info()["kv"]["tiers"]["memory"]["tokens"]
                assert second.complete(prompt, kvctl={"push": False}).tokens == cold.tokens
                return bool(second.info()["kv"]["tiers"]["memory"]["tokens"] == before + PROMPT)

            eventually(from_memory, "what the repo served is brought up to the new agent's memory, and used")
            assert second.said("tiers are back") == 1
            assert again.tiers()["memory"]["promoted"] == 1
    finally:
        second.stop()
