"""A fast static server: files of a folder under /BUCKET/, by sendfile. It speaks as much S3 as a reader needs.

GET and HEAD with `Range` and `If-Match`, ListObjectsV2 in one page; path-style; signatures are ignored. One process
per connection, so that the server has no interpreter lock to share. Usage: static_server.py FOLDER BUCKET; prints
its port. Ends with its standard input.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_RANGE = re.compile(r"bytes=(\d+)-(\d*)$")


def main() -> None:
    folder, bucket = sys.argv[1], sys.argv[2]
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
            _Connection(connection, folder, bucket).serve()
        finally:
            os._exit(0)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


class _Connection:
    def __init__(self, connection: socket.socket, folder: str, bucket: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._folder = folder
        self._bucket = f"/{bucket}"
        self._pending = b""
        self._files: dict[str, int] = {}

    def serve(self) -> None:
        while (request := self._request()) is not None:
            method, target, headers = request
            parts = urlsplit(target)
            path = unquote(parts.path)
            if path.rstrip("/") == self._bucket:
                self._list(parse_qs(parts.query).get("prefix", [""])[0])
            else:
                self._object(method, path.removeprefix(f"{self._bucket}/"), headers)

    def _request(self) -> tuple[str, str, Mapping[str, str]] | None:
        while b"\r\n\r\n" not in self._pending:
            block = self._socket.recv(65536)
            if not block:
                return None
            self._pending += block
        head, _, self._pending = self._pending.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        return method, target, {name.lower(): value.strip() for name, _, value in pairs}

    def _object(self, method: str, key: str, headers: Mapping[str, str]) -> None:
        fd = self._files.get(key)
        if fd is None:
            try:
                fd = self._files[key] = os.open(os.path.join(self._folder, key), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._answer("404 Not Found", b"" if method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>")
                return
        status = os.fstat(fd)
        etag = _etag(status)
        if headers.get("if-match", etag) not in {etag, "*"}:
            self._answer("412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        start, end, line = 0, status.st_size, "200 OK"
        extra = f"ETag: {etag}\r\nLast-Modified: {formatdate(status.st_mtime, usegmt=True)}\r\nAccept-Ranges: bytes\r\n"
        asked = _RANGE.match(headers.get("range", ""))
        if asked is not None:
            start = int(asked[1])
            end = min(status.st_size, int(asked[2]) + 1) if asked[2] else status.st_size
            line = "206 Partial Content"
            extra += f"Content-Range: bytes {start}-{end - 1}/{status.st_size}\r\n"
        head = f"HTTP/1.1 {line}\r\nContent-Length: {end - start}\r\n{extra}\r\n"
        more = socket.MSG_MORE if method == "GET" and end > start else 0
        self._socket.sendall(head.encode(), more)
        while method == "GET" and start < end:
            sent = os.sendfile(self._socket.fileno(), fd, start, end - start)
            if sent == 0:
                return
            start += sent

    def _list(self, prefix: str) -> None:
        entries = []
        for root, _, names in os.walk(os.path.join(self._folder, os.path.dirname(prefix))):
            for name in names:
                path = os.path.join(root, name)
                key = os.path.relpath(path, self._folder)
                if key.startswith(prefix):
                    entries.append((key, os.stat(path)))
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(status.st_mtime)}</LastModified>"
            f"<ETag>{escape(_etag(status))}</ETag><Size>{status.st_size}</Size></Contents>"
            for key, status in sorted(entries)
        )
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{escape(self._bucket[1:])}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(entries)}"
            f"</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        )
        self._answer("200 OK", text.encode())

    def _answer(self, status: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)


def _etag(status: os.stat_result) -> str:
    return f'"{status.st_size:x}-{status.st_mtime_ns:x}"'


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


if __name__ == "__main__":
    main()
