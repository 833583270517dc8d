"""A server of the public RDMA object protocol that shares nothing with our node: http.server, and pyverbs' own
connection manager. Objects are files of a folder.

    python stranger_server.py FOLDER IP PORT [MODE]

MODE `honest`; `s3`: the same for signed requests to a bucket, with the token in `x-rdma-info`; `overrun`: writes 16 KiB
more than were asked for; `late`: does not answer before the file `go` appears beside the folder, then tries to
write all the same, and notes in `late` how that went; `body`: ignores the token and sends a body; `short`: places and
announces one byte less.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SIGNALED, RC, SUCCESS, TCP = 2, 2, 0, 0x106
FOLDER, IP, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3])
MODE = sys.argv[4] if len(sys.argv) > 4 else "honest"


class Link:
    """A connection to one client's listener."""

    def __init__(self, ip: str, port: str) -> None:
        from pyverbs.cmid import CMID, AddrInfo, ConnParam
        from pyverbs.qp import QPCap, QPInitAttr

        where = AddrInfo(dst=ip, dst_service=port, port_space=TCP)
        cap = QPCap(max_send_wr=4, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self.cmid: Any = CMID(creator=where, qp_init_attr=QPInitAttr(qp_type=RC, cap=cap, sq_sig_all=1))
        self.cmid.connect(ConnParam(resources=16, depth=16, retry=3, rnr_retry=7))

    def move(self, data: bytes | None, size: int, address: int, rkey: int) -> bytes | None:
        """WRITE `data`, or READ `size` bytes. None when the other end did not let it."""
        from pyverbs.mr import MR

        memory = MR(self.cmid.pd, max(size, 1), 1 | 2 | 4)
        view = (ctypes.c_char * size).from_address(memory.buf)
        if data is not None:
            ctypes.memmove(memory.buf, data, size)
            self.cmid.post_write(memory, size, address, rkey, SIGNALED)
        else:
            self.cmid.post_read(memory, size, address, rkey, SIGNALED)
        found = self.cmid.get_send_comp()
        out = bytes(view) if found is not None and found.status == SUCCESS else None
        memory.close()
        return out


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.links: dict[tuple[str, str], Link] = {}

    def log_message(self, *_: object) -> None:
        return

    def answer(self, status: int, size: int, etag: str = "", span: str = "", body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        if etag:
            self.send_header("ETag", etag)
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        self.wfile.write(body)

    @property
    def file(self) -> str:
        return os.path.join(FOLDER, re.sub("^/(v1|bucket)/", "", self.path).strip("/"))

    @property
    def token(self) -> str:
        return str(self.headers.get("x-rdma-info" if MODE == "s3" else "x-scal-rdma", ""))

    def is_signed(self) -> bool:
        """Whether the signature is what botocore makes of the same request."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        names = re.search("SignedHeaders=([^,]+)", self.headers.get("authorization", ""))
        if names is None:
            return False
        signed = {name: self.headers[name] for name in names[1].split(";")}
        request = AWSRequest(self.command, f"http://{self.headers['host']}{self.path}", headers=signed)
        request.context["timestamp"] = signed["x-amz-date"]
        signer = S3SigV4Auth(Credentials("K", "S"), "s3", "us-east-1")
        canonical = signer.canonical_request(request)
        signature = signer.signature(signer.string_to_sign(request, canonical), request)
        return str(self.headers["authorization"]).endswith(f"Signature={signature}")

    def move(self, data: bytes | None, size: int) -> bytes | None:
        found = re.match(r"(.+):(\d+):0x(\w{16}):0x(\w{8}):0x(\w{8})$", self.token)
        assert found
        ip, port, address, length, rkey = found.groups()
        assert int(length, 16) == (size or int(length, 16))
        place = (ip, port)
        if place not in self.links:
            self.links[place] = Link(ip, port)
        if MODE == "overrun" and data is not None:
            data += b"\xee" * 16384
        size = len(data) if data is not None else int(length, 16)
        return self.links[place].move(data, size, int(address, 16), int(rkey, 16))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if MODE == "s3" and not self.is_signed():
            self.answer(403, 0)
            return
        try:
            with open(self.file, "rb") as file:
                data = file.read()
        except OSError:
            self.answer(404, 0)
            return
        etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        if self.command == "HEAD":
            self.answer(200, len(data), etag)
            return
        first, last = 0, len(data) - 1
        if asked := re.match(r"bytes=(\d+)-(\d+)$", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        part = data[first : last + 1]
        if MODE == "short":
            part, last = part[:-1], last - 1
        span = f"bytes {first}-{last}/{len(data)}"
        if not self.token or MODE == "body":
            self.answer(206, len(part), etag, span, part)
            return
        if MODE == "late":
            beside = os.path.dirname(FOLDER)
            while not os.path.exists(os.path.join(beside, "go")):
                time.sleep(0.02)
            try:
                went = "written" if self.move(part, 0) is not None else "refused"
            except Exception as problem:
                went = f"refused: {problem}"
            with open(os.path.join(beside, "late.new"), "w") as out:
                out.write(went)
            self.close_connection = True
            os.rename(os.path.join(beside, "late.new"), os.path.join(beside, "late"))
            return
        if self.move(part, 0) is None:
            self.links.clear()
            self.answer(500, 0)
        else:
            self.answer(206, 0, etag, span)

    def do_PUT(self) -> None:
        if MODE == "s3" and not self.is_signed():
            self.answer(403, 0)
            return
        data = self.move(None, 0) if self.token else self.rfile.read(int(self.headers["Content-Length"]))
        if data is None:
            self.answer(500, 0)
            return
        temp = f"{self.file}.{threading.get_ident()}"
        os.makedirs(os.path.dirname(temp), exist_ok=True)
        with open(temp, "wb") as file:
            file.write(data)
        os.replace(temp, self.file)
        self.answer(200, 0)


if __name__ == "__main__":
    server = ThreadingHTTPServer((IP, PORT), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
