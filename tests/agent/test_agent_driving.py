"""Engines driven along with a slot's swap: all take the new generation, or none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvctl.agent.driving import DriveOptions, EngineDriver
from kvctl.agent.load import rollback_slot, swap_slot
from kvctl.agent.slot_store import open_store
from kvctl.agent.target import SlotOptions
from kvctl.core.addresses import parse_store
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, MemberDownError, NothingServesError, PartialError, SwapFailedError
from kvctl.engines.api import EngineAdapter, SwapRequest, SwapResult
from kvctl.testing.models import write_llama
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess
from tests.agent.test_agent_slots import load


class Engine:
    """An engine that reads its weights from the address that it is given, and keeps what it had."""

    def __init__(self) -> None:
        self.weights = self.before = b"nothing"
        self.held = False
        self.swaps = 0
        self.fail = ""

    def swap(self, request: SwapRequest) -> SwapResult:
        assert request.hold
        if self.fail == "swap":
            raise SwapFailedError("this engine does not want to")
        store = open_store(parse_store(request.weights))
        self.before, self.weights = self.weights, store.get("model.safetensors")
        store.close()
        self.held = True
        self.swaps += 1
        return SwapResult("held", request.weights, None, self.swaps, {}, 0.0, 0)

    def finish(self) -> SwapResult:
        if self.fail == "finish":
            raise MemberDownError("it has gone")
        self.held = False
        return SwapResult("serving", "", None, self.swaps, {}, 0.0, 0)

    def rollback(self) -> SwapResult:
        if self.fail == "rollback":
            raise MemberDownError("it has gone")
        self.weights, self.held = self.before, False
        return SwapResult("serving", "", None, self.swaps, {}, 0.0, 0)

    def close(self) -> None:
        return


class World:
    def __init__(self, agent: AgentProcess, tmp_path: Path) -> None:
        self.agent = agent
        self.engines = {"http://a": Engine(), "http://b": Engine()}
        self.files = [write_llama(str(tmp_path / str(number)), seed=number) for number in range(2)]
        self.new = str(tmp_path / "1")
        load(agent, tmp_path / "0")

    def driver(self, **options: Any) -> EngineDriver:
        return EngineDriver(list(self.engines), self.open, socket=self.agent.socket, options=DriveOptions(**options))

    def open(self, url: str) -> EngineAdapter:
        engine: Any = self.engines[url]  # Any: what a swap does not use is left out
        adapter: EngineAdapter = engine
        return adapter

    def swap(self, *, keep: bool = False, **options: Any) -> None:
        swap_slot(
            "m", LoadRequest(self.new), Context(), socket=self.agent.socket,
            options=SlotOptions(driver=self.driver(**options), keep_previous=keep),
        )  # fmt: skip

    def hold(self) -> list[int]:
        """Which generation each engine holds; -1: none."""
        known = [files["model.safetensors"] for files in self.files]
        return [known.index(e.weights) if e.weights in known else -1 for e in self.engines.values()]

    def serving(self) -> list[int]:
        return [item["generation"] for item in self.agent.ls("m") if item["state"] == "ready"]


@pytest.fixture
def world(agent: AgentProcess, tmp_path: Path) -> World:
    return World(agent, tmp_path)


def test_all_engines_take_the_generation_before_it_serves_and_go_on_after(world: World) -> None:
    smoked: list[tuple[list[int], list[int], list[bool]]] = []
    world.swap(smoke=lambda: smoked.append((world.hold(), world.serving(), [e.held for e in world.engines.values()])))
    assert smoked == [([1, 1], [1], [True, True])]
    assert (world.hold(), world.serving()) == ([1, 1], [2])
    assert not any(engine.held for engine in world.engines.values())


def test_one_that_refuses_undoes_it_everywhere(world: World) -> None:
    world.engines["http://b"].fail = "swap"
    with pytest.raises(SwapFailedError, match="does not want to"):
        world.swap()
    assert (world.hold(), world.serving()) == ([-1, -1], [1])
    assert not world.engines["http://a"].held


def test_a_smoke_test_that_fails_undoes_it_everywhere(world: World) -> None:
    def smoke() -> None:
        raise EnvError("the answers are wrong")

    with pytest.raises(SwapFailedError, match="the answers are wrong"):
        world.swap(smoke=smoke)
    assert (world.hold(), world.serving()) == ([-1, -1], [1])


def test_an_engine_that_cannot_go_back_is_told_as_nothing_serves(world: World) -> None:
    world.engines["http://a"].fail = "rollback"
    world.engines["http://b"].fail = "swap"
    with pytest.raises(NothingServesError, match="could not go back"):
        world.swap()
    assert world.serving() == [1]


def test_an_engine_that_does_not_go_on_is_told_and_the_others_serve(world: World) -> None:
    world.engines["http://a"].fail = "finish"
    with pytest.raises(PartialError, match="not every engine"):
        world.swap()
    assert world.serving() == [2]
    assert not world.engines["http://b"].held


def test_a_rollback_drives_them_back_too(world: World) -> None:
    world.swap(keep=True)
    rollback_slot("m", driver=world.driver(), socket=world.agent.socket)
    assert (world.hold(), world.serving()) == ([0, 0], [1])
