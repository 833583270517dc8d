"""The node's side of RDMA, over an engine that uses shared memory: found by entry point, empty bodies, 2xx when the
bytes are placed, single-use tokens, errors as answers. Real verbs are tested in their own lab."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import EnvError
from kvctl.testing.nodes import NodeProcess
from tests.node.rawhttp import Key, Raw

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
