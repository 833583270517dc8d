"""The least a server can do: `python -m kvctl.testing.bare_server FILE` answers ranged GETs of one file by sendfile, on
a free loopback port, and nothing else. The ceiling that `kvctl bench paths` measures a loopback endpoint against.

Says its port, then the pid of each connection's process as it is accepted, a line each. A process per connection, so
that no interpreter lock is shared. Ends with its standard input.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from typing import Final

_RANGE: Final = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)\r\n", re.IGNORECASE)
_HEAD_LIMIT: Final = 65536


def main() -> int:
    os.setpgrp()
    file = os.open(sys.argv[1], os.O_RDONLY | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        _say(listener.getsockname()[1])
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        while True:
            connection, _ = listener.accept()
            child = os.fork()
            if child:
                connection.close()
                _say(child)
                continue
            listener.close()
            try:
                _serve(connection, file)
            finally:
                os._exit(0)


def _say(number: int) -> None:
    os.write(1, f"{number}\n".encode())


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _serve(connection: socket.socket, file: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = b""
    while True:
        while b"\r\n\r\n" not in head:
            block = connection.recv(_HEAD_LIMIT)
            if not block or len(head) > _HEAD_LIMIT:
                return
            head += block
        asked, _, head = head.partition(b"\r\n\r\n")
        found = _RANGE.search(asked + b"\r\n")
        if found is None:
            return
        start, last = int(found[1]), int(found[2])
        answer = f"HTTP/1.1 206 Partial Content\r\ncontent-length: {last - start + 1}\r\n\r\n"
        connection.send(answer.encode(), socket.MSG_MORE)
        while start <= last:
            sent = os.sendfile(connection.fileno(), file, start, last - start + 1)
            if not sent:
                return
            start += sent


if __name__ == "__main__":
    sys.exit(main())
