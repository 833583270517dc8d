"""A node's life: kills, drains, full disks, slow and lost peers, exact counts, and what it refuses to start with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import AuthError, CapacityError, ConfigError, EnvError, MemberDownError, UsageError
from kvctl.node.settings import contains, parse_listen, parse_networks
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.node_auth import Asked, MasterKey, ScopedKey, covers, parse_keys, parse_token, read_key_file
from kvctl.transports.registry import open_store
from tests.cases.world import kvctl, refused
from tests.node.rawhttp import Key, Raw

MIB = 1 << 20


def key_of(node: NodeProcess) -> Key:
    return Key.derived((Path(node.folder) / "master.key").read_text())


def connect(node: NodeProcess) -> Raw:
    return Raw((node.host, node.port), key_of(node))


def waits_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def files_in(folder: str) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(where, name), folder) for where, _, names in os.walk(folder) for name in names
    )


def test_a_node_killed_during_an_upload_leaves_nothing_of_it(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    node = start(folder=tmp_path / "n")
    with connect(node) as raw:
        assert raw.ask("PUT", "/v1/a/k", b"old").status == 200
        raw.send("PUT", "/v1/a/k", None, content_length=str(8 * MIB))
        raw.sock.sendall(bytes(MIB))
        waits_for(lambda: node.metrics()["kvctl_node_requests_in_flight"] == 2)
        node.kill()
    assert files_in(node.data) == ["a/k"]
    again = start(folder=tmp_path / "n")
    with connect(again) as raw:
        assert raw.ask("GET", "/v1/a/k").body == b"old"
        assert raw.ask("GET", "/v1/?uploads").body == b'{"uploads": []}'


def test_an_upload_that_ends_early_leaves_the_old_object(node: NodeProcess, fresh: str) -> None:
    with connect(node) as raw:
        raw.ask("PUT", f"/v1/{fresh}/k", b"old")
        raw.send("PUT", f"/v1/{fresh}/k", None, content_length="1000")
        raw.sock.sendall(bytes(500))
        raw.sock.shutdown(socket.SHUT_WR)
        assert raw.ended()
    with connect(node) as raw:
        assert raw.ask("GET", f"/v1/{fresh}/k").body == b"old"
    assert files_in(os.path.join(node.data, fresh)) == ["k"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_client_that_says_close_gets_its_answer_and_the_end(node: NodeProcess, fresh: str, method: str) -> None:
    with connect(node) as raw:
        raw.ask("PUT", f"/v1/{fresh}/k", b"old")
    with connect(node) as raw:
        answer = raw.ask(method, f"/v1/{fresh}/k", b"new" if method == "PUT" else None, connection="close")
        assert answer.status in {200, 204}
        assert raw.ended()


def test_a_signal_lets_requests_end(start: Callable[..., NodeProcess]) -> None:
    node = start()
    with connect(node) as busy, connect(node) as idle:
        assert idle.ask("GET", "/v1/none").status == 404
        busy.send("PUT", "/v1/k", None, content_length="10")
        busy.sock.sendall(b"12345")
        waits_for(lambda: node.metrics()["kvctl_node_requests_in_flight"] == 2)
        node.process.terminate()
        assert idle.ended(), "idle connections end at once"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((node.host, node.port))
        busy.sock.sendall(b"67890")
        answer = busy.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert node.process.wait(30) == 0
    assert (Path(node.data) / "k").read_bytes() == b"1234567890"
    assert "stopped after" in node.log()


def test_the_drain_has_an_end_and_a_second_signal_ends_it_at_once(start: Callable[..., NodeProcess]) -> None:
    short = start("--drain", "0.2")
    patient = start()
    with connect(short) as one, connect(patient) as two:
        for raw, node in ((one, short), (two, patient)):
            raw.send("PUT", "/v1/k", None, content_length="10")
            waits_for(lambda node=node: node.metrics()["kvctl_node_requests_in_flight"] == 2)  # type: ignore[misc]
        assert short.terminate() == 0
        assert "1 connections were cut" in short.log()
        patient.process.send_signal(signal.SIGTERM)
        waits_for(lambda: not listens(patient))
        patient.process.send_signal(signal.SIGTERM)
        assert patient.process.wait(30) == 143
    assert files_in(short.data) == files_in(patient.data) == []


def listens(node: NodeProcess) -> bool:
    try:
        socket.create_connection((node.host, node.port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_metrics_count_exactly(start: Callable[..., NodeProcess]) -> None:
    node = start()
    big = os.urandom(3 * MIB)
    with connect(node) as raw:
        raw.ask("PUT", "/v1/big", big)
        raw.ask("PUT", "/v1/small", b"123")
        assert raw.ask("GET", "/v1/big").body == big
        assert raw.ask("GET", "/v1/big", range="bytes=100-1048675").body == big[100:1048676]
        raw.ask("HEAD", "/v1/big")
        raw.ask("GET", "/v1/none")
        raw.ask("GET", "/v1/big", range="bytes=9999999-")
        raw.ask("DELETE", "/v1/small")
        raw.ask("GET", "/v1/big", token="bad")
        found = node.metrics()
    assert {name: value for name, value in found.items() if name.startswith("kvctl_node_requests_total")} == {
        'kvctl_node_requests_total{method="DELETE",status="204"}': 1,
        'kvctl_node_requests_total{method="GET",status="200"}': 1,
        'kvctl_node_requests_total{method="GET",status="206"}': 1,
        'kvctl_node_requests_total{method="GET",status="401"}': 1,
        'kvctl_node_requests_total{method="GET",status="404"}': 1,
        'kvctl_node_requests_total{method="GET",status="416"}': 1,
        'kvctl_node_requests_total{method="HEAD",status="200"}': 1,
        'kvctl_node_requests_total{method="PUT",status="200"}': 2,
    }
    assert found["kvctl_node_received_bytes_total"] == len(big) + 3
    assert found["kvctl_node_sent_bytes_total"] == len(big) + MIB
    assert found["kvctl_node_connections_total"] == 2
    assert found['kvctl_node_request_seconds_count{method="PUT"}'] == 2
    assert found['kvctl_node_refusals_total{code="token_malformed"}'] == 1


def test_a_reader_that_does_not_read_is_let_go(start: Callable[..., NodeProcess]) -> None:
    node = start("--body-timeout", "0.3")
    (Path(node.data) / "k").write_bytes(bytes(64 * MIB))
    with connect(node) as raw:
        raw.send("GET", "/v1/k")
        waits_for(lambda: node.metrics()["kvctl_node_connections"] == 1)
    with connect(node) as raw:
        raw.send("PUT", "/v1/new", None, content_length="10")
        raw.sock.sendall(b"12345")
        answer = raw.answer()
        assert (answer.status, answer.code) == (408, "slow")
    assert files_in(node.data) == ["k"]


def test_many_slow_readers_hold_nobody_up(start: Callable[..., NodeProcess]) -> None:
    node = start("--threads", "2")
    (Path(node.data) / "k").write_bytes(bytes(32 * MIB))
    slow = [connect(node) for _ in range(12)]
    for raw in slow:
        raw.send("GET", "/v1/k")
    with connect(node) as raw:
        for _ in range(20):
            assert len(raw.ask("GET", "/v1/k", range="bytes=0-1048575").body) == MIB
    for raw in slow:
        raw.close()


def test_a_peer_that_resets_leaves_no_descriptor(start: Callable[..., NodeProcess]) -> None:
    node = start()
    (Path(node.data) / "k").write_bytes(bytes(32 * MIB))
    with connect(node) as raw:
        raw.ask("GET", "/v1/k", range="bytes=0-10")
    before = node.metrics()["process_open_fds"]
    for number in range(30):
        raw = connect(node)
        if number % 2:
            raw.send("GET", "/v1/k")
            raw.file.read(1000)
        else:
            raw.send("PUT", "/v1/new", None, content_length="1000000")
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
    waits_for(lambda: node.metrics()["kvctl_node_connections"] == 1)
    waits_for(lambda: node.metrics()["process_open_fds"] <= before)  # objects are kept open for a second
    assert files_in(node.data) == ["k"]


def test_writers_race_with_conditions_on_one_key(node: NodeProcess, fresh: str) -> None:
    statuses: list[int] = []

    def put(number: int) -> None:
        with connect(node) as raw:
            statuses.append(raw.ask("PUT", f"/v1/{fresh}/k", b"%d" % number, if_none_match="*").status)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [412] * 15


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs needs a capability: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_before_the_body_is_sent(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    with NodeProcess.start(str(tmp_path / "n"), data=str(small_disk)) as node:
        store = open_store(node.store())
        store.put("k", bytes(MIB))
        with pytest.raises(CapacityError, match="no space"):
            store.put("big", bytes(8 * MIB))
        with connect(node) as raw:
            raw.send("PUT", "/v1/big", None, content_length=str(8 * MIB), expect="100-continue")
            assert raw.answer().status == 507
        store.put("k2", bytes(MIB))
        assert [item.key for item in store.list()] == ["k", "k2"]
        store.close()
        assert node.terminate() == 0


def test_a_file_cut_off_under_a_reader_ends_the_answer(node: NodeProcess, fresh: str) -> None:
    place = Path(node.data) / fresh
    place.mkdir()
    (place / "k").write_bytes(bytes(64 * MIB))
    with connect(node) as raw:
        raw.send("GET", f"/v1/{fresh}/k")
        assert len(raw.file.read(1000)) == 1000
        os.truncate(place / "k", 1000)
        assert len(raw.file.read()) < 64 * MIB


def test_an_object_and_a_folder_cannot_have_one_name(node: NodeProcess, fresh: str) -> None:
    store = open_store(node.store(fresh))
    store.put("a", b"x")
    with pytest.raises(UsageError):
        store.put("a/b", b"x")
    store.put("c/d", b"x")
    with pytest.raises(UsageError):
        store.put("c", b"x")
    store.close()


def test_what_a_node_does_not_start_with(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    refused(kvctl("node", "serve", data, "-o", "json"), 2, "anybody")
    refused(kvctl("node", "serve", data, "--key-file", tmp_path / "none", "-o", "json"), 2, "none", hint=False)
    refused(kvctl("node", "serve", tmp_path / "no", "--allow-unauthenticated", "::1", "-o", "json"), 10, "no")
    refused(kvctl("node", "serve", data, "--allow-unauthenticated", "1.2.3.4/99", "-o", "json"), 2, "network")
    refused(
        kvctl("node", "serve", data, "--allow-unauthenticated", "::1", "--rdma", "require", "-o", "json"), 10, "RDMA"
    )
    refused(
        kvctl("node", "serve", data, "--allow-unauthenticated", "::1", "--tls-cert", tmp_path / "none", "-o", "json"),
        2, "certificate",
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        refused(
            kvctl("node", "serve", data, "--allow-unauthenticated", "::1", "--listen", at, "-o", "json"), 10, at,
            hint=False,
        )  # fmt: skip


def test_keys_are_made_once_and_kept_to_their_owner(tmp_path: Path) -> None:
    master, client = tmp_path / "m.key", tmp_path / "c.key"
    done = kvctl("node", "key", master, "-o", "json")
    assert (done.code, master.stat().st_mode & 0o777) == (0, 0o600)
    assert master.read_text().rpartition(".")[2].strip() not in done.out + done.err
    refused(kvctl("node", "key", master, "-o", "json"), 2, "exists")
    assert kvctl("node", "token", client, "--key-file", master, "--scope", "rw", "--prefix", "/a/b/").code == 0
    (made,) = read_key_file(str(client))
    assert isinstance(made, ScopedKey)
    assert (made.rights, made.prefix) == ("rw", "a/b")
    refused(kvctl("node", "token", tmp_path / "x", "--key-file", client, "-o", "json"), 2, "client")
    client.chmod(0o644)
    with pytest.raises(AuthError, match="others"):
        read_key_file(str(client))


def test_a_client_without_the_right_key_is_told_what_to_do(
    node: NodeProcess, fresh: str, tmp_path: Path, start: Callable[..., NodeProcess]
) -> None:
    other = start()
    foreign = open_store(node.store(fresh, options={"key_file": other.key_file()}))
    with pytest.raises(AuthError, match="not of this node") as caught:
        foreign.get("k")
    assert "key_file" in (caught.value.hint or "")
    foreign.close()
    gone = open_store(other.store())
    other.kill()
    with pytest.raises(MemberDownError):
        gone.get("k")
    gone.close()
    for options, kind in (
        ({"nonsense": "1"}, UsageError),
        ({"key_file": "/no/such"}, ConfigError),
        ({"tls": "maybe"}, UsageError),
    ):
        with pytest.raises(kind):
            open_store(node.store(fresh, options=options))


def test_a_plain_client_and_a_tls_node_do_not_hang(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    from tests.node.test_node_contracts import certificate

    certificate(tmp_path)
    node = start("--tls-cert", str(tmp_path / "node.pem"), "--tls-key", str(tmp_path / "node.key"))
    plain = open_store(node.store(options={"tls": "false"}))
    with pytest.raises(MemberDownError):
        plain.get("k")
    plain.close()
    untrusted = open_store(node.store())
    with pytest.raises(EnvError, match="TLS"):
        untrusted.get("k")
    untrusted.close()


def test_keys_derive_and_tokens_parse() -> None:
    master = MasterKey(bytes(range(32)))
    key = master.scoped("ro", "/models/")
    assert (key.prefix, parse_keys(f"# mine\n\n{key.text()}\n", "x")) == ("models", [key])
    assert "secret" not in repr(master) or "***" in repr(master)
    assert key.secret.hex() not in repr(key)
    token = parse_token(key.token(Asked("GET", "/v1/models/a"), now=1000.5))
    assert token is not None
    assert (token.key_id, token.rights, token.prefix, token.expiry, token.issued) == (
        master.key_id, "ro", "models", 1060, 1000.5,
    )  # fmt: skip
    assert master.scoped("rw", "models").secret != key.secret
    assert [covers("a/b", text) for text in ("a/b", "a/b/c", "a/bc", "a", "")] == [True, True, False, False, False]
    assert covers("", "anything")
    for bad in ("", "junk", "kvctl-node-master.v1.00"):
        with pytest.raises(ConfigError):
            parse_keys(bad, "x")


def test_where_to_listen_and_whom_to_trust() -> None:
    assert parse_listen("127.0.0.1:1") == ("127.0.0.1", 1)
    assert parse_listen("[::1]:2") == ("::1", 2)
    assert parse_listen("host") == ("host", 7780)
    assert parse_listen("::1") == ("::1", 7780)
    assert parse_listen(":7780") == ("0.0.0.0", 7780)
    assert parse_listen("[::]:0") == ("::", 0)
    for bad in ("a:b", "a:99999", "", ":", "[", "[]:80", "0", "7780", "./x", "a:²", "a b:1"):
        with pytest.raises(UsageError):
            parse_listen(bad)
    networks = parse_networks(["10.0.0.0/8", "::1"])
    answers = {"10.1.2.3": True, "11.0.0.1": False, "::1": True, "::ffff:10.0.0.1": True, "fe80::1%eth0": False}
    assert {text: contains(networks, text) for text in answers} == answers
