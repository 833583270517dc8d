"""The NIXL transports through the program: loads that name the path, refusals that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.models import write_llama
from tests.cli.conftest import own_environment, program_in
from tests.cli.program import Kvctl


@pytest.fixture
def kvctl(tmp_path: Path) -> Kvctl:
    return program_in(tmp_path, own_environment(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(str(tmp_path / "model"), shards=3)
    return tmp_path / "model"


@pytest.fixture
def server(model: Path) -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        for path in model.iterdir():
            server.put(f"m/{path.name}", path.read_bytes())
        yield server


def same(model: Path, copy: Path) -> bool:
    return all(path.read_bytes() == (copy / path.name).read_bytes() for path in model.glob("*.safetensors"))


@pytest.mark.parametrize("options", [[], ["--transport-opt", "direct=true"], ["--transport-opt", "api=aio"]], ids=str)
def test_a_load_by_nixl_posix(kvctl: Kvctl, model: Path, options: list[str]) -> None:
    done = kvctl("load-weights", model, "--into", "dir:copy", "--transport", "nixl-posix", *options, "-o", "json")
    assert (done.code, done.err) == (0, "")
    (report,) = done.document["transport"]
    assert (report["name"], report["reason"]) == ("nixl-posix", "asked for")
    assert same(model, model.parent / "copy")


@pytest.mark.parametrize("name", ["nixl-posix", "nixl-obj"])
def test_a_model_of_a_repo_verified_in_full(kvctl: Kvctl, model: Path, server: FaultyS3, name: str) -> None:
    where = "./repo" if name == "nixl-posix" else "s3://bucket/repo"
    on = ["-r", where] if name == "nixl-posix" else ["-r", where, "--endpoint-url", server.endpoint]
    for args in (["repo", "init", *on], ["push-weights", model, "m", *on]):
        done = kvctl(*args)
        assert done.code == 0, done.err
    done = kvctl("load-weights", "m", *on, "--transport", name, "--verify", "full", "--into", "dir:copy", "-o", "json")
    assert (done.code, done.err) == (0, "")
    assert done.document["transport"][0]["name"] == name
    assert same(model, model.parent / "copy")


def test_auto_takes_the_file_transport_and_says_what_it_passed_over(kvctl: Kvctl, model: Path) -> None:
    (report,) = kvctl("load-weights", model, "-o", "json").document["transport"]
    assert report["name"] == "file"
    assert [name for name, _ in report["passed_over"]] == ["nixl-gds"]


def test_a_load_by_nixl_obj(kvctl: Kvctl, model: Path, server: FaultyS3) -> None:
    source = ["s3://bucket/m/", "--endpoint-url", server.endpoint]
    done = kvctl("load-weights", *source, "--into", "dir:copy", "--transport", "nixl-obj", "-o", "json")
    assert (done.code, done.err) == (0, "")
    assert done.document["transport"][0]["name"] == "nixl-obj"
    assert same(model, model.parent / "copy")
    traced = kvctl("load-weights", *source, "--transport", "nixl-obj", "-v")
    assert f"nixl-obj: read {server.endpoint} m/model-00001-of-00003.safetensors [" in traced.err
    assert server.secret_key not in traced.err + traced.out


def test_a_load_whose_transfer_was_given_up_fails_and_ends(kvctl: Kvctl, model: Path, server: FaultyS3) -> None:
    args = [
        "load-weights",
        "s3://bucket/m/",
        "--endpoint-url",
        server.endpoint,
        "--transport",
        "nixl-obj",
        "-o",
        "json",
    ]
    assert kvctl(*args).code == 0
    headers = len(server.requests("GET", "*.safetensors")) - 3
    server.clear()
    server.add(Fault("slow", key="*.safetensors", skip=headers, rate=2_000))
    done = kvctl(*args, "--transport-opt", "deadline=1")
    assert done.code == 6
    assert "given up in flight after 1 s" in done.error["what"]


def test_an_engine_that_is_not_here_is_ten_with_what_to_install(kvctl: Kvctl, server: FaultyS3) -> None:
    options = ["--transport-opt", "accelerated=true", "--transport-opt", "type=scality_ai_connector"]
    source = ["s3://bucket/m/", "--endpoint-url", server.endpoint]
    done = kvctl("load-weights", *source, "--transport", "nixl-obj", *options, "-o", "json")
    assert done.code == 10
    assert "scality_ai_connector" in done.error["what"]
    assert done.error["hint"]


def test_a_damaged_file_is_found_by_a_load_through_nixl(kvctl: Kvctl, model: Path) -> None:
    kvctl("models", "digest", model, "--out", "digests.json")
    path = model / "model-00002-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = kvctl("load-weights", model, "--transport", "nixl-posix", "--require-digests", "digests.json")
    assert done.code == 7


def test_memory_of_another_process_is_a_source(kvctl: Kvctl, model: Path) -> None:
    publisher = subprocess.Popen(
        [sys.executable, "-m", "kvctl_nixl.examples.publish_folder", str(model)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert publisher.stdout is not None
        url = publisher.stdout.readline().strip()
        done = kvctl("load-weights", f"{url}/", "--into", "dir:copy", "-o", "json")
        assert (done.code, done.err) == (0, "")
        assert done.document["transport"][0]["name"] == "nixl-ucx"
        assert same(model, model.parent / "copy")
        assert kvctl("load-weights", f"{url}/no/such", "-o", "json").code == 4
    finally:
        publisher.kill()
        publisher.communicate()
    assert kvctl("load-weights", f"{url}/", "-o", "json", "--stall-timeout", "1s").code == 6


def test_gds_where_no_gpu_is(kvctl: Kvctl, model: Path) -> None:
    done = kvctl("transports", "probe", "nixl-gds")
    if os.path.exists("/dev/nvidiactl"):
        assert done.code in {0, 10}
        return
    assert done.code == 10
    assert "no NVIDIA driver" in done.err
    assert kvctl("load-weights", model, "--transport", "nixl-gds").code == 2
    assert not list(model.parent.rglob("cufile*.log"))
