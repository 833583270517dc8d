"""A real vLLM with its agent's KV tiers ahead of a repo: the next engine restores from memory, and from the repo when
the agent is gone, with equal tokens; so where memory is damaged, layer by layer and with windows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.names import parse_session
from kvctl.kv.reading import StoredSession
from kvctl.repo.repo import Repo
from kvctl.testing.nodes import NodeProcess
from tests.agent.agents import AgentProcess, eventually
from tests.vllm import tiny
from tests.vllm.conftest import apart, repo_over, stores_of
from tests.vllm.engines import Answer, Engine

pytestmark = pytest.mark.engine
COLD = 1e-4  # log-probabilities apart from a cold run
LAYER_BYTES = 2 * 2 * 32 * 4  # of a token: K and V, heads, dim, F32
LAYERS = 4
TOKEN_BYTES = LAYERS * LAYER_BYTES
PROMPT = 769
FOUND = 768  # of them, in blocks of 16; the last token is computed
SESSION = "alice/tiers"


@contextmanager
def serving(repo: str) -> Iterator[tuple[AgentProcess, tuple[str, ...], dict[str, Any]]]:
    """An agent ahead of the repo, how it was started, and the settings of an engine that uses it."""
    serve = ("--kv-repo", repo, "--kv-memory", "64MiB")
    with (
        tempfile.TemporaryDirectory(prefix="kvagent-") as short,
        AgentProcess.start(Path(short) / "a", *serve) as agent,
    ):
        yield agent, serve, {"repo": repo, "tenant": "alice", "min_tokens": 16, "agent": agent.socket, "rest": 0.2}


def flip(stores: Sequence[StoreConfig], layer: int) -> None:
    """One bit of a layer's keys, in each pack of the session that has that layer."""
    with (
        Repo.open(stores, Context()) as repo,
        StoredSession.open(repo, parse_session(SESSION), Context()) as stored,
    ):
        stored.read_headers(stored.manifest.packs)
        assert not stored.bad
        for row, header in stored.headers.items():
            at = next((item.offset for item in header.fragments if item.place.layer == layer), None)
            if at is None:
                continue
            ref = stored.ref(row)
            (store,) = (member.store for member in repo.locate(ref.digest)[:1])
            data = bytearray(store.get(ref.key))
            data[at] ^= 1
            store.put(ref.key, bytes(data))


def memory_of(agent: AgentProcess) -> tuple[StoreConfig, ...]:
    return (StoreConfig(agent.tiers()["memory"]["place"]),)


class Gain:
    """What the engine counts from here on: `tokens` by tier, and `lost`, `needed`, `fetched`, `loads` in all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        kv = engine_kv(self._engine)
        named = {name: int(kv[name]) for name in ("loads", "lost", "needed", "fetched")}
        return {**named, **{name: int(use["tokens"]) for name, use in kv["tiers"].items()}}

    def __call__(self) -> dict[str, int]:
        """Only what is not 0."""
        gained = {name: number - self._before.get(name, 0) for name, number in self._now().items()}
        return {name: number for name, number in gained.items() if number}


def engine_kv(engine: Engine) -> dict[str, Any]:
    kv: dict[str, Any] = engine.info()["kv"]
    return kv


def again(engine: Engine, prompt: list[int], cold: Answer) -> tuple[Answer, dict[str, int]]:
    """The prompt once more, with an empty cache: it must be the same answer. With what was counted for it."""
    engine.reset()
    gain = Gain(engine)
    found = engine.complete(prompt, kvctl={"push": False})
    assert found.tokens == cold.tokens
    assert apart(found.logprobs, cold.logprobs) <= COLD
    return found, gain()


def test_the_next_engine_restores_from_memory_and_without_the_agent_from_the_repo(
    nodes: Sequence[NodeProcess], models: Callable[..., Path], launch: Callable[..., Engine]
) -> None:
    """The first engine loads prefixes whole, the next one layer by layer, one at a time."""
    prompt = tiny.tokens(PROMPT, 90)
    with serving(repo_over([node.store("tiers") for node in nodes])) as (agent, serve, settings):
        first = launch(models(), settings)
        try:
            cold = _stored(first, agent, prompt)
        finally:
            first.stop(kill=True)
        second = launch(models(), {**settings, "mode": "layers", "staging": 2 * FOUND * LAYER_BYTES})
        try:
            _from_memory(second, agent, prompt, cold)
            _from_damaged_memory(second, agent, prompt, cold)
            _without_the_agent(second, agent, serve, prompt, cold)
        finally:
            second.stop()


def _stored(engine: Engine, agent: AgentProcess, prompt: list[int]) -> Answer:
    cold = engine.complete(prompt, kvctl={"session": SESSION})
    engine.stored(1)
    kv = engine_kv(engine)
    assert (kv["stores"], kv["held"], kv["dropped"]) == (1, 0, 0)
    assert {name: (use["requests"], use["hits"]) for name, use in kv["tiers"].items()} == {
        "memory": (1, 0), "shared": (1, 0),
    }  # fmt: skip
    assert agent.tiers()["memory"]["written"] == 1
    found, gained = again(engine, prompt, cold)
    assert found.cached == FOUND
    assert gained == {"loads": 1, "needed": FOUND * TOKEN_BYTES, "fetched": FOUND * TOKEN_BYTES, "memory": FOUND}
    return cold


def _from_memory(engine: Engine, agent: AgentProcess, prompt: list[int], cold: Answer) -> None:
    _, gained = again(engine, prompt, cold)
    size = FOUND * TOKEN_BYTES
    assert gained == {"loads": 1, "needed": size, "fetched": size, "memory": FOUND}
    assert engine_kv(engine)["tiers"] == {
        "memory": {"requests": 1, "hits": 1, "tokens": FOUND, "bytes": size, "hit_rate": 1.0}
    }
    tiers = agent.tiers()
    assert (tiers["memory"]["requests"], tiers["memory"]["hits"], tiers["memory"]["hit_rate"]) == (3, 2, 0.6667)
    assert (tiers["memory"]["tokens"], tiers["memory"]["bytes"]) == (2 * FOUND, 2 * size)
    assert (tiers["shared"]["requests"], tiers["shared"]["hits"]) == (1, 0)


def _from_damaged_memory(engine: Engine, agent: AgentProcess, prompt: list[int], cold: Answer) -> None:
    """Once a layer was handed over the rest of the request is computed; until then the next tier has it. What is
    damaged counts neither as needed nor as fetched.
    """
    flip(memory_of(agent), LAYERS - 1)
    _, gained = again(engine, prompt, cold)
    size = FOUND * LAYER_BYTES
    assert gained == {"loads": 1, "lost": FOUND, "needed": (LAYERS - 1) * size, "fetched": (LAYERS - 1) * size}
    flip(memory_of(agent), 0)
    _, gained = again(engine, prompt, cold)
    assert gained == {"loads": 1, "needed": LAYERS * size, "fetched": LAYERS * size, "shared": FOUND}


def _without_the_agent(
    engine: Engine, agent: AgentProcess, serve: Sequence[str], prompt: list[int], cold: Answer
) -> None:
    agent.kill()
    for _ in range(2):
        found, gained = again(engine, prompt, cold)
        assert found.cached == FOUND
        size = FOUND * TOKEN_BYTES
        assert gained == {"loads": 1, "needed": size, "fetched": size, "shared": FOUND}
    assert engine.said("tiers are gone") == 1
    with AgentProcess.start(agent.folder, *serve) as successor:
        eventually(
            lambda: "memory" in again(engine, prompt, cold)[1],
            "what the repo served is brought up to the new agent's memory, and used",
        )
        assert engine.said("tiers are back") == 1
        assert successor.tiers()["memory"]["promoted"] == 1


def test_windows_come_whole_from_memory_from_the_repo_or_not_at_all(
    nodes: Sequence[NodeProcess], models: Callable[..., Path], launch: Callable[..., Engine]
) -> None:
    """A Gemma-shaped model, sliding layers 0, 1, 3 and 4: of these, damage to the window ends the whole load."""
    prompt, found = tiny.tokens(700, 91), 688
    sliding, full = 4, 2
    size = (full * found + sliding * (tiny.WINDOW - 1)) * LAYER_BYTES
    fetched = size + sliding * LAYER_BYTES  # the window begins in the middle of a stored block
    repo = repo_over([node.store("windows") for node in nodes])
    with serving(repo) as (agent, _, settings):
        engine = launch(models("gemma", layers=6), settings)
        try:
            cold = engine.complete(prompt, kvctl={"push": False, "pull": False})
            engine.complete(prompt, 1, kvctl={"session": SESSION, "pull": False})  # windows are there at its end alone
            engine.stored(1)
            assert again(engine, prompt, cold)[1] == {"loads": 1, "needed": size, "fetched": fetched, "memory": found}
            flip(memory_of(agent), 4)
            gained = again(engine, prompt, cold)[1]
            assert gained.pop("fetched") >= fetched  # and what memory had of other layers
            assert gained == {"loads": 1, "needed": size, "shared": found}
            flip(stores_of(repo), 0)
            gained = again(engine, prompt, cold)[1]
            assert (gained["loads"], gained["lost"], gained.keys() & {"memory", "shared"}) == (1, found, set())
        finally:
            engine.stop()
