"""`repo`, `push-weights` and loads from a repo through the real program."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import termios
from importlib.resources import files
from pathlib import Path

import jsonschema

from tests.cli.program import PROGRAM, Kvctl

SCHEMA = json.loads(files("kvctl.cli").joinpath("schemas/report.schema.json").read_text(encoding="utf-8"))
MEMBERS = "./r/a,./r/b,./r/c"


def on_terminal(args: list[str], surroundings: dict[str, str], cwd: Path, answer: str) -> tuple[int, str, str]:
    """Exit code, stdout (a pipe) and what the terminal showed, with stdin and stderr on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [PROGRAM, *args], env=surroundings, cwd=cwd, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, text=True
    )
    os.close(theirs)
    os.write(ours, answer.encode())
    out, _ = process.communicate(timeout=60)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other end has gone
        pass
    os.close(ours)
    return process.returncode, out, shown.decode()


def test_several_members_want_the_number_of_replicas(
    kvctl: Kvctl, surroundings: dict[str, str], tmp_path: Path
) -> None:
    done = kvctl("repo", "init", "-r", MEMBERS)
    assert done.code == 2
    assert "3 members, no --replicas" in done.err
    assert not (tmp_path / "r").exists()
    code, out, shown = on_terminal(["repo", "init", "-r", MEMBERS, "-o", "json"], surroundings, tmp_path, "2\n")
    assert code == 0, shown
    assert "copies of each chunk (1 to 3)?" in shown
    assert json.loads(out)["replicas"] == 2


def test_one_member_needs_no_number(kvctl: Kvctl) -> None:
    assert kvctl("repo", "init", "-r", "./one", "-o", "json").document["replicas"] == 1


def test_two_members_at_one_place_are_refused(kvctl: Kvctl) -> None:
    done = kvctl("repo", "init", "-r", "./r/a,./r/../r/a", "--replicas", "2")
    assert done.code == 2
    assert "error: " in done.err


def test_push_then_load_by_every_way_to_name_the_repo(kvctl: Kvctl, repo: Path) -> None:
    pushed = kvctl("push-weights", "./tuned", "t", "-o", "json")
    assert pushed.code == 0, pushed.err
    jsonschema.validate(pushed.document, SCHEMA)
    for args, env in (
        (["t"], {}),
        (["lab:t@1"], {}),
        (["t@1", "-r", MEMBERS], {}),
        (["t"], {"KVCTL_REPO": MEMBERS}),
    ):
        done = kvctl("load-weights", *args, "-o", "json", env=env)
        assert done.code == 0, done.err
        jsonschema.validate(done.document, SCHEMA)
        assert done.document["bytes"] == pushed.document["bytes"]
        assert done.document["verified"]["state"] == "leaves"


def test_a_second_push_writes_nothing(kvctl: Kvctl, repo: Path) -> None:
    again = kvctl("push-weights", "./model", "m", "-o", "json")
    assert again.code == 0, again.err
    assert again.document["extra"]["new_version"] is False
    assert again.document["written"] == 0


def test_a_dry_push_writes_nothing(kvctl: Kvctl, repo: Path) -> None:
    before = sorted(repo.rglob("*"))
    done = kvctl("push-weights", "./model", "m", "-n", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["schema"] == "kvctl.push-plan/1"
    assert sorted(repo.rglob("*")) == before


def test_a_lost_member_shows_and_the_load_goes_on(kvctl: Kvctl, repo: Path, tmp_path: Path) -> None:
    assert kvctl("repo", "status", "-o", "json").document["healthy"] is True
    shutil.move(repo / "b", tmp_path / "away")
    status = kvctl("repo", "status", "-o", "json")
    assert status.code == 0, status.err
    assert status.document["healthy"] is False
    assert [member["up"] for member in status.document["members"]].count(False) == 1
    done = kvctl("load-weights", "m", "-o", "json")
    assert done.code == 0, done.err
    check = kvctl("repo", "check")
    assert check.code == 3, check.err


def test_check_tells_damage_from_garbage(kvctl: Kvctl, repo: Path) -> None:
    assert kvctl("repo", "check", "--read-data", "all").code == 0
    chunk = next(path for path in (repo / "a" / "chunks").rglob("*") if path.is_file())
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    damaged = kvctl("repo", "check", "--read-data", "all", "-o", "json")
    assert damaged.code == 7
    assert damaged.document["damaged"] is True
    assert damaged.error["code"] == "integrity"
    assert kvctl("repo", "repair", "--read-data", "all").code == 0
    assert kvctl("repo", "check", "--read-data", "all").code == 0


def test_replacing_a_member_asks_and_takes_y(kvctl: Kvctl, repo: Path) -> None:
    shutil.rmtree(repo / "c")
    pair = f"file://{repo}/c=./r/d"
    refused = kvctl("repo", "repair", "--replace", pair)
    assert refused.code == 2
    assert "add -y" in refused.err
    done = kvctl("repo", "repair", "--replace", pair, "-y", "-o", "json")
    assert done.code == 0, done.err
    assert kvctl("repo", "check", "-r", "./r/a,./r/b,./r/d", "--read-data", "all").code == 0


def test_drain_asks_on_a_terminal_and_needs_y_without(
    kvctl: Kvctl, repo: Path, surroundings: dict[str, str], tmp_path: Path
) -> None:
    args = ["repo", "drain", f"file://{repo}/c", "-o", "json"]
    assert kvctl(*args).error["exit_code"] == 2
    code, out, shown = on_terminal(args, surroundings, tmp_path, "n\n")
    assert (code, out) == (2, "")
    assert "drop it from the repo? [y/N]" in shown
    code, out, shown = on_terminal(args, surroundings, tmp_path, "y\n")
    assert code == 0, shown
    assert json.loads(out)["schema"] == "kvctl.repo-drain/1"
    assert kvctl("repo", "check", "-r", "./r/a,./r/b").code == 0


def test_gc_asks_only_for_a_short_grace_period(kvctl: Kvctl, repo: Path) -> None:
    assert kvctl("repo", "gc", "-o", "json").document["schema"] == "kvctl.gc/1"
    assert kvctl("repo", "gc", "--grace", "1s").code == 2
    assert kvctl("repo", "gc", "--grace", "1s", "-n").code == 0
    assert kvctl("repo", "gc", "--grace", "1s", "-y").code == 0


def test_stats_counts_models_and_bytes(kvctl: Kvctl, repo: Path) -> None:
    document = kvctl("repo", "stats", "-o", "json").document
    assert (document["models"], document["garbage"]) == (1, 0)
    assert document["physical"] == 2 * document["unique"]


def test_no_repo_there_is_four(kvctl: Kvctl) -> None:
    assert kvctl("repo", "status", "-r", "./nowhere").code == 4


def test_a_terminal_changes_looks_not_data(
    kvctl: Kvctl, model: Path, surroundings: dict[str, str], tmp_path: Path
) -> None:
    piped = kvctl("load-weights", model, "-n")
    code, out, _ = on_terminal(["load-weights", str(model), "-n"], surroundings, tmp_path, "")
    assert (code, out) == (0, piped.out)


def test_a_terminal_gets_a_bar(surroundings: dict[str, str], model: Path, tmp_path: Path) -> None:
    code, out, shown = on_terminal(["load-weights", str(model), "-o", "json"], surroundings, tmp_path, "")
    assert code == 0
    assert "loading:" in shown
    assert "\r" in shown
    assert json.loads(out)["command"] == "load-weights"
