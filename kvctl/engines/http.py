"""JSON over HTTP to an engine, with kvctl's errors. One connection, one request at a time; bodies land where they are
wanted.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from kvctl.core import errors
from kvctl.core.addresses import split_url
from kvctl.core.errors import (
    AuthError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    SizeMismatchError,
    TransientError,
    UsageError,
)

PATIENCE: Final = 30.0  # seconds without an answer; calls that take longer say so
BY_CODE: Final = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KvctlError) and kind is not errors.InterruptedRunError
}


class EngineClient:
    """`url`: http(s)://HOST:PORT. `api_key`: sent as a bearer token."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = split_url(url, port=True)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/") or parts.username:
            raise UsageError(f"{url!r} is no engine", hint="write engine:http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._headers = {"Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, query: Mapping[str, object] | None = None, *, missing: str = "") -> Any:  # Any: JSON
        return self.call("GET", path, query=query, missing=missing)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float = PATIENCE) -> Any:  # Any: JSON
        return self.call("POST", path, body=body or {}, timeout=timeout)

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: Mapping[str, Any] | None = None,  # Any: JSON
        timeout: float = PATIENCE,
        missing: str = "",
    ) -> Any:  # Any: JSON
        """The JSON answer. `missing`: why there may be no such path. Raises what the engine says, by its code."""
        response = self._ask(method, path, query, body, timeout)
        data = self._rest(response)
        if response.status != 200:
            raise self._problem(response.status, data, path, missing)
        try:
            return json.loads(data) if data else {}
        except ValueError as error:
            raise IncompatibleError(f"the engine at {self.url} answered no JSON to {path}", cause=str(error)) from None

    def read(self, path: str, query: Mapping[str, object], into: memoryview) -> None:
        """A body of bytes, straight into `into`. Raises SizeMismatchError unless it fills it exactly."""
        response = self._ask("GET", path, query, None, PATIENCE)
        if response.status != 200:
            raise self._problem(response.status, self._rest(response), path, "")
        at = 0
        try:
            while at < len(into) and (got := response.readinto(into[at:])):
                at += got
            more = response.read(1)
        except (OSError, http.client.HTTPException) as error:
            raise self._down(error) from error
        if at != len(into) or more:
            self.close()
            raise SizeMismatchError(f"{self.url}{path} gave {at} bytes where {len(into)} were asked for")

    def _ask(
        self, method: str, path: str, query: Mapping[str, object] | None, body: Mapping[str, Any] | None, timeout: float
    ) -> http.client.HTTPResponse:  # Any: JSON
        target = f"{path}?{urlencode(query, doseq=True)}" if query else path
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data is not None else {})
        if method == "POST":
            self.close()  # a kept connection may be closed by now, and a POST is not sent twice
        for attempt in (1, 2):
            fresh = self._connection is None
            try:
                connection = self._connect(timeout)
                connection.request(method, target, data, headers)
                return connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if fresh or attempt == 2:
                    raise self._down(error) from error
        raise AssertionError

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._connection is None:
            if self._tls:
                context = ssl.create_default_context()
                self._connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=context)
            else:
                self._connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        self._connection.timeout = timeout
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout)
        return self._connection

    def _rest(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._down(error) from error

    def _down(self, error: Exception) -> MemberDownError:
        self.close()
        cause = str(error) or type(error).__name__
        return MemberDownError(f"the engine at {self.url} does not answer", cause=cause, hint="is it running?")

    def _problem(self, status: int, data: bytes, path: str, missing: str) -> KvctlError:
        try:
            said = json.loads(data)
            fault = said.get("kvctl_error")
        except (ValueError, AttributeError):
            said, fault = None, None
        if isinstance(fault, Mapping) and fault.get("code") in BY_CODE:
            return BY_CODE[fault["code"]](
                str(fault.get("what")), cause=fault.get("cause"), hint=fault.get("hint"), details=fault.get("details")
            )
        text = data[:300].decode(errors="replace").strip()
        if status in {401, 403}:
            return AuthError(
                f"the engine at {self.url} refused", cause=f"{status} {text}", hint="set KVCTL_ENGINE_API_KEY"
            )
        if status == 404 and missing:
            return IncompatibleError(f"the engine at {self.url} knows nothing of kvctl", cause=missing)
        if status == 404:
            return NotFoundError(f"the engine at {self.url} has no {path}", cause=text or None)
        kind = TransientError if status in {429, 502, 503, 504} else KvctlError
        return kind(f"the engine at {self.url} answered {status} to {path}", cause=text or None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
