"""The least that a server can do: ranges of one file by sendfile, no HTTP, no checks. What others are measured against.

A request is 16 bytes, offset and length (little endian); the answer is the bytes. One process per connection, blocking.
Usage: bare_server.py FILE; prints its port. Ends with its standard input.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
from typing import Final

REQUEST: Final = struct.Struct("<QQ")


def main() -> None:
    fd = os.open(sys.argv[1], os.O_RDONLY | os.O_CLOEXEC)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    os.setpgrp()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        try:
            _serve(connection, fd)
        finally:
            os._exit(0)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def _serve(connection: socket.socket, fd: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    number = connection.fileno()
    while len(request := connection.recv(REQUEST.size, socket.MSG_WAITALL)) == REQUEST.size:
        start, left = REQUEST.unpack(request)
        while left and (sent := os.sendfile(number, fd, start, left)):
            start += sent
            left -= sent


if __name__ == "__main__":
    main()
