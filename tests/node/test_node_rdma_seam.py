"""The node's side of RDMA, over an engine that uses shared memory: found by entry point, empty bodies, 2xx when the
bytes are placed, single-use tokens, errors as answers. Real verbs are tested in their own lab."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import EnvError, MemberDownError
from kvctl.testing.nodes import NodeProcess
from tests.node.rawhttp import Answer, Key, Raw

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The engine's plug-in as an installed distribution, for a process with this environment."""
    info = tmp_path / "site" / "shm_engine-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shm-engine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvctl.node_rdma]\nshm = tests.node.engine_shm:make\n")
    return {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"}


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"kvctl-test-{uuid.uuid4().hex}"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink()


def test_bytes_go_past_the_body(start: Callable[..., NodeProcess], installed: dict[str, str], memory: Path) -> None:
    node = start("--rdma-opt", "secret=elsewhere", environment=installed, verbose=True)
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    token = f"{memory.name}:4096"
    with Raw((node.host, node.port), key) as raw:
        raw.ask("PUT", "/v1/k", bytes(range(256)) * 8)
        answer = raw.ask("GET", "/v1/k", x_scal_rdma=token, range="bytes=100-1099")
        assert (answer.status, answer.body, answer.headers["content-range"]) == (206, b"", "bytes 100-1099/2048")
        assert memory.read_bytes()[:1000] == (bytes(range(256)) * 8)[100:1100]
        assert raw.ask("GET", "/k", x_scal_rdma=token).status == 200, "the form without /v1"
        assert raw.ask("PUT", "/v1/new", b"", x_scal_rdma=token).status == 200
        assert (Path(node.data) / "new").read_bytes() == memory.read_bytes()

        once = key.token("GET", "/v1/k", rdma=token)
        assert raw.ask("GET", "/v1/k", x_scal_rdma=token, token=once).status == 200
        assert raw.ask("GET", "/v1/k", x_scal_rdma=token, token=once).code == "token_replayed"
        other = key.token("GET", "/v1/k", rdma=token)
        assert raw.ask("GET", "/v1/k", x_scal_rdma=f"{memory.name}:9999", token=other).code == "token_forged"

        assert raw.ask("GET", "/v1/k", x_scal_rdma=f"{memory.name}:10").code == "memory"
        assert raw.ask("GET", "/v1/k", x_scal_rdma="junk").status == 400
        assert raw.ask("GET", "/v1/k", x_scal_rdma="gone:4096").status == 503
        assert raw.ask("GET", "/v1/k", x_scal_rdma="elsewhere:4096").status == 403
        assert raw.ask("PUT", "/v1/none", b"", x_scal_rdma="gone:4096").status == 503
        assert raw.ask("GET", "/v1/none").status == 404, "nothing is left of it"
        assert raw.ask("PUT", "/v1/k", b"body", x_scal_rdma=token).status == 400
        found = node.metrics()
    assert found["kvctl_node_rdma_sent_bytes_total"] == 1000 + 2048 + 2048
    assert found["kvctl_node_rdma_received_bytes_total"] == 4096
    assert found["kvctl_node_rdma_shm_bytes"] == 1000 + 2048 + 2048 + 4096
    assert found["kvctl_node_sent_bytes_total"] == 0
    assert memory.name not in node.log()


def test_an_engine_that_cannot_run_is_told(start: Callable[..., NodeProcess], installed: dict[str, str]) -> None:
    node = start("--rdma-opt", "absent=1", environment=installed)
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    with Raw((node.host, node.port), key) as raw:
        raw.ask("PUT", "/v1/k", b"x")
        answer = raw.ask("GET", "/v1/k", x_scal_rdma="a:1")
        assert (answer.status, answer.code) == (501, "no_rdma")
        assert b"no shared memory here" in answer.body
    with pytest.raises(EnvError, match="cannot use RDMA"):
        start("--rdma", "require", "--rdma-opt", "absent=1", environment=installed)


class Asking:
    """GETs of /v1/k by RDMA on one connection, in the form that our client writes."""

    def __init__(self, node: NodeProcess, raw: Raw, rdma: str) -> None:
        self._raw = raw
        self._rdma = rdma
        self._key = Key.derived((Path(node.folder) / "master.key").read_text())

    def head(self, span: str, *, token: str = "", rdma: str = "", if_match: str = "") -> bytes:
        rdma = rdma or self._rdma
        token = token or self.token(span, rdma, if_match)
        return (
            f"GET /v1/k HTTP/1.1\r\nhost: n\r\nuser-agent: kvctl\r\nx-kvctl-token: {token}\r\nrange: {span}\r\n"
            f"{f'if-match: {if_match}' + chr(13) + chr(10) if if_match else ''}x-scal-rdma: {rdma}\r\n\r\n"
        ).encode()

    def token(self, span: str, rdma: str = "", if_match: str = "") -> str:
        return self._key.token("GET", "/v1/k", span=span, if_match=if_match, rdma=rdma or self._rdma)

    def __call__(self, span: str, *, token: str = "", rdma: str = "", if_match: str = "") -> Answer:
        self._raw.sock.sendall(self.head(span, token=token, rdma=rdma, if_match=if_match))
        return self._raw.answer()


@pytest.mark.parametrize("mode", ["now", "later", "stuck", "never"])
def test_the_loop_carries_out_what_it_can_and_a_thread_the_rest(
    start: Callable[..., NodeProcess], installed: dict[str, str], memory: Path, mode: str
) -> None:
    node = start("--rdma-opt", f"loop={mode}", environment=installed, verbose=True)
    data = bytes(range(256)) * 8
    (Path(node.data) / "k").write_bytes(data)
    with Raw((node.host, node.port)) as raw:
        ask = Asking(node, raw, f"{memory.name}:4096")
        answer = ask("bytes=100-1099")
        assert (answer.status, answer.body, answer.headers["content-range"]) == (206, b"", "bytes 100-1099/2048")
        assert answer.headers["content-length"] == "0"
        assert memory.read_bytes()[:1000] == data[100:1100]
        assert ask("bytes=0-9").status == 206
        assert memory.read_bytes()[:10] == data[:10]
        raw.sock.sendall(ask.head("bytes=10-19"))
        while node.metrics().get("kvctl_node_rdma_went", 0) < 3:
            pass
        # these wait in the socket while the one before them is placed
        raw.sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: n\r\n\r\n" * 2)
        assert [raw.answer().status for _ in range(3)] == [206, 200, 200]
        assert memory.read_bytes()[:10] == data[10:20]
        found = node.metrics()
    thread = mode in {"stuck", "never"}
    assert [found[f"kvctl_node_rdma_{what}"] for what in ("begun", "went")] == [3, 3]
    assert found.get("kvctl_node_rdma_finished", 0) == found.get("kvctl_node_rdma_left", 0) == (3 if thread else 0)
    assert "kvctl_node_rdma_abandoned" not in found
    assert found["kvctl_node_rdma_sent_bytes_total"] == found["kvctl_node_rdma_shm_bytes"] == 1020
    assert found["kvctl_node_sent_bytes_total"] == 0
    assert found["kvctl_node_requests_in_flight"] == 1
    assert found['kvctl_node_requests_total{method="GET",status="206"}'] == 3
    assert node.log().count("GET /v1/k 206") == 3
    assert memory.name not in node.log()


def test_what_the_loop_does_not_take_is_refused_as_ever(
    start: Callable[..., NodeProcess], installed: dict[str, str], memory: Path
) -> None:
    node = start("--rdma-opt", "loop=now", "--rdma-opt", "secret=elsewhere", environment=installed)
    (Path(node.data) / "k").write_bytes(bytes(2048))
    span = "bytes=0-99"
    with Raw((node.host, node.port)) as raw:
        ask = Asking(node, raw, f"{memory.name}:4096")
        once = ask.token(span)
        assert ask(span, token=once).status == 206
        assert ask(span, token=once).code == "token_replayed"
        assert ask("bytes=0-98", token=ask.token(span)).code == "token_forged"
        assert ask(span, rdma=f"{memory.name}:9999", token=ask.token(span)).code == "token_forged"
        assert ask(span, rdma=f"{memory.name}:10").code == "memory"
        assert ask(span, rdma="junk").status == 400
        assert ask(span, rdma="gone:4096").status == 503
        assert ask(span, rdma="elsewhere:4096").status == 403
        assert ask("bytes=4096-4099").status == 416
        assert ask(span, if_match='"other"').status == 412
        found = node.metrics()
        # the one whose token was used before was begun, and given up before it wrote
        assert (found["kvctl_node_rdma_begun"], found["kvctl_node_rdma_went"]) == (2, 1)
        assert found["kvctl_node_rdma_abandoned"] == 1
        assert found["kvctl_node_rdma_sent_bytes_total"] == found["kvctl_node_rdma_shm_bytes"] == 100


def test_a_write_that_fails_on_its_way_is_answered_with_its_error(
    start: Callable[..., NodeProcess], installed: dict[str, str], memory: Path
) -> None:
    node = start("--rdma-opt", "loop=broken", environment=installed)
    (Path(node.data) / "k").write_bytes(bytes(2048))
    with Raw((node.host, node.port)) as raw:
        ask = Asking(node, raw, f"{memory.name}:4096")
        for _ in range(2):
            answer = ask("bytes=0-99")
            assert (answer.status, answer.code) == (503, MemberDownError.code)
            assert b"the peer went away" in answer.body
        found = node.metrics()
    assert found["kvctl_node_rdma_finished"] == 2
    assert found["kvctl_node_rdma_sent_bytes_total"] == 0
    assert found['kvctl_node_requests_total{method="GET",status="503"}'] == 2
    assert found[f'kvctl_node_refusals_total{{code="{MemberDownError.code}"}}'] == 2
    assert found["kvctl_node_requests_in_flight"] == 1


def test_a_node_that_is_ended_finishes_what_is_in_the_air(
    start: Callable[..., NodeProcess], installed: dict[str, str], memory: Path
) -> None:
    node = start("--rdma-opt", "loop=never", environment=installed)
    (Path(node.data) / "k").write_bytes(b"x" * 100)
    with Raw((node.host, node.port)) as raw:
        ask = Asking(node, raw, f"{memory.name}:4096")
        raw.sock.sendall(ask.head("bytes=0-99"))
        while node.metrics().get("kvctl_node_rdma_went", 0) < 1:
            pass
        assert node.terminate() == 0
        assert raw.answer().status == 206
    assert memory.read_bytes()[:100] == b"x" * 100
