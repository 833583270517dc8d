"""S3 in a bad mood: each failure has its own error, and no wrong byte is ever taken for a right one."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import RetryPolicy
from kvctl.core.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    ConflictError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    SizeMismatchError,
    ThrottledError,
    TransientError,
    VersionChangedError,
)
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.seaweed import SECRET_KEY, free_ports
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Op, Status
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl.transports.retry import RetryStore
from kvctl_s3.listing import parse_list
from tests.transports.s3_reads import DATA, EVERY, SIZE, get_error, read, read_error, stat_error


@pytest.mark.parametrize(
    ("status", "code", "kind", "exit_code", "words"),
    [
        (403, "AccessDenied", AuthError, 5, "access denied"),
        (403, "SignatureDoesNotMatch", AuthError, 5, "does not accept the credentials"),
        (400, "ExpiredToken", AuthError, 5, "expired"),
        (403, "RequestTimeTooSkewed", AuthError, 5, "clock is wrong"),
        (404, "NoSuchKey", NotFoundError, 4, "no such object"),
        (404, "NoSuchBucket", NotFoundError, 4, "the bucket does not exist"),
        (416, "InvalidRange", SizeMismatchError, 7, "shorter than it must be: it has 200000 bytes"),
        (503, "SlowDown", ThrottledError, 6, "slow down"),
        (429, "TooManyRequests", ThrottledError, 6, "slow down"),
        (500, "InternalError", TransientError, 6, "the server failed"),
        (301, "PermanentRedirect", ConfigError, 2, "another region"),
        (400, "AuthorizationHeaderMalformed", ConfigError, 2, "another region"),
        (412, "PreconditionFailed", VersionChangedError, 7, "changed while loading"),
        (507, "InsufficientStorage", CapacityError, 9, "no space"),
        (501, "NotImplemented", IncompatibleError, 8, "does not offer"),
    ],
)
def test_each_answer_has_its_own_error(
    server: FaultyS3, status: int, code: str, kind: type[KvctlError], exit_code: int, words: str
) -> None:
    server.add(Fault("status", methods=EVERY, status=status, code=code))
    # a small `get` takes a 416 for the object's end
    errors = [read_error(server.store())] + ([] if status == 416 else [get_error(server.store())])
    for error in errors:
        assert type(error) is kind
        assert error.exit_code == exit_code
        assert words in error.what
        assert f"HTTP {status}" in (error.cause or "")
        assert code in (error.cause or "")
        assert "dir/w.bin" in error.what or code == "NoSuchBucket"
        assert SECRET_KEY not in f"{error} {error.hint} {error.details}"
        if exit_code == 2:
            assert error.hint == "use region=us-east-1"


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "AccessDenied", AuthError, "AccessDenied"),
        (400, "ExpiredToken", AuthError, "ExpiredToken"),
        (404, "NoSuchBucket", NotFoundError, "NoSuchBucket"),
        (400, "AuthorizationHeaderMalformed", ConfigError, "AuthorizationHeaderMalformed"),
    ],
)
def test_stat_finds_out_the_code_that_a_head_does_not_carry(
    server: FaultyS3, status: int, code: str, kind: type[KvctlError], words: str
) -> None:
    server.add(Fault("status", methods=EVERY, status=status, code=code))
    error = stat_error(server.store())
    assert type(error) is kind
    assert words in (error.cause or "")


def test_a_stat_of_a_missing_key_costs_one_request_once_the_bucket_is_known(server: FaultyS3) -> None:
    store = open_store(server.store())
    store.stat("dir/w.bin")
    server.clear()
    for number in range(3):
        with pytest.raises(NotFoundError):
            store.stat(f"missing-{number}")
    store.close()
    assert [item.method for item in server.log] == ["HEAD"] * 3


@pytest.mark.parametrize("endpoint", ["refused", "unknown-host"])
def test_no_server_is_a_member_that_is_down(endpoint: str) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}" if endpoint == "refused" else "http://no-such-host.invalid"
    config = StoreConfig("s3://bucket", (url,), {"connect_timeout": "2"})
    for error in (read_error(config), stat_error(config)):
        assert type(error) is MemberDownError
        assert error.exit_code == 6
        assert url in error.what


def test_a_server_that_says_nothing_is_given_up(server: FaultyS3) -> None:
    server.add(Fault("hang", methods=EVERY))
    config = server.store(timeout="0.2")
    for error in (read_error(config), stat_error(config)):
        assert type(error) is MemberDownError
        assert "time" in f"{error.what} {error.cause}".lower()


def test_416_names_both_sizes(server: FaultyS3) -> None:
    error = read_error(server.store(), offset=SIZE + 10, length=10, size=SIZE + 100)
    assert type(error) is SizeMismatchError
    assert str(SIZE) in error.what
    assert str(SIZE + 100) in error.what


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (Fault("truncate", after=40_000), TransientError, "40000 of 50000 bytes"),
        (Fault("truncate", after=0), TransientError, "0 of 50000 bytes"),
        (Fault("reset", after=40_000), MemberDownError, "connection failed"),
        (Fault("short", amount=7), SizeMismatchError, "49993 bytes for a range of 50000"),
        (Fault("overlong", amount=7), SizeMismatchError, "50007 bytes for a range of 50000"),
        (Fault("chunked"), IncompatibleError, "in chunks"),
        (Fault("ignore-range"), IncompatibleError, "ignores Range"),
        (Fault("wrong-range", amount=5), SizeMismatchError, "another range"),
        (Fault("wrong-total", amount=5), SizeMismatchError, "has 200005 bytes, expected 200000"),
        (Fault("garbage"), IncompatibleError, "not an answer"),
    ],
)
def test_a_wrong_body_is_never_taken_for_a_right_one(
    server: FaultyS3, fault: Fault, kind: type[KvctlError], words: str
) -> None:
    server.add(fault)
    error = read_error(server.store(), size=SIZE)
    assert type(error) is kind, repr(error)
    assert words in str(error)


def test_the_connection_is_dropped_after_a_failure_and_the_next_read_is_right(server: FaultyS3) -> None:
    server.add(Fault("truncate", after=100, every=2))
    statuses = [item.status for item in read(server.store(), size=SIZE, count=6)]
    assert statuses == [Status.DONE, Status.FAILED] * 3


def test_bytes_behind_a_body_spoil_no_later_answer(server: FaultyS3) -> None:
    server.add(Fault("extra", amount=5))
    assert {item.status for item in read(server.store(), size=SIZE, count=4)} == {Status.DONE}


def test_a_whole_object_may_come_as_200(server: FaultyS3) -> None:
    server.add(Fault("ignore-range"))
    (done,) = read(server.store(), offset=0, length=SIZE, size=SIZE)
    assert done.status is Status.DONE


def test_an_object_replaced_between_two_reads_fails_the_second(server: FaultyS3) -> None:
    version = server.objects["bucket", "dir/w.bin"].etag
    server.add(Fault("replace", skip=1, times=1))
    first, second = read(server.store(), version=version, size=SIZE, count=2)
    assert first.status is Status.DONE
    assert isinstance(second.error, VersionChangedError)
    assert "changed while loading" in str(second.error)


def test_a_server_that_ignores_if_match_is_found_out_by_its_etag(server: FaultyS3) -> None:
    version = server.objects["bucket", "dir/w.bin"].etag
    server.conditional_get = False
    server.add(Fault("replace", skip=1, times=1))
    first, second = read(server.store(), version=version, size=SIZE, count=2)
    assert first.status is Status.DONE
    assert isinstance(second.error, VersionChangedError)


def test_every_read_carries_the_version_and_asks_for_exactly_its_range(server: FaultyS3) -> None:
    version = server.objects["bucket", "dir/w.bin"].etag
    read(server.store(), version=version, size=SIZE, count=3)
    assert [(item.method, item.range, item.sent, item.condition) for item in server.log] == [
        ("GET", "bytes=1000-50999", 50_000, f'"{version}"')
    ] * 3


def test_an_idle_connection_that_the_server_closed_is_no_failure(server: FaultyS3) -> None:
    """The answer is sent, then the connection goes: the next operation finds that out and connects again."""
    server.add(Fault("drop", skip=1, times=1))
    first, second = read(server.store(), size=SIZE, count=2)
    assert (first.status, first.requests) == (Status.DONE, 1)
    assert (second.status, second.requests) == (Status.DONE, 2)


def test_one_in_three_slow_down_is_retried_and_counted(server: FaultyS3) -> None:
    server.add(Fault("status", methods=EVERY, every=3))
    store = RetryStore(open_store(server.store()), RetryPolicy(base=0.0001, cap=0.001))
    assert [store.get("dir/w.bin", start, 10) for start in range(9)] == [DATA[start : start + 10] for start in range(9)]
    store.close()
    assert store.retries == sum(item.status == 503 for item in server.log)
    assert store.retries > 0
    assert sum(item.sent for item in server.log if item.status == 206) == 90


def test_slow_down_for_ever_ends_with_the_servers_words(server: FaultyS3) -> None:
    server.add(Fault("status", methods=EVERY))
    store = RetryStore(open_store(server.store()), RetryPolicy(base=0.0001, cap=0.001, attempts=5))
    with pytest.raises(ThrottledError, match="SlowDown") as caught:
        store.get("dir/w.bin")
    store.close()
    assert caught.value.exit_code == 6
    assert len(server.log) == 5


def test_a_put_whose_answer_was_lost_is_ours(server: FaultyS3) -> None:
    server.add(Fault("drop", methods=("PUT",), key="lock", times=1))
    store = RetryStore(open_store(server.store(conditional_put="true")), RetryPolicy(base=0.0001, cap=0.001))
    info = store.put("lock", b"mine", if_absent=True)
    assert info.version == server.objects["bucket", "lock"].etag
    with pytest.raises(ConflictError):
        store.put("lock", b"other", if_absent=True)
    store.close()


def test_endpoints_stand_in_for_each_other(server: FaultyS3) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    store = open_store(StoreConfig("s3://bucket", (dead, server.endpoint)))
    assert store.stat("dir/w.bin").size == SIZE
    assert store.put("new", b"x", if_absent=True).size == 1
    assert store.get("new") == b"x"
    store.close()


def test_when_no_endpoint_answers_the_last_one_is_named() -> None:
    ways = tuple(f"http://127.0.0.1:{port}" for port in free_ports(2))
    error = stat_error(StoreConfig("s3://bucket", ways))
    assert type(error) is MemberDownError
    assert any(way in error.what for way in ways)


def test_a_server_without_newer_checksums_serves(server: FaultyS3) -> None:
    server.checksums = False
    store = open_store(server.store())
    store.put("new", b"x", if_absent=True)
    store.put("new2", b"x")
    assert store.get("new") == b"x"
    assert len(list(store.list())) == 3
    store.delete(["new", "new2"])
    assert [item.key for item in store.list()] == ["dir/w.bin"]
    store.close()
    assert read(server.store())[0].status is Status.DONE


def test_a_refused_upload_is_explained_though_the_server_reads_no_more(server: FaultyS3) -> None:
    server.add(Fault("status", methods=("PUT",), status=507, code="XMinioStorageFull"))
    config = server.store()
    store = open_store(config)
    (transport,) = open_transports(config, store, choose("s3", "host"))
    buffer = GuardedBuffer(1 << 20)
    done = drive(transport, [Op(1, "write", "up", 0, 1 << 20, buffer, object_size=1 << 20)])[1]
    transport.close()
    store.close()
    buffer.close()
    assert isinstance(done.error, CapacityError)
    assert "XMinioStorageFull" in (done.error.cause or "")


def test_signed_payloads_are_accepted(server: FaultyS3) -> None:
    config = server.store()
    store = open_store(config)
    (transport,) = open_transports(config, store, choose("s3", "host"), {"payload": "signed", "threads": "2"})
    buffer = GuardedBuffer(5000)
    assert drive(transport, [Op(1, "write", "a b+ü%", 0, 5000, buffer, object_size=5000)])[1].status is Status.DONE
    transport.close()
    store.close()
    buffer.close()


def test_a_server_that_takes_no_unsigned_upload_gets_a_signed_one(server: FaultyS3) -> None:
    server.add(Fault("status", methods=("PUT",), status=400, code="XAmzContentSHA256Mismatch", times=1))
    store = open_store(server.store())
    (transport,) = open_transports(server.store(), store, choose("s3", "host"), {"threads": "1"})
    buffer = GuardedBuffer(5000)
    first = drive(transport, [Op(1, "write", "one", 0, 5000, buffer, object_size=5000)])[1]
    second = drive(transport, [Op(2, "write", "two", 0, 5000, buffer, object_size=5000)])[2]
    transport.close()
    store.close()
    assert (first.status, first.requests) == (Status.DONE, 2)
    assert (second.status, second.requests) == (Status.DONE, 1)
    assert server.objects["bucket", "one"].data == bytes(buffer.view)
    buffer.close()


def test_many_connections_read_at_once(server: FaultyS3) -> None:
    server.add(Fault("latency", seconds=0.05))
    config = server.store()
    store = open_store(config)
    (transport,) = open_transports(config, store, choose("s3", "host"), {"threads": "8"})
    buffer = GuardedBuffer(SIZE)
    piece = SIZE // 16
    ops = [Op(number, "read", "dir/w.bin", number * piece, piece, buffer, number * piece) for number in range(16)]
    done = drive(transport, ops)
    transport.close()
    store.close()
    assert {item.status for item in done.values()} == {Status.DONE}
    assert buffer.view == DATA
    buffer.close()
    assert sum(item.sent for item in server.log) == SIZE


def test_the_conditional_put_is_tried_once_and_leaves_nothing(server: FaultyS3) -> None:
    store = open_store(server.store("pre"))
    assert store.capabilities.conditional_put
    assert store.capabilities.conditional_put
    store.close()
    assert [item.method for item in server.log] == ["PUT", "PUT", "DELETE"]
    assert [key for _, key in server.objects] == ["dir/w.bin"]


@pytest.mark.parametrize(("declared", "expected"), [("true", True), ("false", False)])
def test_a_declared_conditional_put_is_not_tried(server: FaultyS3, declared: str, expected: bool) -> None:
    store = open_store(server.store(conditional_put=declared))
    assert store.capabilities.conditional_put is expected
    store.close()
    assert server.log == []


def test_the_stores_clock_is_the_servers(server: FaultyS3) -> None:
    store = open_store(server.store())
    now = store.now()
    store.close()
    assert now.microsecond == 0
    assert [item.method for item in server.log] == ["HEAD"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"<html>",
        b"<html></html>",
        b"<Error><Code>InternalError</Code></Error>",
        b"<ListBucketResult>&x;</ListBucketResult>",
        b"<!DOCTYPE a [<!ENTITY x 'y'>]><ListBucketResult/>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        b"<ListBucketResult><Contents><Key>k</Key><Size>x</Size></Contents></ListBucketResult>",
    ],
)
def test_a_list_that_is_no_list_is_refused(body: bytes) -> None:
    with pytest.raises(IncompatibleError):
        parse_list(body, "s3://bucket")


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/2 200\r\nA: b\r\n\r\n",
        b"HTTP/1.1 2000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: +5\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 5, 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
    ],
)
def test_a_malformed_head_is_refused(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(head)

        thread = threading.Thread(target=answer)
        thread.start()
        error = read_error(StoreConfig("s3://bucket", (f"http://127.0.0.1:{listener.getsockname()[1]}",)))
        thread.join()
    assert type(error) is IncompatibleError
    assert "not an answer" in error.what
