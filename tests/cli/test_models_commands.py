"""`models` through the real program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import Kvctl


def names(kvctl: Kvctl, *args: str) -> list[str]:
    done = kvctl("models", "ls", *args, "-o", "json")
    assert done.code == 0, done.err
    assert done.document["schema"] == "kvctl.models/1"
    return [f"{row['name']}@{row['version']}" for row in done.document["models"]]


@pytest.mark.usefixtures("two")
def test_ls_lists_versions_and_takes_globs(kvctl: Kvctl) -> None:
    assert names(kvctl) == ["m@1", "m@2", "n@1"]
    assert names(kvctl, "m") == ["m@1", "m@2"]
    assert names(kvctl, "*@1") == ["m@1", "n@1"]
    assert names(kvctl, "-r", "b") == []
    human = kvctl("models", "ls")
    assert human.out.splitlines()[0].split()[:2] == ["NAME", "VERSION"]
    assert len(kvctl("models", "ls", "-o", "jsonl").out.splitlines()) == 3


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("command", [["models", "ls"], ["models", "rm", "-y"]])
def test_what_matches_nothing_is_four_unless_allowed(kvctl: Kvctl, command: list[str]) -> None:
    assert kvctl(*command, "zz*").code == 4
    assert kvctl(*command, "zz").code == 4
    assert kvctl(*command, "zz*", "--allow-empty").code == 0


@pytest.mark.usefixtures("two")
def test_rm_asks_plans_and_removes(kvctl: Kvctl) -> None:
    refused = kvctl("models", "rm", "m*")
    assert refused.code == 2
    assert "remove m@1, m@2 (" in refused.err
    planned = kvctl("models", "rm", "m*", "-n", "-o", "json").document
    assert (planned["models"], planned["removed"]) == (["m@1", "m@2"], False)
    assert names(kvctl) == ["m@1", "m@2", "n@1"]
    assert kvctl("models", "rm", "m@1", "n", "-y").code == 0
    assert names(kvctl) == ["m@2"]
    assert kvctl("load-weights", "n").code == 4


@pytest.mark.usefixtures("two")
def test_one_digest_for_files_and_repo(kvctl: Kvctl, tmp_path: Path) -> None:
    plain = kvctl("models", "digest", "./model", "-o", "json").document
    stored = kvctl("models", "digest", "n", "-o", "json").document
    assert plain["digest"] == stored["digest"]
    assert kvctl("models", "inspect", "n", "-o", "json").document["digest"] == plain["digest"]
    done = kvctl("models", "digest", "./model", "--out", "d.json")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "d.json").read_text())["digest"] == plain["digest"]
    assert kvctl("load-weights", "./model", "--require-digests", "d.json").code == 0
    wrong = kvctl("load-weights", "./tuned", "--require-digests", "d.json", "-o", "json")
    assert wrong.code == 7
    assert wrong.out == ""


@pytest.mark.usefixtures("two")
def test_verify_reads_and_says_what_is_wrong(kvctl: Kvctl, tmp_path: Path) -> None:
    good = kvctl("models", "verify", "n", "-o", "json").document
    assert good["verified"]["state"] == "full"
    assert kvctl("models", "verify", "./model").code == 2
    for chunk in (tmp_path / "a" / "chunks").rglob("*"):
        if chunk.is_file() and chunk.stat().st_size > 100_000:
            data = bytearray(chunk.read_bytes())
            data[len(data) // 2] ^= 1
            chunk.write_bytes(data)
    assert kvctl("models", "verify", "n", "-o", "json").error["code"] == "integrity"


@pytest.mark.usefixtures("two")
def test_cp_to_another_repo_and_to_another_name(kvctl: Kvctl) -> None:
    done = kvctl("models", "cp", "a:n", "b:", "-o", "json")
    assert done.code == 0, done.err
    assert names(kvctl, "-r", "b") == ["n@1"]
    again = kvctl("models", "cp", "n", "--to", "./b", "-o", "json")
    assert again.code == 0, again.err
    assert again.document["written"] == 0
    assert kvctl("models", "cp", "m@1", "b:renamed@v1").code == 0
    assert names(kvctl, "-r", "b") == ["n@1", "renamed@v1"]
    assert kvctl("models", "verify", "b:renamed").code == 0
    assert kvctl("models", "cp", "n", "copy").code == 0
    assert "copy@1" in names(kvctl)


@pytest.mark.usefixtures("two")
def test_a_copy_that_makes_no_sense_is_two(kvctl: Kvctl) -> None:
    for args in (["n"], ["n", "a:n"], ["./model", "b:"], ["n", "b:x", "--to", "b"], ["n", "./x"]):
        assert kvctl("models", "cp", *args).code == 2, args


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", ["../x", "/x", "-x", "a b", "модель"])
def test_odd_names_are_served_literally_or_refused(kvctl: Kvctl, tmp_path: Path, name: str) -> None:
    before = {path for path in tmp_path.rglob("*") if tmp_path / "a" not in path.parents}
    done = kvctl("push-weights", "./model", "--", name)
    assert done.code in {0, 2}, done.err
    if done.code == 0:
        assert f"{name}@1" in names(kvctl)
        assert kvctl("load-weights", f"a:{name}").code == 0
    after = {path for path in tmp_path.rglob("*") if tmp_path / "a" not in path.parents}
    assert {path for path in after - before if "state" not in path.parts} == set()
