"""The transport contract on the NIXL transports that run without special hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.testing.transport_contract import TransportCase, TransportContract
from tests.nixl.cases import transport_case
from tests.transports.contract_cases import file_case


class TestNixlPosix(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "nixl-posix")


class TestNixlPosixAio(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "nixl-posix", api="aio")


class TestNixlPosixDirect(TransportContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> TransportCase:
        return transport_case(file_case(tmp_path / "store"), "nixl-posix", direct="true", chunk="4096")
