"""A host that is not as it should be: no home, no current directory, broken state, limits of the process."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvctl.cli.errors import as_kvctl_error
from kvctl.cli.state import state_dir
from kvctl.core.errors import EnvError
from kvctl.testing.models import LlamaShape, write_llama
from tests.cli.program import PROGRAM, Done, Kvctl


def program(*args: object, env: Mapping[str, str], cwd: Path, before: Callable[[], None] | None = None) -> Done:
    done = subprocess.run(
        [PROGRAM, *map(str, args)], env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=before,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(str(tmp_path / "model"), LlamaShape(), shards=8)
    return tmp_path / "model"


def test_a_user_without_a_home_gets_no_folder_called_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user that the host does not know
    with pytest.raises(EnvError, match="no home"):
        state_dir({})
    assert state_dir({"KVCTL_STATE_DIR": "/somewhere"}) == "/somewhere"


def test_a_current_directory_that_is_gone(tmp_path: Path, surroundings: dict[str, str], model: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    there = surroundings | {"PWD": str(gone)}

    def removed() -> None:
        os.rmdir(gone)

    for args, code in ((("load-weights", model), 0), (("--help",), 0), (("load-weights", "./m"), 10)):
        gone.mkdir(exist_ok=True)
        done = program(*args, env=there, cwd=gone, before=removed)
        assert done.code == code, done.err
        assert "crash" not in done.err


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "1", "[" * 100_000, '{"schema": 1}', '{"schema": "kvctl.report/1"}', "\xff"]
)
def test_a_saved_report_that_is_none_is_told(kvctl: Kvctl, tmp_path: Path, text: str) -> None:
    place = tmp_path / "state" / "reports"
    place.mkdir(parents=True)
    (place / "20260101T000000.000Z-x-1111.json").write_bytes(text.encode("latin-1"))
    done = kvctl("report")
    assert done.code == 7, done.err
    assert "is no report" in done.err or "cannot be shown" in done.err


def test_few_descriptors_are_no_crash(tmp_path: Path, surroundings: dict[str, str], model: Path) -> None:
    for most in (8, 12, 20):

        def limit(most: int = most) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

        done = program(
            "load-weights", model, "--into", "dir:out", "-o", "json", env=surroundings, cwd=tmp_path, before=limit
        )
        assert done.code in {0, 10}, (most, done.code, done.err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), 10),
        (FileNotFoundError(errno.ENOENT, "gone", "x"), 4),
        (OSError(errno.ELOOP, "loop", "x"), 10),
        (OSError(errno.ENAMETOOLONG, "long", "x"), 10),
        (OSError(errno.EIO, "disk", "x"), 10),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 6),
        (RuntimeError("can't start new thread"), 9),
        (MemoryError(), 9),
        (ImportError("libx.so: failed to map segment from shared object"), 10),
        (UnicodeError("encoding with 'idna' codec failed (UnicodeError: label too long)"), 2),
        (UnicodeEncodeError("utf-8", "caf\udce9", 3, 4, "surrogates not allowed"), 2),
    ],
    ids=repr,
)
def test_what_the_system_says_has_an_exit_code_that_people_can_act_on(error: BaseException, code: int) -> None:
    known = as_kvctl_error(error)
    assert known is not None
    assert known.exit_code == code
    json.dumps(known.details)


def test_what_only_a_bug_explains_stays_one() -> None:
    assert as_kvctl_error(OSError(errno.EBADF, "bad")) is None
    assert as_kvctl_error(RuntimeError("x")) is None
