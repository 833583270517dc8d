"""A process that publishes memory, run by the tests: `python source_child.py PORT [KEY]`. It tells its URL on stdout,
and publishes again for each line on stdin; it ends with it.
"""

from __future__ import annotations

import sys

from kvctl.memory.buffers import HostBuffer
from kvctl_nixl.peer.source import Source

SIZE = 8 << 20
PATTERN = bytes(range(1, 252))


def content() -> bytes:
    return (PATTERN * (SIZE // len(PATTERN) + 1))[:SIZE]


def main() -> None:
    buffer = HostBuffer(SIZE)
    buffer.view[:] = content()
    key = sys.argv[2].encode() if len(sys.argv) > 2 else b""
    with Source(port=int(sys.argv[1]), key=key) as source:
        source.publish("model/a", buffer)
        source.publish("model/b", buffer, 1000, 5000)
        sys.stdout.write(f"{source.url}\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            source.publish("model/a", buffer)
            sys.stdout.write("again\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
