"""`scripts/gpu-check`: the program that tests a GPU runs here on the stand-in, and says what stays open."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_runs_the_whole_suite_and_says_what_only_a_gpu_can_show() -> None:
    command = ["--device", "hostdev", "--size", "12MiB", "--rounds", "1", "--stores", "file,node"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_check", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "kvctl.gpu-check/1"
    assert (document["ok"], document["gpu"], document["device"]) == (True, False, "hostdev")
    assert len(document["open"]) == 6
    names = [check["name"] for check in document["checks"]]
    assert {"load from file by file", "load from file by store-get", "load from node by native-tcp"} <= set(names)
    assert {
        "slices of two ranks", "verification and damage", "overlap of reading and copying", "a device without room",
        "two devices at once",
    } <= set(names)  # fmt: skip
    assert ("a slot of the agent" in names) is (find_spec("torch") is not None)
    found = {check["name"]: check for check in document["checks"]}
    assert found["load from node by native-tcp"]["best"]["device"]["staging"] == "host"
    assert found["verification and damage"]["best"]["verified"] == "leaves"


def test_a_gpu_that_was_asked_for_is_not_replaced() -> None:
    import pytest

    torch = pytest.importorskip("torch", reason="the reason comes from torch: pip install 'kvctl[torch]'")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: run `scripts/gpu-check`")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_check", "--device", "cuda:0"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "not available" in done.stderr
