"""The gate before the API server: while it is closed, requests that would make the engine run wait in line."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, Final

HEADER: Final = b"x-kvctl-pass"
OPEN_PATHS: Final = ("/v1/kvctl/", "/health", "/metrics", "/v1/models", "/version", "/ping")


class Gate:
    """`waiting`: requests in line. `token`: whoever shows it in the header X-Kvctl-Pass goes through."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.token = ""
        self.waiting = 0

    def close(self, token: str = "") -> None:
        self.token = token
        self._open.clear()

    def open(self) -> None:
        self.token = ""
        self._open.set()

    async def through(self, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Returns when the request may go on."""
        if self._open.is_set() or path.startswith(OPEN_PATHS):
            return
        said = next((value for name, value in headers if name == HEADER), b"")
        if self.token and hmac.compare_digest(said, self.token.encode()):
            return
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1

    def middleware(self) -> type:
        gate = self

        class Middleware:
            """ASGI; Any: its messages."""

            def __init__(self, app: Any) -> None:
                self.app = app

            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                if scope["type"] == "http":
                    await gate.through(scope["path"], scope["headers"])
                await self.app(scope, receive, send)

        return Middleware
