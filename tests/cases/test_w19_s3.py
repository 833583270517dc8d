"""W19-W21 through the command: how an S3 server is addressed, what an old one cannot do, and who one is there. (The
single requests are tested with the plug-in.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.testing.faulty_s3 import FaultyS3
from kvctl.testing.models import LlamaShape, folder_files
from tests.cases.world import files_of, kvctl, kvctl_process, make_repo, nothing_left, push, refused

SHAPE = LlamaShape()
MODEL = folder_files(SHAPE.tensors(), shards=2, config=SHAPE.config())


def fill(server: FaultyS3) -> None:
    for name, data in MODEL.items():
        server.put(f"models/m/{name}", data)


@pytest.mark.parametrize("end", ["", "/"])
@pytest.mark.parametrize("address", ["s3://bucket/models/m", "s3://bucket/models/m/"])
def test_w19_slashes_ports_and_ips_mean_the_same(address: str, end: str, tmp_path: Path, server: FaultyS3) -> None:
    fill(server)
    done = kvctl("load-weights", address, "--endpoint-url", server.endpoint + end, "--into", "dir:out", "-o", "json")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == MODEL
    assert {item.host for item in server.log} == {f"127.0.0.1:{server.port}"}


def test_w19_a_name_is_addressed_by_host_when_told_to(tmp_path: Path, server: FaultyS3) -> None:
    fill(server)
    host = f"s3.localhost:{server.port}"
    done = kvctl("load-weights", f"s3://bucket/models/m?addressing=virtual&endpoint=http://{host}", "--into", "dir:out",
                 "-o", "json")  # fmt: skip
    if done.code == 6:
        pytest.skip(f"this resolver does not know names under .localhost: {done.error['cause']}")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == MODEL
    assert {item.host for item in server.log} == {f"bucket.{host}"}


def test_w19_the_requests_are_shown_with_v(server: FaultyS3) -> None:
    fill(server)
    done = kvctl_process("load-weights", "s3://bucket/models/m", "--endpoint-url", server.endpoint, "-v")
    assert done.code == 0, done.err
    for item in server.requests("GET", "models/m/*.safetensors"):
        assert f"/bucket/{item.key}" in done.err
    assert server.endpoint in done.err
    assert "AWS4-HMAC" not in done.err
    assert server.secret_key not in done.err


@pytest.mark.parametrize("through", ["plain", "repo"])
def test_w20_a_server_without_checksums_and_conditions_serves(through: str, tmp_path: Path) -> None:
    with FaultyS3(checksums=False, conditional_put=through == "plain") as server:
        fill(server)
        address: tuple[str, ...] = ("s3://bucket/models/m",)
        if through == "repo":
            store = server.store("repo")
            make_repo([store])
            push(f"s3://bucket/models/m?endpoint={server.endpoint}", [store])
            address = ("m", "-r", "s3://bucket/repo")
        done = kvctl("load-weights", *address, "--endpoint-url", server.endpoint, "--into", "dir:out", "-o", "json")
        assert done.code == 0, done.err
        assert files_of(tmp_path / "out") == MODEL


def test_w20_the_etag_of_a_multipart_upload_is_a_version_not_a_digest(tmp_path: Path, server: FaultyS3) -> None:
    fill(server)
    for place, stored in list(server.objects.items()):
        assert "-" in stored.etag, place  # as composite ones are: no MD5 of anything
    done = kvctl("load-weights", "s3://bucket/models/m", "--endpoint-url", server.endpoint, "--into", "dir:out")
    assert done.code == 0, done.err
    bulk = [item for item in server.requests("GET", "*.safetensors") if item.condition]
    assert {item.condition for item in bulk} <= {f'"{stored.etag}"' for stored in server.objects.values()}
    assert bulk


def test_w21_a_public_bucket_needs_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with FaultyS3(anonymous=True) as server:
        fill(server)
        args = (
            "load-weights",
            "s3://bucket/models/m",
            "--endpoint-url",
            server.endpoint,
            "--into",
            "dir:out",
            "-o",
            "json",
        )
        error = refused(kvctl_process(*args), 5, "credentials")
        assert "no-sign-request" in error["hint"] or "anonymous" in error["hint"]
        nothing_left(tmp_path)
        done = kvctl(*args, "--no-sign-request")
        assert done.code == 0, done.err
        assert files_of(tmp_path / "out") == MODEL


def test_w21_session_tokens_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyS3(session_token="token/+=") as server:
        fill(server)
        args = (
            "load-weights",
            "s3://bucket/models/m",
            "--endpoint-url",
            server.endpoint,
            "--into",
            "dir:out",
            "-o",
            "json",
        )
        refused(kvctl(*args), 5)
        nothing_left(tmp_path)
        monkeypatch.setenv("AWS_SESSION_TOKEN", "token/+=")
        done = kvctl(*args)
        assert done.code == 0, done.err
        assert files_of(tmp_path / "out") == MODEL
