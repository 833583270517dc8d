"""`kvctl kv export|import`, and bundles that go through pipes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.cli.kv_files import bundle_at, kv_of
from tests.cli.program import PROGRAM, Kvctl


def test_export_and_import_of_a_folder(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "export", "*/*", "--to", "out", "-o", "json")
    assert done.code == 0, done.err
    assert {row["session"] for row in done.document["sessions"]} == {"alice/chat@2", "bob/other@1"}
    back = kvctl("kv", "import", "out", "-r", "b", "--with-tokens", "-o", "json")
    assert back.code == 0, back.err
    assert {row["session"] for row in back.document["sessions"]} == {"alice/chat@1", "bob/other@1"}
    bundle_at(lab / "out" / "dan" / "mute.safetensors", 16, seed=8, with_ids=False)
    partly = kvctl("kv", "import", "out", "-r", "b", "-o", "json")
    assert partly.code == 3
    assert {row["session"]: bool(row["problem"]) for row in partly.document["sessions"]}["dan/mute"]


def test_two_generations_of_a_session_are_not_exported_over_each_other(kvctl: Kvctl, lab: Path) -> None:
    done = kvctl("kv", "export", "alice/chat@*", "--to", "out", "-o", "json")
    assert done.code == 2
    assert "alice/chat@1 and alice/chat@2" in done.error["what"]
    assert not (lab / "out").exists()
    assert kvctl("kv", "export", "alice/chat@1", "alice/chat@1", "--to", "out").code == 0


def test_a_pipe_and_a_broken_link_in_a_folder_of_bundles_are_told(kvctl: Kvctl, lab: Path) -> None:
    assert kvctl("kv", "export", "*/*", "--to", "out").code == 0
    os.mkfifo(lab / "out" / "bob" / "pipe.safetensors")
    (lab / "out" / "bob" / "link.safetensors").symlink_to("none")
    done = kvctl("kv", "import", "out", "-r", "b", "-o", "json")
    assert done.code == 3
    problems = {row["session"]: row["problem"] for row in done.document["sessions"]}
    assert "is no file" in problems["bob/pipe"]
    assert "there is no" in problems["bob/link"]
    assert not problems["bob/other@1"]
    assert kvctl("kv", "push", f"bundle:{lab}/out/bob/pipe.safetensors", "a/b").code == 10


def test_streams_carry_a_session_from_repo_to_repo(kvctl: Kvctl, lab: Path, surroundings: dict[str, str]) -> None:
    script = f'"{PROGRAM}" kv pull alice/chat --into - | "{PROGRAM}" kv push - b:carol/copy --with-tokens'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], env=surroundings, cwd=lab, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert kvctl("kv", "pull", "b:carol/copy", "--into", "bundle:y.safetensors").code == 0
    assert kv_of(lab / "y.safetensors") == kv_of(lab / "0-130.safetensors")


def test_a_bundle_whose_reader_leaves_is_told(lab: Path, surroundings: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [PROGRAM, "kv", "pull", "alice/chat", "--into", "-", "-o", "json"], env=surroundings, cwd=lab, stdout=write,
        stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 10
    assert "the stream cannot be written" in done.stderr
    assert "Exception" not in done.stderr
