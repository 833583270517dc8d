"""The gate before the API server: while it is closed, requests that would make the engine run wait in line. When
nothing serves behind it, /health answers 503, so that whoever watches sends requests elsewhere, or restarts the engine.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, Final

from starlette.responses import PlainTextResponse

HEADER: Final = b"x-kvctl-pass"
HEALTH: Final = ("/health", "/ping")
OPEN_PATHS: Final = ("/v1/kvctl/", *HEALTH, "/metrics", "/v1/models", "/version")


class Gate:
    """`waiting`: requests in line. `token`: whoever shows it in the header X-Kvctl-Pass goes through. `broken`: why
    nothing serves; empty while something does, or will in a moment.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.token = ""
        self.waiting = 0
        self.broken = ""

    def close(self, token: str = "") -> None:
        self.token = token
        self._open.clear()

    def open(self) -> None:
        self.token = self.broken = ""
        self._open.set()

    def give_up(self, why: str) -> None:
        """Closed, for all, until `open`."""
        self.close()
        self.broken = why

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
                    if gate.broken and scope["path"] in HEALTH:
                        await PlainTextResponse(f"{gate.broken}\n", 503)(scope, receive, send)
                        return
                    await gate.through(scope["path"], scope["headers"])
                await self.app(scope, receive, send)

        return Middleware
