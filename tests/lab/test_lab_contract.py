"""What every transport promises, asked of native-rdma in a guest."""

from __future__ import annotations

from collections.abc import Callable


def test_native_rdma_keeps_the_contract(run_inside: Callable[..., str]) -> None:
    run_inside("tests/verbs/inside_contract.py", 240)
