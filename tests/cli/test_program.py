"""The program as a whole: usage errors, forms of output, exit codes, pipes, crashes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvctl.cli.main import wanted_format
from kvctl.cli.tree import TREE, Branch
from tests.cli.program import PROGRAM, Kvctl

LEAVES = [
    (entry.name, leaf.name) if isinstance(entry, Branch) else (entry.name,)
    for section in TREE
    for entry in section.entries
    for leaf in (entry.leaves if isinstance(entry, Branch) else (entry,))
]


def test_version(kvctl: Kvctl) -> None:
    done = kvctl("--version")
    assert (done.code, done.out, done.err) == (0, "kvctl 0.1.0\n", "")


def test_help_lists_every_command_by_section(kvctl: Kvctl) -> None:
    done = kvctl("--help")
    assert done.code == 0
    assert done.err == ""
    for section in TREE:
        assert f"\n{section.title}:\n" in done.out
        for entry in section.entries:
            assert f"\n  {entry.name} " in done.out


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_help_with_variables(kvctl: Kvctl, path: tuple[str, ...]) -> None:
    done = kvctl(*path, "--help")
    assert done.code == 0, done.err
    assert "Global options:" in done.out
    assert "KVCTL_OUTPUT" in done.out


def test_no_command_is_usage(kvctl: Kvctl) -> None:
    done = kvctl()
    assert done.code == 2
    assert done.out == ""
    assert "Usage: kvctl" in done.err


@pytest.mark.parametrize(
    ("args", "what", "hint"),
    [
        (["lod-weights"], "no command is called 'lod-weights'", "did you mean kvctl load-weights?"),
        (["models", "lst"], "no command is called 'lst'", "did you mean kvctl models ls?"),
        (["load-weights"], "Missing argument 'ADDRESS'", "see `kvctl load-weights --help`"),
        (["load-weights", "x", "--nope"], "No such option", "see `kvctl load-weights --help`"),
        (["load-weights", "x", "--max-rate", "fast"], "'fast' is not a size", "write it like 16MiB, 2GB or 4096"),
        (["load-weights", "x", "--max-in-flight", "0KiB"], "--max-in-flight 0KiB: nothing", "leave it out"),
        (["push-weights", "x", "y", "--max-rate", "0"], "--max-rate 0: nothing would ever move", "leave it out"),
        (["load-weights", "x", "--verify", "all"], "Invalid value for '--verify'", None),
        (["load-weights", "./x", "--tp-rank", "2", "--tp-size", "2"], "--tp-rank 2 does not exist", "ranks are 0 to 1"),
        (["load-weights", "./x", "--into", "./copy"], "'./copy' is not a target", "write dir:./copy"),
        (["load-weights", "./x", "--transport-opt", "k"], "'k' is not NAME=VALUE", None),
        (["load-weights", "C:\\m"], "looks like a Windows path", None),
        (["load-weights", "lab:m"], "no repo is called 'lab'", None),
        (["load-weights", "m"], "no repo was named", "add -r NAME"),
        (["load-weights", "./m", "--region", "eu"], "--region has no effect", "configured repos say this"),
    ],
)  # fmt: skip
def test_wrong_usage_is_two_with_the_reason_in_both_forms(
    kvctl: Kvctl, args: list[str], what: str, hint: str | None
) -> None:
    human = kvctl(*args)
    assert human.code == 2
    assert human.out == ""
    assert human.err.startswith("error: ")
    assert what in human.err
    assert hint is None or f"hint: {hint}" in human.err
    machine = kvctl(*args, "-o", "json")
    assert machine.code == 2
    assert machine.out == ""
    assert machine.err.count("\n") == 1
    assert machine.error["exit_code"] == 2
    assert machine.error["code"] in {"usage", "config"}
    assert what in machine.error["what"]


def test_an_unknown_scheme_lists_the_known_ones(kvctl: Kvctl) -> None:
    done = kvctl("load-weights", "gopher://host/m")
    assert done.code == 2
    assert "no store knows gopher://" in done.err
    assert "file://" in done.err
    assert "s3://" in done.err
    assert "kvctl help plugins" in done.err


@pytest.mark.parametrize("form", ["human", "json"])
def test_a_url_with_credentials_is_refused_and_not_repeated(kvctl: Kvctl, form: str) -> None:
    done = kvctl("load-weights", "s3://alice:hunter2@bucket/m", "-o", form)
    assert done.code == 2
    assert "credentials" in done.err
    assert "hunter2" not in done.err + done.out


def test_a_secret_of_the_environment_never_shows(kvctl: Kvctl) -> None:
    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
    done = kvctl("load-weights", f"./{secret}", env={"AWS_SECRET_ACCESS_KEY": secret})
    assert done.code == 4
    assert secret not in done.err + done.out


def test_global_options_work_before_and_after_the_command(kvctl: Kvctl) -> None:
    for args in (["-o", "json", "help"], ["help", "-o", "json"]):
        assert kvctl(*args).document["schema"] == "kvctl.help/1"
    assert kvctl("-o", "human", "help", "-o", "json").document["schema"] == "kvctl.help/1"
    assert kvctl("help", env={"KVCTL_OUTPUT": "json"}).document["schema"] == "kvctl.help/1"


def test_jsonl_is_a_line_per_item(kvctl: Kvctl) -> None:
    done = kvctl("help", "-o", "jsonl")
    lines = done.out.splitlines()
    assert len(lines) == len(kvctl("help", "-o", "json").document["topics"])
    assert all(line.startswith('{"schema": "kvctl.help/1", "topic": ') for line in lines)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["x", "-o", "json"], "json"),
        (["x", "-ojsonl"], "jsonl"),
        (["x", "-vvqo", "json"], "json"),
        (["x", "-qojson"], "json"),
        (["x", "-hello", "json"], "human"),
        (["--output=json", "x"], "json"),
        (["x", "--output", "human"], "human"),
        (["x", "-o", "xml"], "human"),
        (["x", "--", "-o", "json"], "human"),
        (["-o"], "human"),
    ],
)
def test_the_form_is_known_before_parsing(argv: list[str], expected: str) -> None:
    assert wanted_format(argv) == expected


def test_a_reader_that_leaves_is_no_error(surroundings: dict[str, str], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    for args in (["help", "config"], ["--help"], ["transports", "ls", "-o", "json"]):
        done = subprocess.run(
            [PROGRAM, *args], env=surroundings, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
    os.close(write)


def test_an_encoding_that_cannot_show_a_name_does_not_break_the_run(kvctl: Kvctl) -> None:
    done = kvctl("load-weights", "./модель", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert done.code == 4
    assert "\\u043c" in done.err


def test_a_bug_leaves_a_crash_log_and_no_traceback(kvctl: Kvctl, tmp_path: Path, surroundings: dict[str, str]) -> None:
    # a plug-in that fails in a way that nobody foresaw
    site = tmp_path / "site"
    (site / "kvctl_bad-1.dist-info").mkdir(parents=True)
    (site / "kvctl_bad-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kvctl-bad\nVersion: 1\n")
    (site / "kvctl_bad-1.dist-info" / "entry_points.txt").write_text("[kvctl.stores]\nbad = kvctl_bad:SPEC\n")
    (site / "kvctl_bad.py").write_text(
        "from kvctl.transports.registry import StoreSpec\n"
        "SPEC = StoreSpec('bad', 'fails', 'kvctl_bad:open_store')\n"
        "def open_store(config):\n    return 1 / 0\n"
    )
    env = {"PYTHONPATH": str(site)}
    done = kvctl("load-weights", "bad://x", env=env)
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "ZeroDivisionError" in done.err
    logs = list((tmp_path / "state" / "crashes").iterdir())
    assert len(logs) == 1
    assert str(logs[0]) in done.err
    assert "Traceback" in logs[0].read_text()
    assert "Traceback" in kvctl("load-weights", "bad://x", "-vv", env=env).err


def test_an_unwritable_state_directory_does_not_hide_the_error(kvctl: Kvctl, tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("")
    done = kvctl("load-weights", model, "-o", "json", env={"KVCTL_STATE_DIR": str(tmp_path / "file")})
    assert done.code == 0
    assert "could not be saved" in done.err
    assert "id" not in done.document


def test_colour_changes_looks_only(kvctl: Kvctl) -> None:
    plain = kvctl("nope")
    coloured = kvctl("nope", "--color", "always")
    assert "\x1b[" in kvctl("load-weights", "m", "--color", "always").err
    assert "\x1b[" not in plain.err
    assert coloured.code == plain.code
