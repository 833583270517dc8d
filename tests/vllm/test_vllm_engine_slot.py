"""A real vLLM over a slot in its own format: engines share the memory that the first one laid out, and outlive each
other, a swap in one of them, and the store.
"""

from __future__ import annotations

import json
import mmap
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvctl.testing.nodes import NodeProcess
from kvctl.weights.safetensors import PROBE
from tests.agent.agents import AgentProcess, eventually, kvctl
from tests.vllm.conftest import apart
from tests.vllm.engines import READY, Engine

pytestmark = pytest.mark.engine
PROMPT = list(range(5, 37))
OWN = 1e-5  # of log-probabilities: kernels round by where a tensor begins
SENT = "kvctl_node_sent_bytes_total"


@dataclass
class World:
    """The weights are on a storage node, as `a` and `b`; engines have the small files alone."""

    agent: AgentProcess
    node: NodeProcess
    bare: Path
    launch: Callable[..., Engine]

    def start(self) -> Engine:
        settings = {
            "source": f"{self.node.store('a').url}?connect_timeout=1",
            "engine_slot": f"slot://e?socket={self.agent.socket}",
        }
        return self.launch(self.bare, extra=("--model-loader-extra-config", json.dumps(settings)))

    def sent(self) -> float:
        return self.node.metrics()[SENT]


@pytest.fixture(scope="module")
def world(
    models: Callable[..., Path], launch: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    place = tmp_path_factory.mktemp("engine-slot")
    (place / "data").mkdir()
    for name, seed in (("a", 0), ("b", 1)):
        shutil.copytree(models(seed=seed), place / "data" / name)
    bare = place / "bare"
    bare.mkdir()
    for path in models().iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, bare)
    with (
        NodeProcess.start(str(place), keys=False) as node,
        tempfile.TemporaryDirectory(prefix="kvagent-") as folder,
        AgentProcess.start(Path(folder) / "a", memory="1GiB") as agent,
    ):
        yield World(agent, node, bare, launch)


def own_pages(engine: Engine) -> int:
    """Bytes of the slot's mapping that the engine's processes have written for themselves."""
    top = psutil.Process(engine.process.pid)
    found = []
    for process in (top, *top.children(recursive=True)):
        text = Path(f"/proc/{process.pid}/smaps").read_text(encoding="utf-8", errors="replace")
        parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
        found += [part for part in parts if "memfd:" in part.split("\n", 1)[0]]
    assert found, "it maps no slot"
    return sum(int(size) << 10 for part in found for size in re.findall(r"Anonymous:\s+(\d+) kB", part))


def test_engines_share_what_the_first_one_laid_out(world: World, models: Callable[..., Path], tmp_path: Path) -> None:
    first = world.start()
    assert first.said("weights moved into engine slot e") == 1
    answer = first.complete(PROMPT)
    plain = world.launch(models())
    own = plain.complete(PROMPT)
    assert own.tokens == answer.tokens
    assert apart(own.logprobs, answer.logprobs) <= OWN
    plain.stop()
    (item,) = world.agent.ls("e")
    assert item["format"].startswith("vLLM 0.32")
    assert item["source"].startswith("node://")

    sent = world.sent()
    second = world.start()
    assert world.sent() - sent == PROBE  # the header of its one file, to see that nothing has changed
    assert second.said("weights over engine slot e") == 1
    assert second.complete(PROMPT) == answer
    said = second.info()["memory"]
    assert (said["slot"], said["ident"], said["copied_bytes"]) == ("e", item["ident"], 0)
    assert said["aliased_bytes"] > 0.99 * item["bytes"]
    # the engine itself writes to its scales, which lie together
    assert max(own_pages(first), own_pages(second)) <= 4 * mmap.PAGESIZE
    assert world.agent.ls("e")[0]["leases"] == 2
    assert second.info()["digest"] == first.info()["digest"]

    # a swap is this engine's alone: the other one goes on over the same memory
    code, _, err = kvctl(
        "swap", f"engine:{second.url}", world.node.store("b").url, "--keep-previous",
        socket=world.agent.socket, state=tmp_path, seconds=READY,
    )  # fmt: skip
    assert code == 0, err
    assert second.complete(PROMPT).tokens != answer.tokens
    assert first.complete(PROMPT) == answer
    assert own_pages(second) > item["bytes"] // 2
    assert second.info()["memory"]["aliased_bytes"] == 0
    code, _, err = kvctl(
        "swap", f"engine:{second.url}", "--rollback", socket=world.agent.socket, state=tmp_path, seconds=READY
    )
    assert code == 0, err
    assert second.complete(PROMPT).tokens == answer.tokens

    # killed, and the store is away: the next one starts over the slot
    first.stop(kill=True)
    second.stop(kill=True)
    eventually(lambda: world.agent.ls("e")[0]["leases"] == 0, "the dead engines hold nothing")
    world.node.kill()
    third = world.start()
    assert third.said("does not answer") == 1
    assert third.said("weights over engine slot e") == 1
    assert third.complete(PROMPT) == answer
    third.stop()
