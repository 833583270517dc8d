"""native-rdma and the node's engine over Soft-RoCE: each file runs in a guest of the lab. (Its contract: tests/lab.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.rdma


@pytest.mark.parametrize("file", ["inside_strangers.py", "inside_faults.py"])
def test_inside_a_guest(run_inside: Callable[..., str], file: str) -> None:
    run_inside(f"tests/verbs/{file}", 200)
