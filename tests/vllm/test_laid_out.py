"""Weights moved into an engine's slot and mapped from it, with small torch modules in place of vLLM's models: what is
shared, what stays whole when something fails, and what a slot is not used for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.agent import engine_slot
from kvctl.agent.attach import attach as attach_slot
from kvctl.agent.engine_slot import EngineSlot
from kvctl.core.errors import (
    CapacityError,
    ConflictError,
    EnvError,
    IncompatibleError,
    TransientError,
    UsageError,
)
from kvctl_vllm.held import now_holds
from tests.agent.agents import AgentProcess, eventually, kvctl, write_aligned
from tests.agent.conftest import Start, place, start  # noqa: F401 - fixtures

pytest.importorskip("torch", reason="needs torch: pip install 'kvctl[torch]'")
import torch
from torch import nn

from kvctl_vllm import laid_out, layout_key

KEY = {"engine": "vLLM", "release": "1", "model": "M", "dtype": "torch.float32"}
BIG = 256


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.qkv = nn.Parameter(torch.randn(3 * BIG, BIG, generator=made), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(BIG, 8, generator=made).half().t(), requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.5 + seed))
        self.register_buffer("flags", torch.tensor([True, False, True]))


class Model(nn.Module):  # type: ignore[misc]
    """Tied, fused, transposed, empty, scalar, one byte wide."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(seed), Layer(seed + 1)])
        self.embed = nn.Embedding(64, BIG)
        self.embed.weight.data = torch.randn(64, BIG, generator=torch.Generator().manual_seed(seed + 9))
        self.head = nn.Linear(BIG, 64, bias=False)
        self.head.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.register_buffer("cache", torch.arange(10.0) + seed, persistent=False)
        for parameter in self.parameters():
            parameter.requires_grad = False


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def wanted(fingerprint: str | None = "f1", source: str = "lab:m@1", **key: str) -> laid_out.Wanted:
    return laid_out.Wanted(source, fingerprint, {**KEY, **key})


@pytest.fixture
def agent(start: Start) -> AgentProcess:  # noqa: F811
    return start(memory="16MiB")


@pytest.fixture
def slot(agent: AgentProcess) -> EngineSlot:
    now_holds("lab:m@1", "digest", ("q", "k"))
    return EngineSlot(f"slot://e?socket={agent.socket}")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(laid_out, "_memory", None)
    yield
    now_holds("", None)


def own_pages() -> int:
    """Bytes of slots' mappings that this process has written for itself."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            ours = "memfd:" in line
        elif ours and first == "Anonymous:":
            total += int(line.split()[1]) << 10
    return total


def test_the_next_engine_maps_what_the_first_one_moved_there(agent: AgentProcess, slot: EngineSlot) -> None:
    first = Model()
    before = values(first)
    laid_out.publish(first, slot, wanted())
    assert same(values(first), before)
    assert first.head.weight is first.embed.weight
    (item,) = agent.ls("e")
    assert (item["state"], item["format"], item["leases"]) == ("ready", "vLLM 1, M", 1)
    said = laid_out.memory()
    assert said is not None
    assert said["copied_bytes"] == said["aliased_bytes"] == sum(t.nbytes for t in before.values())

    second = Model(seed=5)
    weight = second.layers[0].qkv
    mapped = laid_out.find(slot, wanted())
    assert mapped is not None
    laid_out.attach(second, slot, mapped)
    assert same(values(second), before)
    assert second.layers[0].qkv is weight  # what hangs on the parameter stays
    assert second.head.weight is second.embed.weight
    assert second.layers[0].turned.stride() == first.layers[0].turned.stride() == (1, 8)
    assert own_pages() == 0
    assert agent.ls("e")[0]["leases"] == 2
    said = laid_out.memory()
    assert said is not None
    assert said["copied_bytes"] == 0

    second.layers[0].qkv.data.fill_(7.0)  # a swap: this engine has pages of its own from then on
    assert same(values(first), before)
    assert own_pages() >= 3 * BIG * BIG * 4
    now_holds("lab:m@2", None)
    said = laid_out.memory()
    assert said is not None
    assert said["aliased_bytes"] == 0
    del mapped, second, weight, first, said
    eventually(lambda: agent.ls("e")[0]["leases"] == 0, "the leases end with the tensors")


def test_what_a_meta_model_lacks_is_registered(agent: AgentProcess, slot: EngineSlot) -> None:
    first = Model()
    before = values(first)
    laid_out.publish(first, slot, wanted())
    with torch.device("meta"):
        second = Model.__new__(Model)
        nn.Module.__init__(second)
        second.layers = nn.ModuleList([nn.Module(), nn.Module()])
        second.embed, second.head = nn.Embedding(64, BIG), nn.Linear(BIG, 64, bias=False)
    mapped = laid_out.find(slot, wanted())
    assert mapped is not None
    laid_out.attach(second, slot, mapped)
    assert same(values(second), before)
    assert second.head.weight is second.embed.weight
    assert isinstance(second.layers[1].qkv, nn.Parameter)


@pytest.mark.parametrize(
    ("asks", "why"),
    [
        (wanted(dtype="torch.bfloat16"), "dtype is 'torch.float32' there"),
        (wanted(fingerprint="f2"), "is not what it was laid out from"),
        (wanted(fingerprint=None, source="lab:other@1"), "it holds lab:m@1"),
    ],
)
def test_a_slot_of_something_else_is_not_used_and_replaced(
    agent: AgentProcess, slot: EngineSlot, asks: laid_out.Wanted, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    laid_out.publish(Model(), slot, wanted())
    with caplog.at_level(logging.WARNING, "vllm.kvctl"):
        assert laid_out.find(slot, asks) is None
    assert why in caplog.text
    asks = replace(asks, fingerprint=asks.fingerprint or "f3")  # of what was loaded then
    other = Model(seed=3)
    before = values(other)
    laid_out.publish(other, slot, asks)
    assert same(values(other), before)
    assert laid_out.find(slot, asks) is not None
    eventually(lambda: [item["generation"] for item in agent.ls("e")] == [2], "the old one is freed")


def test_a_source_that_is_away_is_taken_from_the_slot(slot: EngineSlot) -> None:
    laid_out.publish(Model(), slot, wanted())
    assert laid_out.find(slot, wanted(fingerprint=None)) is not None


def test_without_an_agent_or_room_the_weights_stay_whole(start: Start, slot: EngineSlot) -> None:  # noqa: F811
    model = Model()
    before = values(model)
    with pytest.raises(EnvError, match="no agent"):
        laid_out.find(EngineSlot("slot://e?socket=/nonexistent/a.sock"), wanted())
    small = start(memory="1MiB")
    with pytest.raises(CapacityError):
        laid_out.publish(model, EngineSlot(f"slot://e?socket={small.socket}"), wanted())
    assert same(values(model), before)
    laid_out.alone("no room")
    said = laid_out.memory()
    assert said is not None
    assert (said["slot"], said["why"]) == (None, "no room")


def test_an_agent_that_dies_in_the_middle_leaves_the_weights_whole(
    agent: AgentProcess, slot: EngineSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    before = values(model)
    whole = engine_slot.Filling.commit

    def commit(filling: engine_slot.Filling, mapped: engine_slot.Mapped) -> None:
        agent.kill()
        whole(filling, mapped)

    monkeypatch.setattr(engine_slot.Filling, "commit", commit)
    with pytest.raises(TransientError, match="gone away"):
        laid_out.publish(model, slot, wanted())
    assert same(values(model), before)
    model.layers[0].qkv.data.fill_(1.0)  # and can be written


def test_two_engines_that_start_at_once_share_one(agent: AgentProcess, slot: EngineSlot) -> None:
    models = [Model(), Model()]
    before = values(models[0])
    errors: list[BaseException] = []

    def go(model: Model) -> None:
        try:
            laid_out.publish(model, EngineSlot(f"slot://e?socket={agent.socket}"), wanted())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=go, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [(item["generation"], item["leases"]) for item in agent.ls("e")] == [(1, 2)]
    assert all(same(values(model), before) for model in models)


def test_one_that_takes_too_long_is_not_waited_for(
    agent: AgentProcess, slot: EngineSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    layout = laid_out._layout(laid_out._find(Model(seed=1)), wanted("f9"), {})
    filling = slot.fill(layout)
    assert filling is not None
    monkeypatch.setattr(engine_slot, "PATIENCE", 0.0)
    with pytest.raises(ConflictError, match="is being loaded"):
        laid_out.publish(model, slot, wanted())
    filling.close()
    monkeypatch.setattr(engine_slot, "PATIENCE", 60.0)  # the agent has to see that it is gone
    laid_out.publish(model, slot, wanted())


def test_it_is_no_source_of_weights(agent: AgentProcess, slot: EngineSlot, tmp_path: Path) -> None:
    laid_out.publish(Model(), slot, wanted())
    copied = ("load-weights", "slot:e", "--into", f"dir:{tmp_path / 'copy'}")
    saved = ("checkpoint", "create", "--from", "slot:e", "--to", str(tmp_path / "ck"))
    write_aligned(tmp_path / "m")
    swapped = ("swap", "slot:e", str(tmp_path / "m"))
    for command in (copied, saved, swapped):
        code, error, _ = kvctl(*command, socket=agent.socket, state=tmp_path)
        assert code == 8, (command, error)
        assert "laid out for an engine" in error["what"], command
    # to look at, it is a slot like any other
    assert attach_slot("e", socket=agent.socket)["embed.weight"].shape == (64, BIG)


def test_a_checkpoints_slot_is_not_one(agent: AgentProcess, slot: EngineSlot, tmp_path: Path) -> None:
    write_aligned(tmp_path / "m")
    code, _, err = kvctl("load-weights", str(tmp_path / "m"), "--into", "slot:e", socket=agent.socket, state=tmp_path)
    assert code == 0, err
    with pytest.raises(UsageError, match="holds a checkpoint"):
        laid_out.find(slot, wanted())


@pytest.mark.parametrize("text", ["", "a/b", "s3://a", "slot://a/b", "-", "slot://a?sockte=b", "slot://u:p@a"])
def test_a_bad_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        EngineSlot(text)


def test_ranks_have_slots_of_their_own(slot: EngineSlot) -> None:
    text = f"slot://e?socket={slot.socket}"
    assert (EngineSlot(text, 0, 1).name, EngineSlot(text, 1, 2).name) == ("e", "e.rank1of2")
    assert EngineSlot(text, 1, 2).socket == slot.socket


def test_layers_that_pack_their_weights_are_not_taken_over() -> None:
    class Packs:
        supports_pre_processed_weights = False

    model = Model()
    model.head.quant_method = Packs()
    with pytest.raises(IncompatibleError, match=r"Packs \(layer head\)"):
        layout_key.check_model(model)


def test_what_is_published_is_named_by_what_was_read(tmp_path: Path) -> None:
    """Not by what was there before it was read: somebody may push in between."""
    from kvctl.core.context import Context
    from kvctl.weights.load import plan_load
    from kvctl.weights.request import LoadRequest
    from kvctl_vllm.tensors import Weights

    write_aligned(tmp_path / "m")
    request = LoadRequest(str(tmp_path / "m"), into="memory")
    before = plan_load(request, Context()).fingerprint
    same = Weights(request, Context())
    assert list(same)
    assert same.fingerprint == before
    write_aligned(tmp_path / "m", seed=1)
    other = Weights(request, Context())
    assert list(other)
    assert other.fingerprint == plan_load(request, Context()).fingerprint != before
