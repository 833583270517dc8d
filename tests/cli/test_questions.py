"""Questions to a person at a terminal: the answer counts, and a signal ends the run there and then."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.testing.models import LlamaShape, write_llama
from tests.cli.inside import program_inside
from tests.cli.program import PROGRAM, Done, Kvctl


@pytest.fixture
def kvctl(tmp_path: Path) -> Kvctl:
    """A repo with a model in it."""
    run = program_inside(tmp_path)
    write_llama(str(tmp_path / "model"), LlamaShape(layers=1))
    assert run("repo", "init", "-r", "./a").code == 0
    assert run("push-weights", "./model", "m", "-r", "./a").code == 0
    return run


class Asked:
    """`kvctl models rm m` that has put its question to a terminal."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [PROGRAM, "models", "rm", "m", "-r", "./a"], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=folder, env=env, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        assert self.process.stderr is not None
        said = b""
        while b"[y/N]" not in said:
            piece = self.process.stderr.read1(1024)  # type: ignore[attr-defined]  # a buffered reader
            assert piece, said
            said += piece

    def end(self) -> int:
        self.process.communicate(timeout=60)
        os.close(self.terminal)
        return self.process.returncode


@pytest.fixture
def asked(kvctl: Kvctl, tmp_path: Path, surroundings: dict[str, str]) -> Iterator[Asked]:
    found = Asked(tmp_path, surroundings)
    yield found
    if found.process.poll() is None:
        found.process.kill()
        found.process.communicate()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_a_question_ends_the_run_and_nothing_is_done(
    asked: Asked, kvctl: Kvctl, signum: signal.Signals, code: int
) -> None:
    asked.process.send_signal(signum)
    assert asked.end() == code
    assert kvctl("models", "inspect", "m", "-r", "./a").code == 0


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, 4), (b"n\n", 2, 0), (b"\n", 2, 0), (b"\x04", 2, 0)])
def test_an_answer_counts(asked: Asked, kvctl: Kvctl, answer: bytes, code: int, left: int) -> None:
    os.write(asked.terminal, answer)
    assert asked.end() == code
    assert kvctl("models", "inspect", "m", "-r", "./a").code == left


def test_a_run_that_is_aborted_says_so_in_its_form(tmp_path: Path, surroundings: dict[str, str]) -> None:
    """The server takes the request and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [PROGRAM, "load-weights", "s3://b/m", "--endpoint-url", url, "--no-sign-request", "-o", "json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=surroundings,
        )  # fmt: skip
        assert process.stderr is not None
        with server.accept()[0] as peer:
            assert peer.recv(1)
            process.send_signal(signal.SIGTERM)
            assert "stopping" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
    lines = [line for line in err.splitlines() if line.startswith("{")]  # 'aborting' may come before or after
    assert len(lines) == 1, err
    done = Done(process.returncode, out, lines[0])
    assert (done.code, done.out, done.error["code"]) == (143, "", "interrupted")
    assert "kvctl load-weights s3://b/m" in done.error["hint"]
