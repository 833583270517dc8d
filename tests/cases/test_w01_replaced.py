"""W1: the object is replaced between two reads of one load. Never a mix of old and new bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvctl.core.errors import VersionChangedError
from kvctl.testing.faulty_s3 import Fault, FaultyS3, Request
from kvctl.testing.models import file_bytes
from kvctl.transports.api import Op
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest
from kvctl_file.transport import FileTransport
from tests.cases.world import kvctl, make_repo, nothing_left, push, quick, refused

BIG = [(f"t{number}", "F32", (1024, 1024)) for number in range(12)]  # 48 MiB: several ranged reads
OLD, NEW = file_bytes(BIG, seed=1), file_bytes(BIG, seed=2)


def by_rename(path: Path) -> None:
    (path.parent / "new").write_bytes(NEW)
    os.rename(path.parent / "new", path)


def in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(NEW)


def cut_short(path: Path) -> None:
    os.truncate(path, len(OLD) // 2)


@pytest.mark.parametrize("replace", [by_rename, in_place, cut_short])
@pytest.mark.parametrize("into", ["none", "dir:out", "memory"])
def test_a_file_replaced_between_two_reads(
    replace: Callable[[Path], None], into: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(OLD)
    reads: list[int] = []
    perform = FileTransport.perform

    def after_the_second(self: FileTransport, op: Op) -> int:
        reads.append(op.id)
        if len(reads) == 2:
            replace(path)
        return perform(self, op)

    monkeypatch.setattr(FileTransport, "perform", after_the_second)
    if into == "memory":
        with pytest.raises(VersionChangedError, match="changed while loading"):
            run_load(LoadRequest(str(path), into="none"), quick())
    else:
        done = kvctl("load-weights", "./model.safetensors", "--into", into, "-o", "json")
        error = refused(done, 7, "changed while loading", "model.safetensors")
        assert error["code"] == "changed"
    assert len(reads) >= 2
    nothing_left(tmp_path)


def asked_for(request: Request) -> int:
    """Bytes of the range; what was sent of it depends on when its reader stopped."""
    first, _, last = (request.range or "bytes=0-0").removeprefix("bytes=").partition("-")
    return int(last) - int(first) + 1


@pytest.mark.parametrize("into", ["none", "dir:out"])
def test_an_object_replaced_between_two_reads(into: str, tmp_path: Path, server: FaultyS3) -> None:
    server.put("model.safetensors", OLD)
    fault = server.add(Fault("replace", key="model.safetensors", skip=2, times=1))
    done = kvctl(
        "load-weights", "s3://bucket/model.safetensors", "--endpoint-url", server.endpoint, "--into", into, "-o", "json"
    )
    error = refused(done, 7, "changed while loading", "model.safetensors")
    assert error["code"] == "changed"
    assert fault.fired == 1
    nothing_left(tmp_path)
    bulk = [item for item in server.requests("GET", "model.safetensors") if asked_for(item) > 1 << 20]
    assert bulk
    assert all(item.condition for item in bulk), "a read without If-Match"


def test_a_server_that_ignores_if_match_is_found_out_by_the_etag(tmp_path: Path) -> None:
    with FaultyS3(conditional_get=False) as server:
        server.put("model.safetensors", OLD)
        server.add(Fault("replace", key="model.safetensors", skip=2, times=1))
        done = kvctl(
            "load-weights", "s3://bucket/model.safetensors", "--endpoint-url", server.endpoint, "--into", "dir:out",
            "-o", "json",
        )  # fmt: skip
        refused(done, 7, "changed while loading", "model.safetensors")
    nothing_left(tmp_path)


def test_an_object_replaced_while_it_is_pushed_is_not_in_the_repo(tmp_path: Path, server: FaultyS3) -> None:
    server.put("model.safetensors", OLD)
    store = server.store("repo")
    make_repo([store])
    server.add(Fault("replace", key="model.safetensors", skip=2, times=1))
    with pytest.raises(VersionChangedError, match="changed while loading"):
        push(f"s3://bucket/model.safetensors?endpoint={server.endpoint}", [store])
    assert [item for item in server.objects if "/models/" in item[1]] == []


def test_the_old_version_is_never_resumed_into_the_new_one(tmp_path: Path, server: FaultyS3) -> None:
    server.put("model.safetensors", OLD)
    args = ("load-weights", "s3://bucket/model.safetensors", "--endpoint-url", server.endpoint, "--into", "dir:out")
    server.add(Fault("status", key="model.safetensors", skip=2, status=503))
    assert kvctl(*args, "--stall-timeout", "1s").code == 6
    server.clear()
    server.put("model.safetensors", NEW)
    done = kvctl(*args, "-o", "json")
    assert done.code == 0, done.err
    assert done.document["fetched"] == done.document["bytes"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == NEW
