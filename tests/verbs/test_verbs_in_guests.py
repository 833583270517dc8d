"""native-rdma and the node's engine over Soft-RoCE: each file runs in a guest of the lab. (Its contract: tests/lab.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scripts.rdma_lab.guests import Guests

pytestmark = pytest.mark.rdma


@pytest.mark.parametrize("file", ["inside_strangers.py", "inside_faults.py", "inside_windows.py"])
def test_inside_a_guest(run_inside: Callable[..., str], file: str) -> None:
    run_inside(f"tests/verbs/{file}", 400)


def test_inside_a_guest_with_two_rails(start_guests: Callable[..., Guests]) -> None:
    guests = start_guests("a", rails=2)
    command = "python -m pytest -q -s -p no:cacheprovider -o addopts= tests/verbs/inside_rails.py"
    done = guests["a"].run(command, seconds=400)
    assert done.code == 0, f"{done.out}\n{done.err}"[-6000:]
    print(done.out)
