"""A storage node written from `kvctl help nodes` alone, on Python's http.server: it shares no code with ours. Objects
are in memory. Tokens are checked with what tests/node/rawhttp.py builds from the specification.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from tests.node.rawhttp import Key

MASTER = "kvctl-node-master.v1." + "5a" * 32


@dataclass
class Objects:
    """Key to (bytes, version, moment), and temp files by id; `requests` as they came: method, key, range."""

    found: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)
    uploads: dict[str, tuple[str, float]] = field(default_factory=dict)
    nonces: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    count: int = 0

    def put(self, key: str, data: bytes) -> str:
        with self.lock:
            self.count += 1
            self.found[key] = (data, f"v{self.count}", time.time())
            return f"v{self.count}"


class PublicNode(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects = Objects()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self.thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def end(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may go away at any time."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: PublicNode

    def log_message(self, *_: object) -> None:
        return

    def refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.say(status, json.dumps({"code": code, "message": code}).encode(), headers)

    def say(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def is_allowed(self, need: str, key: str, *, folder: bool = False) -> bool:
        token = self.headers.get("x-kvctl-token", "")
        try:
            version, key_id, expiry, nonce, scope, _ = token.split(".")
            rights, encoded = scope.split(":")
            prefix = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
        except ValueError:
            self.refuse(401, "token_missing")
            return False
        known = Key.derived(MASTER, rights, prefix)
        again = known.token(
            self.command, self.path, span=self.headers.get("range", ""), if_match=self.headers.get("if-match", ""),
            if_none_match=self.headers.get("if-none-match", ""), expiry=int(expiry), nonce=nonce,
        )  # fmt: skip
        inside = key.startswith(f"{prefix}/") if folder and prefix else not prefix or f"{key}/".startswith(f"{prefix}/")
        objects = self.server.objects
        if version != "v1" or key_id != known.key_id or not hmac.compare_digest(again, token):
            self.refuse(401, "token_forged")
        elif not time.time() < int(expiry) <= time.time() + 600:
            self.refuse(401, "token_expired")
        elif (need == "rw" and rights != "rw") or not inside:
            self.refuse(403, "scope")
        elif need == "rw" and nonce in objects.nonces:
            self.refuse(401, "token_replayed")
        else:
            objects.nonces.add(nonce)
            return True
        return False

    def serve(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        objects = self.server.objects
        with objects.lock:
            if path == "/v1/":
                self.folder({name: values[0] for name, values in parse_qs(parts.query, True).items()})
                return
            key = path.removeprefix("/v1/")
            objects.requests.append((self.command, key, self.headers.get("range", "")))
            if not self.is_allowed("rw" if self.command in {"PUT", "DELETE"} else "ro", key):
                return
            present = objects.found.get(key)
            wanted = self.headers.get("if-match", "").strip('"')
            if wanted and (present is None or present[1] != wanted) and (present or self.command != "GET"):
                self.refuse(412, "conflict")
            elif self.command == "PUT":
                if self.headers.get("if-none-match") == "*" and present is not None:
                    self.refuse(412, "conflict")
                else:
                    version = objects.put(key, body)
                    self.say(200, b"", {"etag": f'"{version}"', "last-modified": formatdate(usegmt=True)})
            elif self.command == "DELETE":
                objects.found.pop(key, None)
                self.say(204)
            elif present is None:
                self.refuse(404, "not_found")
            else:
                self.read(*present)

    do_GET = do_HEAD = do_PUT = do_DELETE = serve

    def read(self, data: bytes, version: str, moment: float) -> None:
        about = {"etag": f'"{version}"', "last-modified": formatdate(moment, usegmt=True)}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if self.command == "HEAD":
            self.say(200, b"", about, len(data))
        elif span is None:
            self.say(200, data, about)
        elif int(span[1]) >= len(data):
            self.refuse(416, "size", {"content-range": f"bytes */{len(data)}"})
        else:
            first = int(span[1])
            part = data[first : int(span[2]) + 1 if span[2] else None]
            last = first + len(part) - 1
            self.say(206, part, about | {"content-range": f"bytes {first}-{last}/{len(data)}"})

    def folder(self, query: dict[str, str]) -> None:
        objects = self.server.objects
        if self.command == "DELETE":
            if self.is_allowed("rw", query["upload"]):
                objects.uploads.pop(query["upload"], None)
                self.say(204)
            return
        prefix = query.get("prefix", "")
        if not self.is_allowed("ro", prefix, folder=True):
            return
        if "uploads" in query:
            found = [
                {"id": name, "key": key, "started": _iso(moment)} for name, (key, moment) in objects.uploads.items()
            ]
            self.say(200, json.dumps({"uploads": found}).encode())
            return
        after, limit = query.get("after", "").encode(), int(query.get("limit", "1000"))
        keys = sorted((key for key in objects.found if key.startswith(prefix)), key=str.encode)
        rest = [key for key in keys if key.encode() > after]
        listed = []
        for key in rest[:limit]:
            data, version, moment = objects.found[key]
            listed.append({"key": key, "size": len(data), "version": version, "modified": _iso(moment)})
        self.say(200, json.dumps({"objects": listed, "more": len(rest) > limit}).encode())


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()
