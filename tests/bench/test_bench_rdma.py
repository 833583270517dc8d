"""The RDMA part of `bench paths`: in a guest of the lab with Soft-RoCE, and what is said where there is no device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvctl.bench import bare_rdma
from tests.lab.fixtures import figure, inside, lab, run_inside, start_guests

__all__ = ["figure", "inside", "lab", "run_inside", "start_guests"]


@pytest.mark.rdma
def test_in_a_guest(run_inside: Callable[..., str]) -> None:
    run_inside("tests/bench/inside_rdma.py", 240)


def test_without_a_device_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare_rdma, "_SYS", "/no/such/folder")
    assert bare_rdma.why_not() == "no active RDMA port with a GID"
