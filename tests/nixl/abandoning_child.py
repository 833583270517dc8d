"""A client that gives up on a read in flight, frees its buffer, watches that memory, and exits: run by the tests."""

from __future__ import annotations

import ctypes
import json
import sys
import time

from kvctl.core.addresses import StoreConfig
from kvctl.memory.buffers import HostBuffer
from kvctl.transports.api import Completion, Op
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl_nixl.quarantine import QUARANTINE

SIZE = 1_000_000


def filled(address: int) -> int:
    return SIZE - ctypes.string_at(address, SIZE).count(0)


def main(endpoint: str) -> None:
    config = StoreConfig("s3://bucket/pre", (endpoint,))
    (transport,) = open_transports(
        config, open_store(config), choose("s3", "host", "nixl-obj"), {"deadline": "1", "threads": "1"}
    )
    buffer = HostBuffer(SIZE)
    address = buffer.address
    transport.submit([Op(1, "read", "k", 0, SIZE, buffer)])
    done: list[Completion] = []
    while not done:
        done = transport.poll(10)
    kept = len(QUARANTINE)
    transport.close()
    buffer.close()  # what a load does at its end: the memory must stay mapped all the same
    before = filled(address)
    deadline = time.monotonic() + 60
    while filled(address) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.stdout.write(json.dumps([done[0].status.value, str(done[0].error), kept, filled(address) > before]))


if __name__ == "__main__":
    main(sys.argv[1])
