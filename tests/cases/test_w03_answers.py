"""W3-W5: what the server answers. Each answer has its own words, exit code and hint; what can be tried again is,
only where it failed, and not for ever."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.models import LlamaShape, folder_files
from tests.cases.world import files_of, kvctl, kvctl_process, nothing_left, refused
from tests.cli.program import Done

SHAPE = LlamaShape(layers=2, hidden=256, heads=8, kv_heads=4, head_dim=32, inner=704, vocab=2048)
MODEL = folder_files(SHAPE.tensors(), shards=6, config=SHAPE.config())


def stored(server: FaultyS3) -> FaultyS3:
    for name, data in MODEL.items():
        server.put(f"m/{name}", data)
    return server


def load(server: FaultyS3, *more: object, into: str = "dir:out", address: str = "s3://bucket/m") -> Done:
    return kvctl("load-weights", address, "--endpoint-url", server.endpoint, "--into", into, "-o", "json", *more)


# where the answer is given: on the header's read, or on the first read of weights
WHERE = {"header": 0, "weights": 1}
KEY = "m/model-00003-of-00006.safetensors"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("status", "code", "exit_code", "words"),
    [
        (403, "AccessDenied", 5, ("access denied",)),
        (403, "InvalidAccessKeyId", 5, ("does not accept the credentials",)),
        (403, "SignatureDoesNotMatch", 5, ("does not accept the credentials",)),
        (400, "ExpiredToken", 5, ("have expired",)),
        (403, "RequestTimeTooSkewed", 5, ("clock",)),
        (404, "NoSuchKey", 4, ("no such object",)),
        (404, "NoSuchBucket", 4, ("bucket does not exist",)),
        (416, "InvalidRange", 7, ("shorter",)),
        (301, "PermanentRedirect", 2, ("another region",)),
        (400, "AuthorizationHeaderMalformed", 2, ("another region",)),
    ],
)
def test_w3_an_answer_that_will_not_change_ends_the_load_in_its_own_words(
    where: str, status: int, code: str, exit_code: int, words: tuple[str, ...], tmp_path: Path, server: FaultyS3
) -> None:
    fault = stored(server).add(Fault("status", key=KEY, skip=WHERE[where], status=status, code=code))
    done = load(server)
    if status == 416 and where == "header":  # a control read that begins behind the end is an empty answer
        refused(done, exit_code, KEY.rpartition("/")[2], "0 bytes of 65536")
    else:
        name = "bucket" if code == "NoSuchBucket" else KEY.rpartition("/")[2]
        error = refused(done, exit_code, name, str(status), code, *words)
        assert error["details"]["status"] == status
    assert fault.fired == 1, "it was tried again"
    nothing_left(tmp_path)


def test_w3_the_messages_differ(server: FaultyS3) -> None:
    said = set()
    for status, code in [(403, "AccessDenied"), (404, "NoSuchKey"), (416, "InvalidRange"), (301, "PermanentRedirect")]:
        stored(server).clear()
        server.add(Fault("status", key=KEY, skip=1, status=status, code=code))
        said.add(load(server, into="none").error["what"])
    assert len(said) == 4


def test_w3_refused_connections_are_six(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        args = ("load-weights", "s3://bucket/m", "--endpoint-url", endpoint, "--into", "dir:out", "-o", "json")
        refused(kvctl(*args, "--stall-timeout", "1s"), 6, endpoint, "the connection failed")
    nothing_left(tmp_path)


def test_w3_tls_that_cannot_be_trusted_is_ten(tmp_path: Path) -> None:
    pem = tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key.pem",
         "-out", pem],
        check=True, capture_output=True,
    )  # fmt: skip
    with FaultyS3(tls_certificate=(str(pem), str(tmp_path / "key.pem"))) as server:
        stored(server)
        refused(load(server), 10, "TLS", "certificate")
        nothing_left(tmp_path)
        done = load(server, "--ca-bundle", pem)
        assert done.code == 0, done.err
        assert files_of(tmp_path / "out") == MODEL


def test_w3_a_wrong_region_says_the_right_one(tmp_path: Path) -> None:
    with FaultyS3(region="eu-north-1") as server:
        stored(server)
        done = load(server, "--region", "us-west-2")
        error = refused(done, 2, "region")
        assert "eu-north-1" in error["hint"]
    nothing_left(tmp_path)


def test_w3_wrong_keys_are_five(server: FaultyS3) -> None:
    stored(server)
    args = ("load-weights", "s3://bucket/m", "--endpoint-url", server.endpoint, "-o", "json")
    done = kvctl_process(*args, env={"AWS_SECRET_ACCESS_KEY": "wrong-secret-value"})
    refused(done, 5)
    assert "wrong-secret-value" not in done.err


def test_w4_only_what_failed_is_asked_for_again_and_counted(tmp_path: Path, server: FaultyS3) -> None:
    stored(server)
    faults = [
        server.add(Fault("status", key="m/model-0000[1346]*", every=3)),
        server.add(Fault("reset", key="m/model-00002*", skip=1, times=2, after=5000)),
        server.add(Fault("truncate", key="m/model-00005*", skip=1, times=2, after=100)),
    ]
    done = load(server)
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == MODEL
    report = done.document
    bulk = [item for item in server.requests("GET", "m/*.safetensors") if item.range]
    good = [item for item in bulk if item.status == 206]
    assert [fault.fired for fault in faults][1:] == [2, 2]
    assert faults[0].fired >= 3
    assert report["retries"] == sum(fault.fired for fault in faults)
    # every retry is one request more for the same range; ranges that came whole are asked for once
    whole = {(item.key, item.range) for item in good}
    assert len(bulk) - len(whole) == sum(fault.fired for fault in faults)
    assert report["fetched"] == report["bytes"]


def test_w4_half_bodies_never_count_as_whole(tmp_path: Path, server: FaultyS3) -> None:
    stored(server)
    for kind in ("short", "overlong"):
        server.clear()
        server.add(Fault(kind, key=KEY, skip=1))
        refused(load(server), 7, KEY.rpartition("/")[2])
        nothing_left(tmp_path)


@pytest.mark.parametrize("where", WHERE)
def test_w5_throttled_for_ever_gives_up_within_the_deadline(where: str, tmp_path: Path, server: FaultyS3) -> None:
    stored(server).add(Fault("status", key=KEY, skip=WHERE[where]))
    done = load(server, "--stall-timeout", "1s", into="none")
    error = refused(done, 6, KEY.rpartition("/")[2], "503", "SlowDown")
    assert error["code"] == "throttled"


def test_w5_a_server_that_never_answers_ends_after_the_stall_timeout(server: FaultyS3) -> None:
    stored(server).add(Fault("hang", key=KEY, skip=1))
    done = kvctl_process(
        "load-weights", "s3://bucket/m", "--endpoint-url", server.endpoint, "-o", "json", "--stall-timeout", "1s",
        "--no-hedge",
    )  # fmt: skip
    refused(done, 6)


def test_w5_what_landed_before_is_kept_for_the_next_try(tmp_path: Path, server: FaultyS3) -> None:
    stored(server).add(Fault("status", key=KEY, skip=1))
    refused(load(server, "--stall-timeout", "3s"), 6, KEY.rpartition("/")[2])
    assert not (tmp_path / "out").exists()
    server.clear()
    done = load(server)
    assert done.code == 0, done.err
    assert 0 < done.document["fetched"] < done.document["bytes"]
    assert done.document["fetched"] + done.document["extra"]["resumed_bytes"] == done.document["bytes"]
    assert files_of(tmp_path / "out") == MODEL
