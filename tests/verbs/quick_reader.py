"""Reads pieces of one object over native-rdma, one after another and several at once, and checks every byte: for
tests with the node in another guest. Usage: quick_reader URL KEY_FILE OBJECT SIZE SEED
"""

from __future__ import annotations

import random
import sys

from kvctl.core.addresses import StoreConfig
from kvctl.memory.buffers import HostBuffer
from kvctl.transports.api import Op, Status
from kvctl.transports.registry import choose, open_store, open_transports


def main(url: str, key_file: str, key: str, size: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    config = StoreConfig(url, (), {"key_file": key_file})
    store = open_store(config)
    [transport] = open_transports(config, store, choose("node", "host", "native-rdma"), {"threads": "4"})
    buffer = HostBuffer(size)
    registration = transport.register(buffer)
    step = 150_001
    for at_once in (1, 16):
        buffer.view[:] = bytes(size)
        ops = [Op(at, "read", key, at, min(step, size - at), buffer, at, None, size) for at in range(0, size, step)]
        for start in range(0, len(ops), at_once):
            transport.submit(ops[start : start + at_once])
            left = len(ops[start : start + at_once])
            while left:
                for done in transport.poll(60):
                    assert done.status is Status.DONE, done.error
                    left -= 1
        assert buffer.view == data
    registration.close()
    transport.close()
    store.close()
    print(f"{2 * len(ops)} reads are right")


if __name__ == "__main__":
    _, url, key_file, key, size, seed = sys.argv
    main(url, key_file, key, int(size), int(seed))
