"""nixl-obj: what NIXL leaves open, one case each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import (
    AuthError,
    EnvError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    SizeMismatchError,
    ThrottledError,
    TransientError,
    UsageError,
    VersionChangedError,
)
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import ObjectInfo, Op, Status
from kvctl.transports.registry import open_store
from kvctl_nixl import obj
from kvctl_nixl.obj import NixlObj, open_transport
from kvctl_nixl.obj_params import uses_host_names
from kvctl_nixl.witness import Witness
from kvctl_s3.store import S3Store
from tests.nixl.cases import read_one

SIZE = 300_000
DATA = bytes(range(1, 251)) * (SIZE // 250)


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        server.put("pre/k", DATA)
        yield server


@contextmanager
def opened(config: StoreConfig, **options: str) -> Iterator[NixlObj]:
    store = open_store(config)
    with closing(store), closing(open_transport(config, store, config.endpoints[0], options)) as transport:
        yield transport


@pytest.fixture
def transport(server: FaultyS3) -> Iterator[NixlObj]:
    with opened(server.store("pre")) as transport:
        yield transport


def failure(transport: NixlObj, key: str = "k", offset: int = 0, length: int = SIZE) -> KvctlError:
    buffer = GuardedBuffer(length)
    done = drive(transport, [Op(1, "read", key, offset, length, buffer)])[1]
    buffer.check((0, length))
    buffer.close()
    assert done.status is Status.FAILED
    assert done.error is not None
    return done.error


def test_a_read_costs_one_get_and_a_head_before_and_after(server: FaultyS3, transport: NixlObj) -> None:
    version = server.objects["bucket", "pre/k"].etag
    assert read_one(transport, "k", 0, SIZE, version=version, size=SIZE) == (DATA, 3)
    assert read_one(transport, "k", 7, 1000, version=version, size=SIZE) == (DATA[7:1007], 2)
    assert [item.method for item in server.log] == ["HEAD", "GET", "HEAD", "GET", "HEAD"]
    assert {item.method: item.range for item in server.log}["GET"] == "bytes=7-1006"


def test_long_ranges_move_in_pieces(server: FaultyS3, transport: NixlObj, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obj, "PIECE", 100_000)
    assert read_one(transport, "k", 10, SIZE - 10) == (DATA[10:], 4)
    assert [item.range for item in server.requests("GET")] == [
        "bytes=10-100009", "bytes=100010-200009", "bytes=200010-299999",
    ]  # fmt: skip


def test_reads_that_end_together_share_the_head_after_them() -> None:
    asked: list[str] = []
    first, go = threading.Event(), threading.Event()

    def stat(key: str) -> ObjectInfo:
        asked.append(key)
        first.set()
        assert go.wait(60)
        return ObjectInfo(key, 1, f"v{len(asked)}", datetime.now(UTC))

    witness = Witness(stat)
    with ThreadPoolExecutor(4) as pool:
        early = pool.submit(witness.since, "k", time.monotonic())
        assert first.wait(60)
        moment = time.monotonic()  # after the first HEAD was sent: it proves nothing about reads that end now
        late = [pool.submit(witness.since, "k", moment) for _ in range(3)]
        go.set()
        assert early.result()[0].version == "v1"
        told = [future.result() for future in late]
    assert {info.version for info, _ in told} == {"v2"}
    assert sum(requests for _, requests in told) == 1
    assert len(asked) == 2
    assert witness.recent("k") is not None
    assert witness.recent("other") is None


@pytest.mark.parametrize("amount", [1, 17, SIZE - 1])
def test_an_answer_that_is_too_short_is_found(server: FaultyS3, transport: NixlObj, amount: int) -> None:
    """With the Content-Length short as well, NIXL reports such a read as done."""
    server.add(Fault("short", amount=amount))
    error = failure(transport)
    assert isinstance(error, SizeMismatchError)
    assert "shorter than the range" in str(error)
    assert len(server.requests("GET")) == 2, "once more over another byte, in case the first was the object's own"


@pytest.mark.parametrize("last", [0xA5, 0x5A, 0x00])
def test_any_last_byte_can_be_read(server: FaultyS3, transport: NixlObj, last: int) -> None:
    data = DATA[:-1] + bytes([last])
    server.put("pre/k", data)
    assert read_one(transport, "k", 0, SIZE)[0] == data
    assert len(server.requests("GET")) == (2 if last == 0xA5 else 1)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("overlong"),
        Fault("reset", after=1000),
        Fault("truncate", after=1000),
        Fault("ignore-range"),
        Fault("drop"),
        Fault("garbage"),
        Fault("status", status=503),
        Fault("status", status=500, code="InternalError"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_a_broken_answer_fails_and_can_be_tried_again(server: FaultyS3, transport: NixlObj, fault: Fault) -> None:
    fault.times = 1
    server.add(fault)
    error = failure(transport, offset=1000, length=100_000)
    assert isinstance(error, TransientError)
    assert error.retryable
    assert len(server.requests("GET")) == 1, "NIXL's own retries are off"
    assert read_one(transport, "k", 0, SIZE)[0] == DATA


def test_a_missing_object_and_a_missing_bucket_are_told_apart(server: FaultyS3, transport: NixlObj) -> None:
    error = failure(transport, "no/such")
    assert isinstance(error, NotFoundError)
    assert "no/such" in str(error)
    with opened(server.store("pre", bucket="nowhere")) as other:
        error = failure(other)
    assert isinstance(error, NotFoundError)
    assert {item.range for item in server.requests("GET")} == {"bytes=0-0"}, "the store's own question, not NIXL's"


def test_an_object_that_goes_away_between_the_head_and_the_get(server: FaultyS3, transport: NixlObj) -> None:
    read_one(transport, "k", 0, SIZE, version=server.objects["bucket", "pre/k"].etag)
    version = server.objects.pop(("bucket", "pre/k")).etag
    buffer = HostBuffer(SIZE)
    done = drive(transport, [Op(1, "read", "k", 0, SIZE, buffer, version=version)])[1]
    assert isinstance(done.error, NotFoundError)


def test_an_object_replaced_during_the_read_is_noticed(server: FaultyS3, transport: NixlObj) -> None:
    version = server.objects["bucket", "pre/k"].etag
    server.add(Fault("replace"))
    buffer = HostBuffer(SIZE)
    done = drive(transport, [Op(1, "read", "k", 0, SIZE, buffer, version=version, object_size=SIZE)])[1]
    assert isinstance(done.error, VersionChangedError)


def test_refused_keys_are_an_auth_error(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with opened(server.store("pre")) as transport:
        assert isinstance(failure(transport), AuthError)


def test_a_throttled_write_is_explained_by_a_head(server: FaultyS3, transport: NixlObj) -> None:
    server.add(Fault("status", methods=("PUT", "HEAD")))
    buffer = HostBuffer(10)
    done = drive(transport, [Op(1, "write", "new", 0, 10, buffer, object_size=10)])[1]
    assert isinstance(done.error, ThrottledError)
    server.clear()
    server.add(Fault("status", methods=("PUT",), status=500, code="InternalError"))
    done = drive(transport, [Op(1, "write", "new", 0, 10, buffer, object_size=10)])[1]
    assert isinstance(done.error, TransientError)
    assert "could not write" in str(done.error)


def test_a_server_that_is_gone(transport: NixlObj, server: FaultyS3) -> None:
    server.close()
    assert isinstance(failure(transport), MemberDownError)


def test_a_write_is_the_whole_object(server: FaultyS3, transport: NixlObj) -> None:
    buffer = HostBuffer(100)
    buffer.view[:] = bytes(range(100))
    ops = [
        Op(1, "write", "new", 0, 100, buffer, object_size=100),
        Op(2, "write", "new", 10, 20, buffer, object_size=100),
        Op(3, "write", "new", 0, 20, buffer, object_size=100),
    ]
    done = drive(transport, ops)
    assert done[1].status is Status.DONE
    assert isinstance(done[2].error, UsageError)
    assert isinstance(done[3].error, UsageError)
    assert server.objects["bucket", "pre/new"].data == bytes(range(100))
    assert len(server.requests("PUT")) == 1


def test_two_keys_at_once_never_get_each_others_bytes(server: FaultyS3, transport: NixlObj) -> None:
    """NIXL knows an object by a number; one that two keys share reads the wrong one, silently."""
    count = 40
    for number in range(count):
        server.put(f"pre/{number}", bytes([number + 1]) * 5000)
    buffer = HostBuffer(count * 5000)
    done = drive(
        transport, [Op(number, "read", str(number), 0, 5000, buffer, number * 5000) for number in range(count)]
    )
    assert {item.status for item in done.values()} == {Status.DONE}
    assert all(bytes(buffer.view[n * 5000 : (n + 1) * 5000]) == bytes([n + 1]) * 5000 for n in range(count))


def test_keys_with_every_kind_of_character(server: FaultyS3, transport: NixlObj) -> None:
    key = "a b+ü%20#&='x"
    server.put(f"pre/{key}", DATA)
    assert read_one(transport, key, 0, SIZE)[0] == DATA


def test_renewed_credentials_get_a_new_agent(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    server.session_token = "first"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "first")
    with opened(server.store("pre")) as transport:
        assert read_one(transport, "k", 0, SIZE)[0] == DATA
        server.session_token = "second"
        monkeypatch.setenv("AWS_SESSION_TOKEN", "second")
        assert read_one(transport, "k", 0, SIZE)[0] == DATA


def test_nothing_asks_the_metadata_address_and_the_environment_stays(
    server: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as metadata:
        metadata.settimeout(0.2)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{metadata.getsockname()[1]}")
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                try:
                    connection, _ = metadata.accept()
                except TimeoutError:
                    continue
                asked.append(connection.recv(100))
                connection.close()

        thread = threading.Thread(target=listen)
        thread.start()
        with opened(server.store("pre")) as transport:
            assert read_one(transport, "k", 0, SIZE)[0] == DATA
        stop.set()
        thread.join()
    assert asked == []
    assert "AWS_EC2_METADATA_DISABLED" not in os.environ
    assert "AWS_MAX_ATTEMPTS" not in os.environ


def test_memory_of_a_read_given_up_in_flight_is_not_used_again(server: FaultyS3) -> None:
    """NIXL cannot call it off: the bytes land after the buffer was closed. And the process still ends, in order."""
    server.put("pre/k", bytes(range(1, 251)) * 4000)
    server.add(Fault("slow", rate=100_000))
    child = Path(__file__).with_name("abandoning_child.py")
    done = subprocess.run(
        [sys.executable, str(child), server.endpoint],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    status, error, kept, landed = json.loads(done.stdout)
    assert (status, kept, landed) == ("unknown", 1, True)
    assert "given up in flight after 1 s" in error


def test_tls_with_a_custom_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(chain), "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with FaultyS3(tls_certificate=(str(chain), str(key))) as server:
        server.put("pre/k", DATA)
        with opened(server.store("pre", ca_bundle=str(chain))) as transport:
            assert read_one(transport, "k", 0, SIZE)[0] == DATA


@pytest.mark.parametrize(
    ("endpoint", "bucket", "addressing", "expected"),
    [
        ("https://s3.lab:9000", "weights", "auto", False),
        ("https://s3.lab:9000", "weights", "virtual", True),
        ("https://s3.eu-west-1.amazonaws.com", "weights", "auto", True),
        ("https://s3.eu-west-1.amazonaws.com", "my.weights", "auto", False),
        ("https://s3.eu-west-1.amazonaws.com", "weights", "path", False),
    ],
)
def test_where_the_bucket_goes(endpoint: str, bucket: str, addressing: str, expected: bool) -> None:
    assert uses_host_names(endpoint, bucket, addressing) is expected


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"secret_key": "x"}, UsageError, "credentials come from the AWS chain"),
        ({"backend.bucket": "x"}, UsageError, "the bucket is the store's"),
        ({"treads": "4"}, UsageError, "backend.treads=4 passes it"),
        ({"type": "dell"}, UsageError, "add accelerated=true"),
        ({"accelerated": "true", "build": "cu12"}, EnvError, "build=cu13"),
        ({"deadline": "0"}, UsageError, ""),
    ],
)
def test_options_that_cannot_be_meant(
    server: FaultyS3, options: dict[str, str], kind: type[KvctlError], words: str
) -> None:
    with pytest.raises(kind) as found, opened(server.store("pre"), **options):
        pass
    assert words in f"{found.value} {found.value.hint}"


@pytest.mark.parametrize("engine", ["dell", "scality_ai_connector"])
def test_an_rdma_engine_that_is_not_here_says_what_to_install(server: FaultyS3, engine: str) -> None:
    with pytest.raises(EnvError) as found, opened(server.store("pre"), accelerated="true", type=engine):
        pass
    assert engine in str(found.value)
    assert "nixl-cu13" in f"{found.value}{found.value.hint}" or "libcuobjclient" in str(found.value)


def test_other_parameters_reach_the_back_end(server: FaultyS3) -> None:
    with pytest.raises(EnvError) as found, opened(server.store("pre"), **{"backend.num_threads": "many"}):
        pass
    assert "OBJ" in str(found.value)


def test_public_buckets_are_left_to_the_s3_transport(server: FaultyS3) -> None:
    with pytest.raises(UsageError) as found, opened(server.store("pre", anonymous="true")):
        pass
    assert "--transport s3" in str(found.value.hint)


def test_the_store_is_found_inside_its_wrappers(server: FaultyS3, transport: NixlObj) -> None:
    assert isinstance(transport._place, S3Store)
