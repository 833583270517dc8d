"""Several loads into one folder at once: one fills it, the others wait their turn or are told; never a mix."""

from __future__ import annotations

import subprocess
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


def test_a_link_under_the_hidden_name_is_not_followed(tmp_path: Path) -> None:
    """In a place like /dev/shm anybody can put one there."""
    write_llama("model", LlamaShape())
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "mine").write_text("mine")
    (tmp_path / ".out.kvctl-partial").symlink_to("precious")
    refused(kvctl("load-weights", "./model", "--into", "dir:out", "-o", "json"), 10, ".out.kvctl-partial", hint=False)
    assert files_of(tmp_path / "precious") == {"mine": b"mine"}
    assert not (tmp_path / "out").exists()


def test_a_link_to_an_empty_folder_stays_one(tmp_path: Path) -> None:
    files = write_llama("model", LlamaShape())
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    for _ in range(2):  # the second time it is there already
        assert kvctl("load-weights", "./model", "--into", "dir:out/").code == 0
        assert (tmp_path / "out").is_symlink()
        assert files_of(tmp_path / "real") == files


def test_a_mount_point_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    write_llama("model", LlamaShape())
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {made.stderr.strip()}")
    try:
        error = refused(kvctl("load-weights", "./model", "--into", f"dir:{place}", "-o", "json"), 2, "mount point")
        assert f"dir:{place}/" in error["hint"]
        nothing_left(tmp_path, "disk.")
        assert kvctl("load-weights", "./model", "--into", f"dir:{place}/m").code == 0
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("marker", ["{}", "[]", "null", '{"files": 1, "fingerprint": "x"}', "[" * 100_000, "\\xff"])
def test_a_folder_with_a_strange_marker_is_taken(marker: str, tmp_path: Path) -> None:
    write_llama("model", LlamaShape())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".kvctl-load.json").write_text(marker)
    refused(kvctl("load-weights", "./model", "--into", "dir:out", "-o", "json"), 2, "is not empty")


def test_a_folder_that_is_there_already_is_held_to_the_digests_too(tmp_path: Path) -> None:
    write_llama("model", LlamaShape())
    assert kvctl("models", "digest", "./model", "--out", "d.json").code == 0
    load = ("load-weights", "./model", "--into", "dir:out", "--require-digests", "d.json", "-o", "json")
    for _ in range(2):
        done = kvctl(*load)
        assert done.code == 0, done.err
        assert done.document["verified"]["state"] == "full"
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(kvctl(*load), 7, "is not what the digests file says", hint=False)


def test_the_home_directory_is_meant_by_a_tilde_behind_the_colon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_llama("model", LlamaShape())
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kvctl("load-weights", "./model", "--into", "dir:~/out").code == 0
    assert files_of(tmp_path / "home" / "out") == files
    refused(kvctl("load-weights", "./model", "--into", "dir:~nobody-here/out", "-o", "json"), 2, "no home directory")
    assert not [item for item in tmp_path.iterdir() if item.name.startswith("~")]
