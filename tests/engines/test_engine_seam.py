"""The seam to engines: how one is found, how its errors arrive, and the adapter that `kvctl help engines` shows."""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import (
    AuthError,
    ConflictError,
    EnvError,
    IncompatibleError,
    MemberDownError,
    SizeMismatchError,
    UsageError,
)
from kvctl.engines import registry
from kvctl.engines.api import EngineAdapter, SwapRequest
from kvctl.engines.http import EngineClient

HELP = Path(__file__).resolve().parents[2] / "kvctl" / "help" / "engines.md"


class Toy:
    """The server that the help page's adapter is for. `answers`: path -> (status, JSON) that go before its own."""

    def __init__(self) -> None:
        self.source, self.generation = "first", 1
        self.data = {"first": b"old weights.", "second": b"new weights!"}
        self.answers: dict[str, tuple[int, Any]] = {}
        self.leases: list[float] = []
        self.short = False

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        if path in self.answers:
            return self.answers[path]
        if path == "/v1/kvctl/engine":
            return 200, {
                "schema": "kvctl.engine/1", "engine": "toy", "version": "1", "model": "m", "source": self.source,
                "digest": None, "generation": self.generation,
            }  # fmt: skip
        if path == "/weights":
            return 200, {"generation": self.generation, "digest": None, "tensors": [["w", "U8", [12], 12]]}
        if path == "/bytes":
            if int(query["generation"]) != self.generation:
                return 409, {"kvctl_error": {"code": "conflict", "what": "other weights by now", "cause": "2, not 1"}}
            start = int(query["offset"])
            return 200, self.data[self.source][start : start + int(query["length"]) - self.short]
        if path == "/load":
            self.source, self.generation = body["source"], self.generation + 1
            return 200, {"digest": None, "generation": self.generation, "seconds": 0.25}
        if path == "/lease":
            self.leases.append(body["seconds"])
            return 200, {}
        return 404, {"detail": "Not Found"}


@pytest.fixture
def toy() -> Iterator[tuple[Toy, str]]:
    found = Toy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            status, said = found.answer(self.command, parts.path, dict(parse_qsl(parts.query)), body)
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = handle_any

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The help page's adapter, installed as the module kvctl_toy."""
    (code,) = re.findall(r"```python\n(.*?)```", HELP.read_text(encoding="utf-8"), re.DOTALL)
    module = types.ModuleType("kvctl_toy")
    exec(compile(code, str(HELP), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "kvctl_toy", module)
    entries = EntryPoints([EntryPoint("toy", "kvctl_toy:ENGINE", registry.GROUP)])
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    return str(code)


def test_the_example_is_a_page(example: str) -> None:
    assert len(example.splitlines()) <= 66


def test_the_example_works(toy: tuple[Toy, str], example: str) -> None:
    server, url = toy
    adapter: EngineAdapter = registry.open_engine(url, Context())
    assert adapter.info().source == "first"
    weights = adapter.weights(lease_seconds=5)
    data = bytearray(12)
    for start in (0, 4, 8):
        adapter.read(weights, "w", start, memoryview(data)[start : start + 4])
    assert bytes(data) == server.data["first"]
    adapter.renew(3)
    adapter.release()
    assert server.leases == [3, 0]
    done = adapter.swap(SwapRequest("second"))
    assert (done.state, done.generation, done.paused) == ("serving", 2, 0.25)
    with pytest.raises(ConflictError, match="other weights by now: 2, not 1"):
        adapter.read(weights, "w", 0, memoryview(data))
    with pytest.raises(IncompatibleError, match="no KV cache"):
        adapter.warm([1, 2, 3], None)
    adapter.close()


def test_vllm_is_known_without_vllm() -> None:
    spec = registry.engine_specs()["vllm"]
    assert spec.factory == "kvctl_vllm.adapter:open_adapter"
    assert "vllm" not in sys.modules
    assert "torch" not in {name for name in sys.modules if name == "kvctl_vllm.loader"}


def test_an_engine_without_the_plug_in_is_named(toy: tuple[Toy, str]) -> None:
    server, url = toy
    server.answers["/v1/kvctl/engine"] = 404, {"detail": "Not Found"}
    with pytest.raises(IncompatibleError, match="VLLM_PLUGINS"):
        registry.open_engine(url, Context())


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((200, {"schema": "kvctl.engine/9", "engine": "toy"}), IncompatibleError, "kvctl.engine/9"),
        ((200, {"schema": "kvctl.engine/1", "engine": "strange"}), IncompatibleError, "strange"),
        ((401, {"error": "Unauthorized"}), AuthError, "401"),
        ((200, b"<html>"), IncompatibleError, "no JSON"),
    ],
)
def test_what_answers_otherwise(
    toy: tuple[Toy, str], example: str, answer: tuple[int, Any], kind: type[Exception], words: str
) -> None:
    server, url = toy
    server.answers["/v1/kvctl/engine"] = answer
    with pytest.raises(kind, match=re.escape(words)):
        registry.open_engine(url, Context())


def test_nobody_there() -> None:
    with pytest.raises(MemberDownError, match="does not answer"):
        registry.open_engine("http://127.0.0.1:9", Context())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://host/path", "http://me@host"])
def test_what_is_no_engine(url: str) -> None:
    with pytest.raises(UsageError, match="is no engine"):
        EngineClient(url)


def test_a_body_that_is_too_short_is_no_answer(toy: tuple[Toy, str], example: str) -> None:
    server, url = toy
    adapter = registry.open_engine(url, Context())
    weights = adapter.weights()
    server.short = True
    with pytest.raises(SizeMismatchError):
        adapter.read(weights, "w", 0, memoryview(bytearray(8)))
    server.short = False
    data = bytearray(8)
    adapter.read(weights, "w", 0, memoryview(data))  # the connection is a fresh one
    assert bytes(data) == server.data["first"][:8]
    adapter.close()


def test_a_plug_in_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = EntryPoints([EntryPoint("broken", "kvctl_nothing_like_it:ENGINE", registry.GROUP)])
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    with pytest.raises(EnvError, match="broken"):
        registry.engine_specs()
