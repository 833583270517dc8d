"""The compiled reader by itself: that it is built, which heads it finds in order, and, where it is not, what is told
and that everything works without.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.errors import EnvError, UsageError
from kvctl.doctor import transports as findings
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.transport_contract import drive
from kvctl.transports import registry
from kvctl.transports.api import Op, Status
from kvctl.transports.http import pump
from kvctl.transports.http.bulk import HttpTransport
from kvctl.transports.http.ranges import check_read, expected_read
from kvctl.transports.wire import parse_head

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
needs_it = pytest.mark.skipif(COMPILER is None, reason="no C compiler: there is no compiled reader")


@needs_it
def test_it_is_here_where_a_compiler_is(tmp_path: Path) -> None:
    """What cannot be compiled is left out of an installation with a warning: nothing else would fail."""
    assert pump.why_not() == ""
    assert COMPILER is not None
    source = Path(pump.__file__).with_name("pump.c")
    command = [
        COMPILER,
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-pthread",
        "-o",
        "pump.so",
        str(source),
    ]
    subprocess.run(command, cwd=tmp_path, check=True)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str | None], None]]:
    """Puts a text in its place, or nothing."""

    def put(content: str | None) -> None:
        file = tmp_path / "_pump.so"
        if content is not None:
            file.write_text(content)
        monkeypatch.setattr(pump, "_FILE", str(file))
        pump._loaded.cache_clear()

    yield put
    monkeypatch.undo()
    pump._loaded.cache_clear()


def test_what_is_missing_is_told(without: Callable[[str | None], None]) -> None:
    for content, reason in ((None, "it was not built when kvctl was installed"), ("text", "it does not load")):
        without(content)
        assert pump.why_not() == reason
        assert pump.lacking() == ("the compiled reader", reason)
        for scheme, name in (("node", "native-tcp"), ("s3", "s3")):
            for asked in ("auto", name):
                choice = registry.choose(scheme, "host", asked)
                assert choice.spec.name == name
                assert choice.passed_over[-1] == ("the compiled reader", reason)
        (finding,) = findings.compiled()
        assert (finding.state, finding.fix) == ("degraded", pump.HINT)
        assert reason in finding.why


@needs_it
def test_one_of_another_version_is_not_used(
    without: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "_FORM", 0)
    pump._loaded.cache_clear()
    assert pump.why_not() == "it was built from another version of kvctl"


def test_reads_go_on_without_it(without: Callable[[str | None], None], tmp_path: Path) -> None:
    without(None)
    (tmp_path / "node").mkdir()
    node = NodeProcess.start(str(tmp_path / "node"))
    try:
        config = node.store("x")
        store = registry.open_store(config)
        data = bytes(range(256)) * 1000
        version = store.put("k", data).version
        choice = registry.choose("node", "host", "native-tcp", stores=((config, store),))
        with pytest.raises(EnvError, match="no compiled reader"):
            registry.open_transports(config, store, choice, {"compiled": "true"})
        with pytest.raises(UsageError, match="compiled=perhaps"):
            registry.open_transports(config, store, choice, {"compiled": "perhaps"})
        (transport,) = registry.open_transports(config, store, choice, {})
        assert isinstance(transport, HttpTransport)
        buffer = GuardedBuffer(len(data))
        for turn in range(3):
            op = Op(turn, "read", "k", 0, len(data), buffer, 0, version, len(data))
            assert drive(transport, [op])[turn].status is Status.DONE
            assert buffer.view == data
        transport.close()
        store.close()
        del op
        buffer.close()
    finally:
        node.close()


_OP = Op(1, "read", "k", 7, 1000, GuardedBuffer(1000), 0, "v1", 300_000)
_LINES = (
    b"content-range: bytes 7-1006/300000", b"content-length: 1000", b'ETag: "v1"', b"Date: Tue, 01 Dec 2026",
    b"Connection: keep-alive", b"connection: close", b"Transfer-Encoding: chunked", b"content-length: 999",
    b"content-range: bytes 7-1006/*", b"content-range: bytes 6-1005/300000", b'etag: "v2"', b"etag: v1", b"x-other:",
    b"Content-Length:1000 ", b"content-length : 1000", b" content-length: 1000", b"content-length: 1000\r", b"a b: c",
    b"x: y\nz: 1", b"x: \0", b": none", b"",
)  # fmt: skip
_STATUS_LINES = (
    b"HTTP/1.1 206 Partial Content", b"HTTP/1.1 206", b"HTTP/1.0 206 OK", b"HTTP/1.1 200 OK", b"HTTP/1.1 2066 OK",
    b"HTTP/1.1 206\nOK", b"",
)  # fmt: skip


@needs_it
@given(
    st.sampled_from(_STATUS_LINES),
    st.lists(st.sampled_from(_LINES), max_size=8),
    st.one_of(st.none(), st.tuples(st.integers(0, 150), st.binary(min_size=1, max_size=2))),
)
def test_what_the_compiled_reader_finds_in_order_is(
    status: bytes, lines: list[bytes], damage: tuple[int, bytes] | None
) -> None:
    text = b"\r\n".join((status, *_LINES[: 3 if len(lines) % 2 else 0], *lines))
    if damage is not None:
        text = text[: damage[0]] + damage[1] + text[damage[0] + len(damage[1]) :]
    text = (text + b"\r\n\r\n").partition(b"\r\n\r\n")[0]
    if pump.fits(text + b"\r\n\r\n", expected_read(_OP), _OP.length):
        found = parse_head(text, b"")
        check_read(_OP, found, "k", whole=False, versions=True, hint="")
        assert found.keep_alive


@needs_it
def test_usual_heads_are_in_order() -> None:
    for lines in (
        (b"date: x", b'etag: "v1"', b"content-range: bytes 7-1006/300000", b"content-length: 1000"),
        (b"Content-Length: 1000", b"Content-Range:bytes 7-1006/300000\t", b'Etag: "v1"', b"Connection: Keep-Alive"),
    ):
        text = b"\r\n".join((b"HTTP/1.1 206 Partial Content", *lines, b"", b""))
        assert pump.fits(text, expected_read(_OP), _OP.length)
        assert not pump.fits(text, expected_read(_OP), 999)
        assert not pump.fits(text, (b"", b""), 1000)
        assert not pump.fits(text.replace(b"v1", b"v2"), expected_read(_OP), 1000)
        assert not pump.fits(text.replace(b"\r\n\r\n", b'\r\netag: "v1"\r\n\r\n'), expected_read(_OP), 1000)
