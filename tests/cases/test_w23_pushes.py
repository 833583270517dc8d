"""W23: two pushes of one model at once, and a push that was ended and run again: both right, nothing twice."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import KvctlError
from kvctl.repo.admin import CheckOptions, check_repo, gc_repo
from kvctl.repo.check import Share
from kvctl.repo.gc import GcOptions
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.weights.load import run_load
from kvctl.weights.push import PushRequest, push_weights
from kvctl.weights.request import LoadRequest
from tests.agent.agents import eventually
from tests.cases.world import as_option, files_of, folders, kvctl, make_repo, quick
from tests.cli.program import PROGRAM

SHAPE = LlamaShape(layers=2, hidden=256, heads=4, kv_heads=4, head_dim=64, inner=704, vocab=1024)
STRIPE = 256 * 1024


def test_two_threads_push_one_model_at_once(tmp_path: Path, server: FaultyS3) -> None:
    """Over S3, so that both really see each other half done."""
    files = write_llama("model", SHAPE, shards=2)
    stores = [server.store(name) for name in "abc"]
    make_repo(stores, replicas=2, stripe=STRIPE)
    start = threading.Barrier(2)

    def one(_: int) -> dict[str, Any]:  # Any: JSON
        start.wait()
        return push_weights(PushRequest("model", "m", tuple(stores)), quick()).to_json()

    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(one, range(2)))
    versions = {report["extra"]["version"] for report in reports}
    assert versions == {"1"}
    assert sorted(report["extra"]["new_version"] for report in reports) == [False, True]
    finish(stores, files, tmp_path)


def test_two_processes_push_one_model_at_once(tmp_path: Path) -> None:
    files = write_llama("model", SHAPE, shards=2)
    stores = folders(tmp_path, "a", "b", "c")
    make_repo(stores, replicas=2, stripe=STRIPE)
    words = [PROGRAM, "push-weights", "./model", "m", "-r", as_option(stores), "-q"]
    running = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    listed = kvctl("models", "ls", "-r", as_option(stores), "-o", "json").document["models"]
    assert [item["version"] for item in listed] == ["1"]
    finish(stores, files, tmp_path)


def wait_for_nobody(server: FaultyS3) -> None:
    """Until it has carried out what earlier clients sent."""
    with closing(HTTPConnection("127.0.0.1", server.port)) as last:
        last.request("GET", "/")
        last.getresponse().read()  # whoever connected before it was accepted before it
    eventually(server.waits_for_nobody, "the server has nothing more to do")


def finish(stores: Sequence[StoreConfig], files: dict[str, bytes], folder: Path) -> None:
    """The model is right, and what the two wrote twice is garbage that gc takes."""
    run_load(LoadRequest("m", repo=tuple(stores), into="dir:out", verify="full"), quick())
    assert files_of(folder / "out") == files
    assert check_repo(stores, quick(), CheckOptions(Share())).problems == []
    gc_repo(stores, quick(), GcOptions(grace=0))
    result = check_repo(stores, quick(), CheckOptions(Share()))
    assert (result.problems, {name: n for name, n in result.garbage.items() if n}) == ([], {})


@pytest.mark.parametrize("writes", [1, 5, 12])
def test_a_push_that_was_ended_writes_only_what_is_missing_the_second_time(
    writes: int, tmp_path: Path, server: FaultyS3
) -> None:
    files = write_llama("model", SHAPE, shards=2)
    stores = [server.store("a"), server.store("b")]
    make_repo(stores, replicas=2, stripe=STRIPE)
    server.log.clear()
    server.add(Fault("status", key="*/chunks/*", methods=("PUT",), skip=writes, status=403, code="AccessDenied"))
    request = PushRequest("model", "m", tuple(stores))
    with pytest.raises(KvctlError, match="access denied"):
        push_weights(request, quick())
    # what the push had sent when it gave up is still answered: with the fault, not after it
    wait_for_nobody(server)
    there = {key: len(item.data) for (_, key), item in server.objects.items() if "/chunks/" in key}
    assert len(there) >= writes
    assert not [key for _, key in server.objects if "/models/" in key]
    server.clear()
    report = push_weights(request, quick()).to_json()
    chunks = {key: len(item.data) for (_, key), item in server.objects.items() if "/chunks/" in key}
    written = [item.key for item in server.requests("PUT", "*/chunks/*")]
    assert sorted(written) == sorted(chunks.keys() - there.keys())
    assert report["written"] == sum(chunks.values()) - sum(there.values())
    server.log.clear()
    again = push_weights(request, quick()).to_json()
    assert (again["written"], again["extra"]["new_chunks"], again["extra"]["new_version"]) == (0, 0, False)
    assert server.requests("PUT", "*/chunks/*") == []
    finish(stores, files, tmp_path)
