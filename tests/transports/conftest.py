"""A faulty S3 server with one object."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvctl.testing.faulty_s3 import FaultyS3
from tests.transports.s3_reads import DATA


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        server.put("dir/w.bin", DATA)
        yield server
