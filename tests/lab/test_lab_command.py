"""scripts/rdma-lab as a program: its exit codes, what it passes on, what it ends."""

from __future__ import annotations

import lzma
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from scripts.rdma_lab.places import Lab
from scripts.rdma_lab.running import Trigger
from tests.lab.fixtures import ROOT

PROGRAM = str(ROOT / "scripts/rdma-lab")


@pytest.fixture
def environment(lab: Lab) -> dict[str, str]:
    """Of the program, which finds the lab that the fixture made ready, wherever the user keeps it."""
    cache = {"KVCTL_RDMA_LAB_CACHE": str(lab.python_path.parents[4]), "KVCTL_RDMA_LAB_KERNEL": str(lab.kernel)}
    return {**os.environ, **cache}


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_command_has_its_own_status_and_streams(environment: dict[str, str]) -> None:
    done = _run(environment, "run", "--env", "WORD=two words", "--", "sh", "-c", 'echo "$WORD"; echo bad >&2; exit 3')
    assert (done.returncode, done.stdout, done.stderr) == (3, "two words\n", "bad\n")


def test_what_takes_too_long_is_ended(environment: dict[str, str]) -> None:
    done = _run(environment, "run", "--timeout", "1", "--", "sleep", "1000")
    assert done.returncode == 124
    assert "not done after 1 s" in done.stderr


def test_guests_see_each_other_until_one_is_done(environment: dict[str, str]) -> None:
    done = _run(
        environment, "guests", "--until", "b", "--when", "now=kill:a",
        "a=echo up >/lab/a; sleep 1000",
        "b=until [ -e /lab/a ]; do sleep .1; done; touch /lab/now; echo found $(cat /lab/a) by $LAB_GUEST; exit 4",
    )  # fmt: skip
    assert done.returncode == 4
    assert "[b] found up by b\n" in done.stdout


def test_two_that_prepare_at_once_make_one_kernel(environment: dict[str, str], tmp_path: Path, lab: Lab) -> None:
    packed = tmp_path / "linux.xz"
    packed.write_bytes(lzma.compress(lab.kernel.read_bytes(), preset=0))
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "pyverbs").symlink_to(lab.python_path.parents[3])
    settings = {**environment, "KVCTL_RDMA_LAB_CACHE": str(cache), "KVCTL_RDMA_LAB_KERNEL": str(packed)}
    both = [subprocess.Popen([PROGRAM, "prepare"], env=settings, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all("PORT_ACTIVE" in text for text in said)
    assert len(list(cache.glob("linux-xz-*"))) == 1


def test_a_kernel_that_is_none_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    done = _run({**environment, "KVCTL_RDMA_LAB_KERNEL": str(tmp_path / "none")}, "run", "true")
    assert done.returncode == 10
    assert done.stderr == f"error: KVCTL_RDMA_LAB_KERNEL names {tmp_path / 'none'}, which is no file\n"


def test_nothing_is_left_of_a_lab_whose_parent_was_killed(environment: dict[str, str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [PROGRAM, "run", "--", "sh", "-c", f"echo running; sleep 1000 # {tmp_path}"],
        env={**environment, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == b"running\n"
    assert _mentioned(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while _mentioned(tmp_path):
        assert time.monotonic() < deadline, _mentioned(tmp_path)
        time.sleep(0.1)


def _mentioned(path: Path) -> list[int]:
    """Processes whose command line names `path`: a kernel is told its folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it ended meanwhile
            if str(path).encode() in line and line.startswith(b"timeout"):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("text", ["", "x", "x=kill", "x=kill:c", "x=melt:a", "a/b=kill:a", "x=lose:a:much"])
def test_a_trigger_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"want FILE=ACTION:NAME|could not convert"):
        Trigger.parse(text, ("a", "b"))


def test_triggers() -> None:
    assert Trigger.parse("now=lose:b:2.5", ("a", "b")) == Trigger("now", "lose", "b", 2.5)
    assert Trigger.parse("x=down:a", ("a",)) == Trigger("x", "down", "a", 0.0)
