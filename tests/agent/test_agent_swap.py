"""Swaps of a slot: the next generation beside the serving one, flips, failures, rollbacks, and many of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvctl.agent.load import rollback_slot, swap_slot
from kvctl.agent.target import SlotOptions
from kvctl.core.context import Context
from kvctl.core.errors import (
    CapacityError,
    ConflictError,
    EnvError,
    IncompatibleError,
    NotFoundError,
    NothingServesError,
    SwapFailedError,
)
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.transfer.report import Report
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, eventually, kvctl, read_slot, same_files
from tests.agent.conftest import Start
from tests.agent.swaps import Marathon
from tests.agent.test_agent_slots import load


def swap(agent: AgentProcess, source: Path, options: SlotOptions | None = None, digests: str | None = None) -> Report:
    request = LoadRequest(str(source), digests=digests)
    return swap_slot("m", request, Context(), options=options, socket=agent.socket)


def states(agent: AgentProcess) -> list[tuple[int, str]]:
    return [(item["generation"], item["state"]) for item in agent.ls("m")]


def test_who_is_attached_keeps_the_old_generation_and_it_is_freed_with_its_last_lease(
    agent: AgentProcess, tmp_path: Path
) -> None:
    old, new = write_llama(str(tmp_path / "1")), write_llama(str(tmp_path / "2"), seed=2)
    load(agent, tmp_path / "1")
    with agent.client() as client:
        opened = client.open("m")
        report = swap(agent, tmp_path / "2")
        assert (report.command, report.extra["slot"]["generation"]) == ("swap", 2)
        assert states(agent) == [(1, "draining"), (2, "ready")]
        for file in opened.files:
            assert os.pread(file.fd, file.size, 0) == old[file.name]
            os.close(file.fd)
        assert same_files(read_slot(agent, "m"), new)
    eventually(lambda: states(agent) == [(2, "ready")], "the old generation is freed")


def test_a_kept_generation_serves_again_after_a_rollback(agent: AgentProcess, tmp_path: Path) -> None:
    old, new = write_llama(str(tmp_path / "1")), write_llama(str(tmp_path / "2"), seed=2)
    load(agent, tmp_path / "1")
    with pytest.raises(NotFoundError, match="no generation to go back to"):
        rollback_slot("m", socket=agent.socket)
    swap(agent, tmp_path / "2", SlotOptions(keep_previous=True))
    assert states(agent) == [(1, "previous"), (2, "ready")]
    assert rollback_slot("m", socket=agent.socket)["generation"] == 1
    assert same_files(read_slot(agent, "m"), old)
    rollback_slot("m", socket=agent.socket)
    assert same_files(read_slot(agent, "m"), new)
    assert kvctl("agent", "unload", "m", "--previous", socket=agent.socket, state=tmp_path)[0] == 0
    assert states(agent) == [(2, "ready")]


def test_other_shapes_are_refused_before_anything_is_reserved(agent: AgentProcess, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "1"))
    write_llama(str(tmp_path / "2"), LlamaShape(layers=3))
    load(agent, tmp_path / "1")
    used = agent.used()
    with pytest.raises(IncompatibleError, match=r"tensor model\.layers\.2\."):
        swap(agent, tmp_path / "2")
    assert agent.used() == used
    assert states(agent) == [(1, "ready")]


def test_an_empty_slot_has_nothing_to_swap(agent: AgentProcess, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "1"))
    with pytest.raises(NotFoundError):
        swap(agent, tmp_path / "1")


def wrong_digests(tmp_path: Path, model: str, other: str) -> str:
    """A digests file that the model does not match: its load fails after all bytes have moved."""
    path = tmp_path / "wrong.json"
    assert kvctl("models", "digest", str(tmp_path / other), "--out", str(path), socket="", state=tmp_path)[0] == 0
    return str(path)


def test_a_swap_that_fails_while_loading_leaves_the_old_weights_serving(agent: AgentProcess, tmp_path: Path) -> None:
    old = write_llama(str(tmp_path / "1"))
    write_llama(str(tmp_path / "2"), seed=2)
    load(agent, tmp_path / "1")
    digests = wrong_digests(tmp_path, "2", "1")
    with pytest.raises(SwapFailedError, match="the old weights serve") as caught:
        swap(agent, tmp_path / "2", digests=digests)
    assert caught.value.details["code"] == "integrity"
    eventually(lambda: states(agent) == [(1, "ready")], "what landed is freed")
    assert same_files(read_slot(agent, "m"), old)


def test_the_new_generation_can_be_read_by_name_before_it_serves_and_an_engine_may_refuse_it(
    agent: AgentProcess, tmp_path: Path
) -> None:
    old, new = write_llama(str(tmp_path / "1")), write_llama(str(tmp_path / "2"), seed=2)
    load(agent, tmp_path / "1")
    seen: list[bool] = []

    class Refusing:
        def prepare(self, slot: str, ident: str) -> None:
            seen.append(same_files(read_slot(agent, slot, ident), new) and same_files(read_slot(agent, slot), old))
            raise EnvError("the engine did not take the weights")

        def finish(self) -> None:
            raise AssertionError

        def undo(self) -> None:
            raise AssertionError

    with pytest.raises(SwapFailedError, match="the old weights serve: the engine did not take"):
        swap(agent, tmp_path / "2", SlotOptions(driver=Refusing()))
    assert seen == [True]
    eventually(lambda: states(agent) == [(1, "ready")], "the refused generation is freed")


def test_swaps_as_they_are_typed_and_their_exit_codes(agent: AgentProcess, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "1"))
    write_llama(str(tmp_path / "2"), seed=2)
    write_llama(str(tmp_path / "other"), LlamaShape(layers=3))
    load(agent, tmp_path / "1")

    def typed(*arguments: str) -> tuple[int, dict[str, Any]]:
        return kvctl("swap", *arguments, socket=agent.socket, state=tmp_path)[:2]

    assert typed("slot:m", "--rollback")[0] == 4
    code, report = typed("slot:m", str(tmp_path / "2"), "--keep-previous")
    assert (code, report["command"], report["extra"]["slot"]["generation"]) == (0, "swap", 2)
    code, document = typed("slot:m", "--rollback")
    assert (code, document["generation"]) == (0, 1)
    assert typed("slot:m", str(tmp_path / "other"))[0] == 8
    assert typed("slot:none", str(tmp_path / "2"))[0] == 4
    assert typed("slot:m", str(tmp_path / "2"), "--smoke", "true")[0] == 2
    # an engine that is not there: the old weights serve
    code, error = typed("slot:m", str(tmp_path / "2"), "--engine", "http://127.0.0.1:1")
    assert (code, error["code"]) == (11, "swap_failed")
    assert states(agent)[0][0] == 1


def test_where_two_do_not_fit_the_old_one_goes_first_only_when_asked(start: Start, tmp_path: Path) -> None:
    agent = start(memory="2MB")
    for number in (1, 2, 3):
        write_llama(str(tmp_path / str(number)), seed=number)
    load(agent, tmp_path / "1")
    with pytest.raises(CapacityError, match="does not fit") as caught:
        swap(agent, tmp_path / "2")
    assert "--evict-first" in str(caught.value.hint)
    with agent.client() as client:
        opened = client.open("m")
        for file in opened.files:
            os.close(file.fd)
        with pytest.raises(ConflictError, match="in use"):
            swap(agent, tmp_path / "2", SlotOptions(evict_first=True))
    eventually(lambda: agent.ls("m")[0]["leases"] == 0, "the lease ends")
    swap(agent, tmp_path / "2", SlotOptions(evict_first=True))
    assert states(agent) == [(2, "ready")]
    digests = wrong_digests(tmp_path, "3", "1")
    with pytest.raises(NothingServesError, match="nothing serves"):
        swap(agent, tmp_path / "3", SlotOptions(evict_first=True), digests=digests)
    eventually(lambda: agent.ls() == [], "nothing is left")


def test_fifty_swaps_with_readers_and_agents_killed_at_random(place: Path, tmp_path: Path) -> None:
    counts = Marathon(place, tmp_path, seed=6).run(50)
    assert (counts.swaps, counts.reads) == (50, 150)
    assert counts.readers_killed > 0
    assert counts.agents_killed > 0
