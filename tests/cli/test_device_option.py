"""`load-weights --device`: where weights land, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import Kvctl


def test_the_stand_in_is_measured_and_the_report_names_the_way(kvctl: Kvctl, model: Path) -> None:
    done = kvctl("load-weights", "./model", "--device", "hostdev", "-o", "json")
    assert done.code == 0, done.err
    document = done.document
    assert document["target"] == "hostdev"
    assert document["extra"]["device"]["staging"] == "host"
    assert document["bytes"] == document["fetched"] > 0
    shown = kvctl("load-weights", "./model", "--device", "hostdev")
    assert "name hostdev, staging host, slots" in shown.out


def test_a_gpu_that_is_not_there_is_an_error_not_a_fallback(kvctl: Kvctl, model: Path) -> None:
    torch = pytest.importorskip("torch", reason="the reason comes from torch: pip install 'kvctl[torch]'")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: `scripts/gpu-check` tests it")
    done = kvctl("load-weights", "./model", "--device", "cuda:0", "-o", "json")
    assert (done.code, done.out) == (10, "")
    assert "not available" in done.error["what"]


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:0:1", "cuda:3-1"])
def test_a_name_that_means_nothing_is_a_usage_error(kvctl: Kvctl, model: Path, device: str) -> None:
    done = kvctl("load-weights", "./model", "--device", device, "-o", "json")
    assert done.code == 2
    assert "cuda" in str(done.error["hint"])


def test_files_are_not_on_a_device(kvctl: Kvctl, model: Path) -> None:
    done = kvctl("load-weights", "./model", "--device", "hostdev", "--into", "dir:./out", "-o", "json")
    assert done.code == 2
    assert "keeps weights in host memory or files" in done.error["what"]


def test_several_devices_take_a_rank_each(kvctl: Kvctl, model: Path) -> None:
    done = kvctl("load-weights", "./model", "--device", "hostdev:0-1", "--tp-size", "2", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["target"] == "hostdev:0-1"
    done = kvctl("load-weights", "./model", "--device", "hostdev:0-1", "-o", "json")
    assert done.code == 2
    assert "--tp-size 2" in done.error["hint"]
