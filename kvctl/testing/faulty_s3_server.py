"""The HTTP side of the faulty S3 server: takes a request, carries it out, answers it as wrongly as it is told."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from kvctl.testing import s3_protocol as s3

if TYPE_CHECKING:
    from kvctl.testing.faulty_s3 import Fault, FaultyS3

_PIECE: Final = 1 << 18
_OTHER: Final = bytes(255 - byte for byte in range(256))  # every byte becomes another one


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: FaultyS3) -> None:
        self.owner = owner
        self._open: set[socket.socket] = set()
        self._tls: ssl.SSLContext | None = None
        if owner.tls_certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*owner.tls_certificate)
        super().__init__(("127.0.0.1", owner.port), _Handler)

    @property
    def connections(self) -> int:
        """Those that were accepted and have not ended."""
        return len(self._open)

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self._open.add(request)
        super().process_request(request, client_address)

    def finish_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        accepted = request
        try:
            with contextlib.suppress(OSError):  # clients go away: a failed handshake, a reset
                if self._tls is not None:
                    request = self._tls.wrap_socket(request, server_side=True)
                    self._open.add(request)
                try:
                    _Handler(request, client_address, self)
                finally:
                    if self._tls is not None:
                        request.close()
        finally:
            self._open.difference_update({accepted, request})

    def shutdown_request(self, request: object) -> None:
        """Closes at once: a FIN before it would hide a reset."""
        self.close_request(request)  # type: ignore[arg-type] # a socket

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type] # typed for its own handlers

    def end_connections(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(one, socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        return

    def _serve(self) -> None:
        owner = self.server.owner
        self.sent = 0
        self.status = 0
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.bucket, self.key, self.query = self._address()
        self.faults = owner.hit(self.command, self.key)
        # taken before the answer goes out, so that a client that has its answer finds it in the log
        try:
            if fault := self.faults.get("latency"):
                time.sleep(fault.seconds)
            if "hang" in self.faults:
                owner.closing.wait()
                self.close_connection = True
                return
            if "garbage" in self.faults:
                self._log(0, 0)
                self.wfile.write(b"SMTP ready\r\n\r\n")
                self.close_connection = True
                return
            try:
                self._authenticate()
                if fault := self.faults.get("status"):
                    raise s3.RefusalError(fault.status, fault.code, "as the test wants it")
                self._dispatch()
            except s3.RefusalError as refusal:
                extra = {"Region": owner.region} if refusal.status in {301, 400} else {}
                body = b"" if self.command == "HEAD" else s3.error_document(refusal, extra)
                headers = {"x-amz-bucket-region": owner.region} if refusal.status in {301, 400} else {}
                if refusal.status == 416:
                    headers["Content-Range"] = f"bytes */{len(owner.objects[self.bucket, self.key].data)}"
                self._answer(refusal.status, body, headers, document=True)
        except OSError:
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - names of http.server

    def _address(self) -> tuple[str, str, dict[str, str]]:
        parts = urlsplit(f"http://x{self.path}" if self.path.startswith("/") else self.path)
        path = unquote(parts.path).lstrip("/")
        label, _, rest = (self.headers.get("host") or "").partition(".")
        if rest and label in self.server.owner.buckets:
            bucket, key = label, path
        else:
            bucket, _, key = path.partition("/")
        return bucket, key, dict(parse_qsl(parts.query, keep_blank_values=True))

    def _authenticate(self) -> None:
        owner = self.server.owner
        headers = {name.lower(): value for name, value in self.headers.items()}
        if not owner.checksums and any(
            name == "x-amz-trailer" or name.startswith("x-amz-checksum-") or "crc64" in value.lower()
            for name, value in headers.items()
        ):
            raise s3.RefusalError(501, "NotImplemented", "checksums and trailers are not known here")
        if not owner.anonymous:
            s3.check_signature(
                self.command,
                self.path,
                headers,
                access_key=owner.access_key,
                secret_key=owner.secret_key,
                session_token=owner.session_token,
                region=owner.region,
            )
            payload = headers.get("x-amz-content-sha256", "")
            if len(payload) == 64 and hashlib.sha256(self.body).hexdigest() != payload:
                raise s3.RefusalError(400, "XAmzContentSHA256Mismatch", "the body is not the one that was signed")

    def _dispatch(self) -> None:
        owner = self.server.owner
        if self.command == "PUT" and not self.key:
            owner.buckets.add(self.bucket)
            self._answer(200)
        elif self.bucket not in owner.buckets:
            raise s3.RefusalError(404, "NoSuchBucket", "The specified bucket does not exist")
        elif self.command == "POST" and "delete" in self.query:
            self._delete_many()
        elif not self.key:
            self._list() if self.command == "GET" else self._answer(200)
        elif self.command == "PUT":
            self._put()
        elif self.command == "DELETE":
            with owner.lock:
                owner.objects.pop((self.bucket, self.key), None)
            self._answer(204)
        elif self.command in {"GET", "HEAD"}:
            self._get()
        else:
            raise s3.RefusalError(501, "NotImplemented", f"{self.command} {sorted(self.query)}")

    def _put(self) -> None:
        owner = self.server.owner
        if "x-amz-copy-source" in self.headers:
            self._copy()
            return
        with owner.lock:
            old = owner.objects.get((self.bucket, self.key))
            if owner.conditional_put:
                version = (self.headers.get("if-match") or "").strip('"')
                if (self.headers.get("if-none-match") == "*" and old is not None) or (
                    version and (old is None or old.etag != version)
                ):
                    raise s3.RefusalError(412, "PreconditionFailed", "At least one of the preconditions did not hold")
            stored = owner.put(self.key, self.body, self.bucket)
        self._answer(200, headers={"ETag": f'"{stored.etag}"'})

    def _copy(self) -> None:
        owner = self.server.owner
        if not owner.copies:
            raise s3.RefusalError(501, "NotImplemented", "objects are not copied here")
        bucket, _, key = unquote(self.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        version = (self.headers.get("x-amz-copy-source-if-match") or "").strip('"')
        with owner.lock:
            stored = owner.objects.get((bucket, key))
            if stored is None:
                raise s3.RefusalError(404, "NoSuchKey", "The specified key does not exist.")
            if version and version != stored.etag:
                raise s3.RefusalError(412, "PreconditionFailed", "At least one of the preconditions did not hold")
            made = owner.put(self.key, stored.data, self.bucket)
        self._answer(200, s3.copy_document(made), document=True)

    def _get(self) -> None:
        owner = self.server.owner
        with owner.lock:
            if "replace" in self.faults and (old := owner.objects.get((self.bucket, self.key))):
                owner.put(self.key, old.data.translate(_OTHER), self.bucket)
            stored = owner.objects.get((self.bucket, self.key))
        if stored is None:
            raise s3.RefusalError(404, "NoSuchKey", "The specified key does not exist.")
        version = (self.headers.get("if-match") or "").strip('"')
        if owner.conditional_get and version and version != stored.etag:
            raise s3.RefusalError(412, "PreconditionFailed", "At least one of the preconditions did not hold")
        size = len(stored.data)
        wanted = None if "ignore-range" in self.faults else s3.parse_range(self.headers.get("range"), size)
        headers = {
            "ETag": f'"{stored.etag}"',
            "Last-Modified": stored.modified.strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "Accept-Ranges": "bytes",
        }
        if wanted is None:
            self._answer(200, stored.data, headers)
            return
        start, end = wanted
        shift = fault.amount if (fault := self.faults.get("wrong-range")) else 0
        total = size + (fault.amount if (fault := self.faults.get("wrong-total")) else 0)
        headers["Content-Range"] = f"bytes {start + shift}-{end - 1 + shift}/{total}"
        self._answer(206, memoryview(stored.data)[start:end], headers)

    def _list(self) -> None:
        owner = self.server.owner
        prefix = self.query.get("prefix", "")
        after = unquote(self.query.get("continuation-token", "")) or self.query.get("start-after", "")
        count = min(owner.page_size, int(self.query.get("max-keys", "1000")))
        with owner.lock:
            found = sorted(
                (key for bucket, key in owner.objects if bucket == self.bucket and key.startswith(prefix)),
                key=lambda key: key.encode(),
            )
            rest = [key for key in found if key.encode() > after.encode()]
            page = [(key, owner.objects[self.bucket, key]) for key in rest[:count]]
        following = page[-1][0] if len(rest) > count else None
        document = s3.list_document(self.bucket, prefix, page, following=following, page_size=count)
        self._answer(200, document, document=True)

    def _delete_many(self) -> None:
        owner = self.server.owner
        if "content-md5" not in self.headers and not any(name.startswith("x-amz-checksum") for name in self.headers):
            raise s3.RefusalError(400, "InvalidRequest", "Missing required header for this request: Content-MD5")
        keys = s3.parse_delete(self.body)
        with owner.lock:
            for key in keys:
                owner.objects.pop((self.bucket, key), None)
        self._answer(200, s3.delete_document(keys), document=True)

    def _log(self, status: int, sent: int) -> None:
        self.server.owner.record(
            self.command,
            self.bucket,
            self.key,
            self.headers.get("range"),
            status,
            sent,
            len(self.body),
            self.headers.get("host") or "",
            urlsplit(self.path).query,
            self.headers.get("if-match") or self.headers.get("if-none-match"),
        )

    def _answer(
        self,
        status: int,
        body: bytes | memoryview = b"",
        headers: dict[str, str] | None = None,
        *,
        document: bool = False,
    ) -> None:
        """Send an answer; the body faults apply to objects, not to documents."""
        if "drop" in self.faults:
            self._log(status, 0)
            self.close_connection = True
            return
        head_only = self.command == "HEAD"
        faults = {} if document or head_only or status >= 300 else self.faults
        announced = len(body)
        if fault := faults.get("short"):
            body = body[: max(0, announced - fault.amount)]
            announced = len(body)
        if fault := faults.get("overlong"):
            body = bytes(body) + bytes(fault.amount)
            announced = len(body)
        if fault := faults.get("extra"):
            body = bytes(body) + bytes(fault.amount)
        cut = next((faults[kind] for kind in ("reset", "truncate") if kind in faults), None)
        if cut is not None:
            body = body[: cut.after]
        self._log(status, 0 if head_only else len(body))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "chunked" in faults:
            self.send_header("Transfer-Encoding", "chunked")
            body = b"%x\r\n" % len(body) + bytes(body) + b"\r\n0\r\n\r\n"
        elif status != 204:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        if not head_only:
            self._send(memoryview(body), faults.get("slow"))
        if cut is not None or "extra" in faults:
            self._cut(reset=cut is not None and cut.kind == "reset")

    def _send(self, body: memoryview, slow: Fault | None) -> None:
        piece = _PIECE if slow is None else max(1, int(slow.rate / 20))
        for start in range(0, len(body), piece):
            self.wfile.write(body[start : start + piece])
            if slow is not None:
                time.sleep(len(body[start : start + piece]) / slow.rate)

    def _cut(self, *, reset: bool) -> None:
        self.close_connection = True
        if reset:  # a zero linger makes close send RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
