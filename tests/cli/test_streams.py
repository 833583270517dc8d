"""Streams as the program finds them: closed, full, left by their reader, of another encoding; and names that would
write on the terminal.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvctl.testing.models import file_bytes
from tests.cli.program import PROGRAM, Done, Kvctl


def in_shell(line: str, folder: Path, env: Mapping[str, str]) -> Done:
    """`line` in bash, with $K for the program; its own streams are pipes."""
    done = subprocess.run(
        ["bash", "-c", line], env={**env, "K": PROGRAM}, cwd=folder, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes([("a", "U8", (1000,))]))
    return path


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_change_what_is_done(
    closed: str, tmp_path: Path, weights: Path, surroundings: dict[str, str]
) -> None:
    done = in_shell(f"$K load-weights ./m.safetensors --into dir:out -o json {closed}", tmp_path, surroundings)
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "m.safetensors").read_bytes() == weights.read_bytes()
    if ">&-" not in closed.replace("2>&-", ""):
        assert done.document["schema"] == "kvctl.report/1"
    failed = in_shell(f"$K load-weights ./none -o json {closed}", tmp_path, surroundings)
    assert failed.code == 4
    assert failed.out == ""
    if "2>&-" not in closed:
        assert failed.error["code"] == "not_found"


@pytest.mark.parametrize("line", ["--version", "--help", "help config", "transports ls -o json"])
def test_a_full_stdout_is_told_once_and_is_nine(line: str, tmp_path: Path, surroundings: dict[str, str]) -> None:
    done = in_shell(f"$K {line} >/dev/full", tmp_path, surroundings)
    assert done.code == 9
    assert "stdout cannot be written" in done.err
    assert "Exception" not in done.err


def test_a_full_stderr_hides_words_only(tmp_path: Path, surroundings: dict[str, str]) -> None:
    assert in_shell("$K load-weights ./none 2>/dev/full", tmp_path, surroundings).code == 4
    assert in_shell("$K help config 2>/dev/full", tmp_path, surroundings).code == 0


def test_a_reader_that_leaves_changes_neither_the_work_nor_the_exit_code(
    tmp_path: Path, weights: Path, surroundings: dict[str, str]
) -> None:
    read, write = os.pipe()
    os.close(read)

    def piped(line: str) -> int:
        return subprocess.run(
            [PROGRAM, *line.split(), "-o", "json"], env=surroundings, cwd=tmp_path, stdout=write, timeout=120,
            check=False,
        ).returncode  # fmt: skip

    assert piped("repo init -r ./a") == 0
    assert piped("push-weights ./m.safetensors m -r ./a") == 0
    for chunk in (tmp_path / "a" / "chunks").glob("*/*"):
        chunk.unlink()
    assert piped("repo check -r ./a") == 7
    assert piped("models rm m -y -r ./a") == 0
    assert piped("models inspect m -r ./a") == 4
    os.close(write)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_json_stays_json_in_every_encoding(
    encoding: str, tmp_path: Path, weights: Path, surroundings: dict[str, str]
) -> None:
    name = "größe-模型-🦙.safetensors"
    weights.rename(tmp_path / name)
    env = {**surroundings, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    done = subprocess.run(
        [PROGRAM, "models", "inspect", f"./{name}", "-o", "json"], env=env, cwd=tmp_path, capture_output=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout.decode(encoding))["files"][0]["name"] == name


def test_names_cannot_write_on_the_terminal(kvctl: Kvctl, tmp_path: Path) -> None:
    name = "a\x1b[2J\x1b]0;owned\x07\nb\x9b31m.safetensors"
    (tmp_path / name).write_bytes(file_bytes([("t\x1b[31m", "U8", (4,))]))
    for args in (["models", "inspect", f"./{name}"], ["load-weights", f"./{name}"], ["load-weights", f"./{name}x"]):
        done = kvctl(*args)
        assert not {"\x1b", "\x07", "\x9b"} & set(done.out + done.err), done
    assert kvctl("models", "inspect", f"./{name}", "-o", "json").document["files"][0]["name"] == name


def test_a_name_that_is_no_text_is_told_and_json_stays_json(tmp_path: Path, surroundings: dict[str, str]) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(path)
    with open(path + b"/model.safetensors", "wb") as file:
        file.write(file_bytes([("a", "U8", (4,))]))
    for line in ("models inspect", "load-weights", "load-weights --into dir:out"):
        done = in_shell(f"$K -o json {line} {shlex.quote('./caf')}$'\\xe9'", tmp_path, surroundings)
        assert done.code == 0, done.err
        assert "schema" in done.document
