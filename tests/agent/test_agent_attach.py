"""`kvctl.attach`: tensors over the agent's memory, leases that live as long as the last of them."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest

import kvctl
from kvctl.core.errors import NotFoundError
from tests.agent.agents import AgentProcess, eventually, python, write_aligned
from tests.agent.test_agent_slots import load

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvctl[torch]'")
pytestmark = pytest.mark.torch

WRITE = """
import kvctl
found = kvctl.attach("m")
print("attached", flush=True)
found["model.norm.weight"].zero_()
print("written", flush=True)
"""

KEEP = """
import sys, kvctl
found = kvctl.attach("m")
print(float(found["model.norm.weight"].float().abs().nansum()), flush=True)
sys.stdin.readline()
print(float(found["model.norm.weight"].float().abs().nansum()), flush=True)
"""


def test_attached_tensors_are_the_loaded_ones_and_the_lease_ends_with_the_last(
    agent: AgentProcess, tmp_path: Path
) -> None:
    write_aligned(tmp_path / "m")
    load(agent, tmp_path / "m")
    found = kvctl.attach("m", socket=agent.socket)
    wanted = kvctl.load_weights(str(tmp_path / "m"))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in wanted.items())
    assert b"LlamaForCausalLM" in found.files["config.json"]
    kept = found["model.norm.weight"]
    before = kept.clone()
    found.close()
    del found
    gc.collect()
    assert agent.ls("m")[0]["leases"] == 1
    assert torch.equal(kept.view(torch.int32), before.view(torch.int32))
    del kept
    gc.collect()
    eventually(lambda: agent.ls("m")[0]["leases"] == 0, "the lease ends with the last tensor")


def test_the_python_api_loads_from_a_slot_as_from_any_source(
    agent: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_aligned(tmp_path / "m")
    load(agent, tmp_path / "m")
    monkeypatch.setenv("KVCTL_AGENT_SOCKET", agent.socket)
    found, wanted = kvctl.load_weights("slot:m"), kvctl.load_weights(str(tmp_path / "m"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in wanted.items())
    assert agent.ls("m")[0]["leases"] == 0


def test_private_tensors_can_be_written_and_nobody_else_sees_it(agent: AgentProcess, tmp_path: Path) -> None:
    write_aligned(tmp_path / "m")
    load(agent, tmp_path / "m")
    mine = kvctl.attach("m", socket=agent.socket, private=True)
    others = kvctl.attach("slot:m", socket=agent.socket)
    before = others["model.norm.weight"].clone()
    mine["model.norm.weight"].zero_()
    assert mine["model.norm.weight"].abs().sum() == 0
    assert torch.equal(others["model.norm.weight"].view(torch.int32), before.view(torch.int32))


def test_writing_to_read_only_tensors_ends_the_writer_and_harms_nothing(agent: AgentProcess, tmp_path: Path) -> None:
    write_aligned(tmp_path / "m")
    load(agent, tmp_path / "m")
    writer = python(WRITE, agent.socket)
    out, _ = writer.communicate(timeout=120)
    assert out == "attached\n"
    assert writer.returncode == -signal.SIGSEGV
    eventually(lambda: agent.ls("m")[0]["leases"] == 0, "the dead writer's lease ends")


def test_what_is_attached_outlives_the_agent(agent: AgentProcess, tmp_path: Path) -> None:
    write_aligned(tmp_path / "m")
    load(agent, tmp_path / "m")
    engine = python(KEEP, agent.socket)
    assert engine.stdin is not None
    assert engine.stdout is not None
    with engine.stdin, engine.stdout:
        first = engine.stdout.readline()
        agent.kill()
        engine.stdin.write("\n")
        engine.stdin.flush()
        assert engine.stdout.readline() == first
        engine.stdin.close()
        assert engine.wait(60) == 0


def test_an_unknown_slot_names_the_known_ones(agent: AgentProcess, tmp_path: Path) -> None:
    write_aligned(tmp_path / "m")
    load(agent, tmp_path / "m")
    with pytest.raises(NotFoundError, match="no slot is called x: slots here: m"):
        kvctl.attach("x", socket=agent.socket)
