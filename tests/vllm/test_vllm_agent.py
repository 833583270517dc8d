"""A real vLLM with a real model, and an agent: weights outlive the engine, swaps and checkpoints while it answers."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.core.context import Context
from kvctl.testing.nodes import NodeProcess
from kvctl.weights.digests import TensorDigest
from kvctl.weights.models import digest_model
from tests.agent.agents import AgentProcess, eventually, kvctl
from tests.vllm.conftest import apart
from tests.vllm.engines import READY, Answer, Engine

pytestmark = pytest.mark.engine
# Each of the eight tokens that SmolLM2 goes on with is 3.8 ahead of the next best: no kernel's rounding changes that.
TEXT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
ROUNDING = 0.05  # of log-probabilities in BF16, between kernels
BF16 = ("--dtype", "bfloat16")
VLLMS_OWN = ("--load-format", "safetensors", "--model-loader-extra-config", "{}")
DUMMY = ("--load-format", "dummy", "--model-loader-extra-config", "{}")
BYTES = 2 * 134_515_008  # of its weights
SENT = "kvctl_node_sent_bytes_total"


@pytest.fixture(scope="module")
def prompt(smollm2: Path) -> list[int]:
    from transformers import AutoTokenizer

    found: list[int] = AutoTokenizer.from_pretrained(smollm2)(TEXT).input_ids
    return found


@pytest.fixture(scope="module")
def other(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape that says other things: two layers have changed places."""
    from safetensors.torch import load_file, save_file

    folder = without_weights(smollm2, tmp_path_factory.mktemp("smollm2") / "other")
    place = {"10": "20", "20": "10"}
    moved = {}
    for name, tensor in load_file(smollm2 / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = place.get(parts[2], parts[2])
        moved[".".join(parts)] = tensor
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_weights(model: Path, folder: Path) -> Path:
    """The model's small files alone: an engine that has them only cannot load weights from there."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    return folder


@dataclass
class Serving:
    """A slot `m` that was loaded from a storage node, and the engine over it, which has no other source of weights."""

    agent: AgentProcess
    node: NodeProcess
    bare: Path
    launch: Callable[..., Engine]
    engine: Engine
    report: dict[str, Any]  # of the load into the slot; Any: JSON

    @property
    def slot(self) -> str:
        return slot_of(self.agent)

    def start(self) -> Engine:
        self.engine = self.launch(self.bare, source=self.slot, extra=BF16)
        return self.engine


def slot_of(agent: AgentProcess) -> str:
    return f"slot://m?socket={agent.socket}"


@pytest.fixture(scope="module")
def serving(
    smollm2: Path, launch: Callable[..., Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    place = tmp_path_factory.mktemp("serving")
    (place / "data").mkdir()
    shutil.copytree(smollm2, place / "data" / "smollm2")
    bare = without_weights(smollm2, place / "bare")
    with (
        NodeProcess.start(str(place), keys=False) as node,
        tempfile.TemporaryDirectory(prefix="kvagent-") as folder,
        AgentProcess.start(Path(folder) / "a", memory="1GiB") as agent,
    ):
        source = node.store("smollm2").url
        code, report, err = kvctl("load-weights", source, "--into", "slot:m", socket=agent.socket, state=place)
        assert code == 0, err
        engine = launch(bare, source=slot_of(agent), extra=BF16)
        found = Serving(agent, node, bare, launch, engine, report)
        try:
            yield found
        finally:
            found.engine.stop()


@contextmanager
def load(engine: Engine, prompt: Sequence[int]) -> Iterator[list[Answer]]:
    """Request after request; the answers so far."""
    over = threading.Event()
    answers: list[Answer] = []

    def ask() -> None:
        while not over.is_set():
            answers.append(engine.complete(prompt))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        eventually(lambda: bool(answers), "the engine answers")
        yield answers
    finally:
        over.set()
        asking.join()


def digests(address: str) -> dict[str, TensorDigest]:
    """Of every tensor, by reading all of it."""
    return dict(digest_model(address, None, None, None, Context())[0].by_name())


def test_a_killed_engine_comes_back_on_the_slots_memory(
    serving: Serving, prompt: list[int], record_property: Callable[[str, object], None]
) -> None:
    """It reads the same generation again, and no byte from the store: a start like one without weights."""
    answer = serving.engine.complete(prompt)
    before, used = serving.agent.ls("m"), serving.agent.used()
    sent = serving.node.metrics()[SENT]
    assert sent >= serving.report["bytes"] == BYTES
    serving.engine.stop(kill=True)
    eventually(lambda: serving.agent.ls("m")[0]["leases"] == 0, "the dead engine holds nothing")

    def started(what: str, start: Callable[[], Engine]) -> Engine:
        began = time.monotonic()
        engine = start()
        seconds, cpu = time.monotonic() - began, engine.cpu_seconds()
        record_property(f"start of vLLM with SmolLM2, {what}", f"{seconds:.1f} s, {cpu:.1f} CPU s")
        return engine

    again = started("killed with -9, again over the slot", serving.start)
    assert again.complete(prompt).tokens == answer.tokens
    assert again.said("over slot") == 1
    assert serving.node.metrics()[SENT] == sent
    after = serving.agent.ls("m")
    assert [item["ident"] for item in after] == [item["ident"] for item in before]
    assert serving.agent.used() == used
    dummy = started("dummy weights", lambda: serving.launch(serving.bare, extra=(*BF16, *DUMMY)))
    dummy.stop()


def test_a_slots_swap_drives_its_engine_along_under_load_and_back(
    serving: Serving, other: Path, prompt: list[int], tmp_path: Path
) -> None:
    engine, socket = serving.engine, serving.agent.socket
    number = serving.agent.ls("m")[0]["generation"]
    with load(engine, prompt) as answers:
        before = answers[0].tokens
        code, report, err = kvctl(
            "swap", "slot:m", str(other), "--keep-previous", "--engine", engine.url,
            socket=socket, state=tmp_path, seconds=READY,
        )  # fmt: skip
        assert code == 0, err
        assert report["extra"]["slot"]["generation"] == number + 1
        seen = len(answers)
        eventually(lambda: len(answers) > seen + 1, "it answers after the swap")
        after = answers[-1].tokens
        assert after != before
        code, _, err = kvctl(
            "swap", "slot:m", "--rollback", "--engine", engine.url, socket=socket, state=tmp_path, seconds=READY
        )
        assert code == 0, err
        seen = len(answers)
        eventually(lambda: len(answers) > seen + 1, "it answers after the rollback")
        assert answers[-1].tokens == before
    assert {tuple(answer.tokens) for answer in answers} == {tuple(before), tuple(after)}
    assert [item["state"] for item in serving.agent.ls("m")] == ["ready", "previous"]


def test_a_checkpoint_under_load_restores_into_transformers_and_vllm(
    serving: Serving, smollm2: Path, prompt: list[int], tmp_path: Path
) -> None:
    """Its bytes are those of the generation that the slot has; both libraries open it as any folder."""
    with load(serving.engine, prompt) as answers:
        seen = len(answers)
        code, report, err = kvctl(
            "checkpoint", "create", "--from", f"engine:{serving.engine.url}", "--to", str(tmp_path / "ck"),
            "--max-rate", "50MB", "--latency-budget", "1s", socket=serving.agent.socket, state=tmp_path, seconds=READY,
        )  # fmt: skip
        assert code == 0, err
        assert len(answers) > seen
    assert report["extra"]["pacing"]["resolution"] == "raw inter-token samples of the engine"
    assert {tuple(answer.tokens) for answer in answers} == {tuple(answers[0].tokens)}
    folder = tmp_path / "ck" / report["extra"]["id"]
    generation = digests(serving.slot)
    assert digests(str(folder)) == generation == digests(str(smollm2))
    assert len(generation) == 272
    theirs = in_transformers(folder, prompt)
    assert theirs == in_transformers(smollm2, prompt)
    assert theirs == answers[0].tokens
    again = serving.launch(folder, extra=(*BF16, *VLLMS_OWN))
    try:
        restored = again.complete(prompt)
    finally:
        again.stop()
    assert restored.tokens == answers[0].tokens
    assert apart(restored.logprobs, answers[0].logprobs) <= ROUNDING


def in_transformers(folder: Path, prompt: Sequence[int]) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
    found: list[int] = said[0, len(prompt) :].tolist()
    return found


@pytest.mark.slow
def test_interference_is_measured_round_by_round(
    models: Callable[..., Path], launch: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = launch(models())
    try:
        code, document, err = kvctl(
            "bench", "interference", f"engine:{engine.url}", "--to", str(tmp_path / "ck"), "--rounds", "2",
            "--seconds", "8s", "--streams", "6", "--min-rate", "5MB", "--max-rate", "20MB", socket="", state=tmp_path,
        )  # fmt: skip
    finally:
        engine.stop()
    assert code == 0, err
    kinds = {kind["name"]: kind for kind in document["kinds"]}
    assert list(kinds) == ["baseline", "unpaced", "paced", "plain copy"]
    assert all(len(kind["p99_rounds_s"]) == 2 and kind["samples"] >= 100 for kind in kinds.values())
    assert kinds["baseline"]["copies"] == 0
    assert all(kinds[name]["bytes"] > 0 for name in ("unpaced", "paced", "plain copy"))
    assert all(kind["steps"] >= 100 for kind in kinds.values())
    assert len(kinds["paced"]["pacing"]) == kinds["paced"]["copies"]
    assert all(pace["lowest_rate"] >= 5e6 and pace["nice"] == 10 for pace in kinds["paced"]["pacing"])
    assert document["resolution"] == "raw inter-token samples of the engine"
    assert list((tmp_path / "ck").glob("*/*")) == []
