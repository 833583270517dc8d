"""Every test of this folder runs guests; see scripts/rdma-lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.fixtures import figure, inside, lab, pair, run_inside, start_guests

__all__ = ["figure", "inside", "lab", "pair", "run_inside", "start_guests"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.rdma)
