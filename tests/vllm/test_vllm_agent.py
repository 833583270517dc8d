"""A real vLLM and an agent: weights that outlive the engine, checkpoints of it while it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.agent.load import load_slot
from kvctl.core.context import Context
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, eventually, kvctl
from tests.vllm import tiny
from tests.vllm.engines import Engine

pytestmark = pytest.mark.engine
PROMPT = tiny.tokens(60, 5)


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    with tempfile.TemporaryDirectory(prefix="kvagent-") as folder, AgentProcess.start(Path(folder) / "a") as found:
        yield found


def without_weights(model: Path, folder: Path) -> Path:
    """The model's small files alone: an engine that has them only cannot load weights from there."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_killed_engine_comes_back_on_the_slots_weights_with_the_same_answers(
    agent: AgentProcess, models: Callable[..., Path], launch: Callable[..., Engine], tmp_path: Path
) -> None:
    model = models()
    load_slot(LoadRequest(str(model), into="slot:m"), Context(), socket=agent.socket)
    bare = without_weights(model, tmp_path / "bare")
    source = f"slot://m?socket={agent.socket}"
    first = launch(bare, source=source)
    answer = first.complete(PROMPT).tokens
    first.stop(kill=True)
    eventually(lambda: agent.ls("m")[0]["leases"] == 0, "the dead engine holds nothing")
    second = launch(bare, source=source)
    try:
        assert second.complete(PROMPT).tokens == answer
        assert second.said("over slot") == 1
    finally:
        second.stop()
    plain = launch(model)
    try:
        assert plain.complete(PROMPT).tokens == answer
    finally:
        plain.stop()


def test_a_slots_swap_drives_its_engine_along_under_load_and_back(
    agent: AgentProcess, models: Callable[..., Path], launch: Callable[..., Engine], tmp_path: Path
) -> None:
    old, new = models(), models(seed=1)
    load_slot(LoadRequest(str(old), into="slot:m"), Context(), socket=agent.socket)
    engine = launch(old, source=f"slot://m?socket={agent.socket}")
    stop = threading.Event()
    answers: list[tuple[int, ...]] = []

    def ask() -> None:
        while not stop.is_set():
            answers.append(tuple(engine.complete(PROMPT).tokens))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        eventually(lambda: bool(answers), "the engine answers")
        before = answers[0]
        code, report, err = kvctl(
            "swap", "slot:m", str(new), "--keep-previous", "--engine", engine.url, socket=agent.socket, state=tmp_path
        )
        assert code == 0, err
        assert report["extra"]["slot"]["generation"] == 2
        seen = len(answers)
        eventually(lambda: len(answers) > seen + 1, "it answers after the swap")
        after = answers[-1]
        assert after != before
        code, _, err = kvctl(
            "swap", "slot:m", "--rollback", "--engine", engine.url, socket=agent.socket, state=tmp_path
        )
        assert code == 0, err
        seen = len(answers)
        eventually(lambda: len(answers) > seen + 1, "it answers after the rollback")
        assert answers[-1] == before
        assert set(answers) == {before, after}
        assert [item["state"] for item in agent.ls("m")] == ["ready", "previous"]
    finally:
        stop.set()
        asking.join()
        engine.stop()


def test_a_checkpoint_of_an_engine_under_load_restores_to_the_same_answers(
    models: Callable[..., Path], launch: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = launch(models())
    stop = threading.Event()
    answers: list[list[int]] = []

    def ask() -> None:
        while not stop.is_set():
            answers.append(engine.complete(PROMPT).tokens)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        eventually(lambda: bool(answers), "the engine answers")
        done = subprocess.run(
            [sys.executable, "-m", "kvctl", "-o", "json", "checkpoint", "create", "--from", f"engine:{engine.url}",
             "--to", str(tmp_path / "ck"), "--max-rate", "50MB", "--latency-budget", "1s"],
            env={**os.environ, "KVCTL_STATE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
            timeout=600,
        )  # fmt: skip
    finally:
        stop.set()
        asking.join()
        engine.stop()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["extra"]["pacing"]["resolution"] == "raw inter-token samples of the engine"
    folder = tmp_path / "ck" / report["extra"]["id"]
    again = launch(folder)
    try:
        assert {tuple(answer) for answer in answers} == {tuple(again.complete(PROMPT).tokens)}
    finally:
        again.stop()


def test_transformers_opens_a_checkpoint_of_an_engine(
    models: Callable[..., Path], launch: Callable[..., Engine], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    engine = launch(models())
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvctl", "-o", "json", "checkpoint", "create", "--from", f"engine:{engine.url}",
             "--to", str(tmp_path / "ck")],
            env={**os.environ, "KVCTL_STATE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
            timeout=600,
        )  # fmt: skip
    finally:
        engine.stop()
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "ck" / json.loads(done.stdout)["extra"]["id"]
    wanted = AutoModelForCausalLM.from_pretrained(models(), dtype=torch.float32).state_dict()
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.slow
def test_interference_is_measured_round_by_round(
    models: Callable[..., Path], launch: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = launch(models())
    try:
        code, document, err = kvctl(
            "bench", "interference", f"engine:{engine.url}", "--to", str(tmp_path / "ck"), "--rounds", "2",
            "--seconds", "8s", "--streams", "6", "--max-rate", "50MB", socket="", state=tmp_path,
        )  # fmt: skip
    finally:
        engine.stop()
    assert code == 0, err
    kinds = {kind["name"]: kind for kind in document["kinds"]}
    assert list(kinds) == ["baseline", "unpaced", "paced", "plain copy"]
    assert all(len(kind["p99_rounds_s"]) == 2 and kind["samples"] >= 100 for kind in kinds.values())
    assert kinds["baseline"]["copies"] == 0
    assert all(kinds[name]["bytes"] > 0 for name in ("unpaced", "paced", "plain copy"))
    assert document["resolution"] == "raw inter-token samples of the engine"
    assert list((tmp_path / "ck").glob("*/*")) == []
