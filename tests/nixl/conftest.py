"""Tests of the NIXL plug-in run on the real NIXL; without it they are skipped, saying how to get it."""

from __future__ import annotations

import pytest

from kvctl_nixl.probes import INSTALL, probe_nixl


@pytest.fixture(scope="session", autouse=True)
def _needs_nixl() -> None:
    found = probe_nixl()
    if not found.available:
        pytest.skip(f"needs NIXL ({found.reason}): {INSTALL}")
