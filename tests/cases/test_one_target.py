"""Several loads into one folder at once: one fills it, the others wait their turn or are told; never a mix."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvctl.core.errors import ConflictError
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest
from kvctl.weights.targets import DirTarget
from tests.cases.world import files_of, kvctl, nothing_left, quick, refused


@pytest.mark.parametrize("seed", range(6))
def test_loads_of_one_model_into_one_folder_at_once(seed: int, tmp_path: Path) -> None:
    files = write_llama("model", LlamaShape(), shards=3, seed=seed)
    start = threading.Barrier(4)

    def one(_: int) -> str:
        start.wait()
        try:
            return run_load(LoadRequest("model", into="dir:out"), quick()).verified.state
        except ConflictError as error:
            return error.what

    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(one, range(4)))
    assert set(ends) <= {"none", f"another load is filling {tmp_path}/out"}
    assert "none" in ends
    assert files_of(tmp_path / "out") == files
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_a_folder_that_another_load_fills_is_six(tmp_path: Path) -> None:
    write_llama("model", LlamaShape())
    other = DirTarget("out")
    other.open((), {}, "another source")
    refused(kvctl("load-weights", "./model", "--into", "dir:out", "-o", "json"), 6, "another load is filling")
    other.close(None)
    assert kvctl("load-weights", "./model", "--into", "dir:out").code == 0
    done = kvctl("load-weights", "./model", "--into", "dir:out", "-o", "json")
    assert done.code == 0
    assert any("holds exactly this already" in note for note in done.document["notes"])


def test_a_failed_load_takes_its_folder_away_before_it_lets_go_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed is never the folder of the load that comes next."""
    target, following = DirTarget("out"), DirTarget("out")
    target.open((), {}, "a")
    seen = []

    def removing(path: str, *, ignore_errors: bool) -> None:
        assert ignore_errors
        with pytest.raises(ConflictError):
            following.open((), {}, "b")
        seen.append(path)

    monkeypatch.setattr("kvctl.weights.targets.shutil.rmtree", removing)
    target.close(ValueError("a fault"))
    assert len(seen) == 1
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    following.open((), {}, "b")
    following.close(ValueError("a fault"))
    nothing_left(tmp_path)
