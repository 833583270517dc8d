"""The RDMA part of `kvctl doctor` where a device is: in a guest of the lab with Soft-RoCE."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.fixtures import figure, inside, lab, run_inside, start_guests

__all__ = ["figure", "inside", "lab", "run_inside", "start_guests"]


@pytest.mark.rdma
def test_in_a_guest(run_inside: Callable[..., str]) -> None:
    run_inside("tests/doctor/inside_rdma.py", 120)
