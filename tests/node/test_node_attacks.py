"""What an attacker tries, each tried on a real node; and the protocol itself, by a client of its own."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.testing.nodes import NodeProcess
from tests.node.rawhttp import Key, Raw


@pytest.fixture
def key(node: NodeProcess) -> Key:
    return Key.derived((Path(node.folder) / "master.key").read_text())


@pytest.fixture
def raw(node: NodeProcess, key: Key) -> Iterator[Raw]:
    with Raw((node.host, node.port), key) as found:
        yield found


def derived(node: NodeProcess, rights: str, prefix: str = "") -> Key:
    return Key.derived((Path(node.folder) / "master.key").read_text(), rights, prefix)


def test_the_protocol_by_a_client_of_its_own(raw: Raw, fresh: str) -> None:
    at = f"/v1/{fresh}/a%20b"
    made = raw.ask("PUT", at, b"0123456789", if_none_match="*")
    assert made.status == 200
    version = made.headers["etag"]
    assert raw.ask("PUT", at, b"x", if_none_match="*").status == 412
    head = raw.ask("HEAD", at)
    assert (head.status, head.headers["content-length"], head.headers["etag"]) == (200, "10", version)
    assert {"last-modified", "date"} <= set(head.headers)
    part = raw.ask("GET", at, range="bytes=2-4", if_match=version)
    assert (part.status, part.body, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    assert raw.ask("GET", at, range="bytes=-3").body == b"789"
    assert raw.ask("GET", at, range="bytes=7-").body == b"789"
    assert raw.ask("GET", at, range="bytes=8-99").body == b"89"
    beyond = raw.ask("GET", at, range="bytes=10-11")
    assert (beyond.status, beyond.headers["content-range"]) == (416, "bytes */10")
    assert raw.ask("GET", at, range="bytes=1-2,4-5").status == 400
    assert raw.ask("GET", at, range="bytes=5-2").status == 400
    assert raw.ask("GET", at, if_match='"other"').status == 412
    assert raw.ask("PUT", at, b"new", if_match='"other"').status == 412
    assert raw.ask("PUT", at, b"new", if_match=version).status == 200
    assert raw.ask("GET", f"/{fresh}/a%20b").body == b"new", "the form without /v1"
    listed = raw.ask("GET", f"/v1/?prefix={fresh}/&after=&limit=1")
    assert b'"more": false' in listed.body
    assert b'"size": 3' in listed.body
    assert raw.ask("DELETE", at).status == 204
    assert raw.ask("DELETE", at).status == 204
    assert raw.ask("GET", at).status == 404
    assert raw.ask("GET", "/healthz", token="").status == 200


def test_expect_100_continue(raw: Raw, fresh: str) -> None:
    raw.send("PUT", f"/v1/{fresh}/k", None, content_length="4", expect="100-continue")
    assert raw.answer().status == 100
    raw.sock.sendall(b"body")
    assert raw.answer().status == 200
    assert raw.ask("GET", f"/v1/{fresh}/k").body == b"body"


def test_requests_may_be_pipelined(raw: Raw, fresh: str) -> None:
    raw.send("PUT", f"/v1/{fresh}/k", b"one")
    raw.send("GET", f"/v1/{fresh}/k")
    raw.send("GET", f"/v1/{fresh}/none")
    assert [raw.answer().status for _ in range(3)] == [200, 200, 404]


def test_no_token_no_service(node: NodeProcess, fresh: str) -> None:
    with Raw((node.host, node.port)) as raw:
        for method in ("GET", "HEAD", "DELETE"):
            assert raw.ask(method, f"/v1/{fresh}/k").status == 401
        assert raw.ask("GET", "/v1/?prefix=").status == 401
        refused = raw.ask("PUT", f"/v1/{fresh}/k", b"data")
        assert (refused.status, refused.code) == (401, "token_missing")
    assert not (Path(node.data) / fresh).exists()


def test_forged_expired_and_foreign_tokens(node: NodeProcess, key: Key, raw: Raw, fresh: str) -> None:
    at = f"/v1/{fresh}/k"
    good = key.token("GET", at)
    last = "0" if good[-1] != "0" else "1"
    cases = {
        good[:-1] + last: "token_forged",
        key.token("GET", at + "2"): "token_forged",
        key.token("PUT", at): "token_forged",
        key.token("GET", at, span="bytes=0-1"): "token_forged",
        good.replace(".rw:", ".ro:"): "token_forged",
        key.token("GET", at, expiry=int(time.time()) - 1): "token_expired",
        key.token("GET", at, expiry=int(time.time()) + 3600): "token_too_long",
        Key("deadbeef", "rw", "", os.urandom(32)).token("GET", at): "key_unknown",
        Key(key.key_id, "rw", "", os.urandom(32)).token("GET", at): "token_forged",
        "v1.junk": "token_malformed",
        "x" * 2000: "token_malformed",
    }
    for token, code in cases.items():
        answer = raw.ask("GET", at, token=token)
        assert (answer.status, answer.code) == (401, code), code
    assert raw.ask("GET", at, token=good).status == 404
    assert node.metrics()['kvctl_node_refusals_total{code="token_expired"}'] >= 1


def test_a_write_cannot_be_replayed(node: NodeProcess, raw: Raw, key: Key, fresh: str) -> None:
    at = f"/v1/{fresh}/k"
    put = key.token("PUT", at)
    assert raw.ask("PUT", at, b"one", token=put).status == 200
    again = raw.ask("PUT", at, b"two", token=put)
    assert (again.status, again.code) == (401, "token_replayed")
    delete = key.token("DELETE", at)
    with Raw((node.host, node.port), key) as other:
        assert other.ask("GET", at).body == b"one"
        assert other.ask("DELETE", at, token=delete).status == 204
        assert other.ask("DELETE", at, token=delete).code == "token_replayed"
        read = key.token("GET", at)
        assert [other.ask("GET", at, token=read).status for _ in range(2)] == [404, 404], "reads may be repeated"


def test_after_a_restart_an_old_token_for_a_write_is_refused(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    first = start(folder=tmp_path / "n")
    key = Key.derived((tmp_path / "n" / "master.key").read_text())
    old = key.token("PUT", "/v1/k")
    with Raw((first.host, first.port), key) as raw:
        assert raw.ask("PUT", "/v1/k", b"one", token=old).status == 200
    first.kill()
    second = start(folder=tmp_path / "n")
    with Raw((second.host, second.port), key) as raw:
        answer = raw.ask("PUT", "/v1/k", b"two", token=old)
        assert (answer.status, answer.code) == (503, "restarted")
    with Raw((second.host, second.port), key) as raw:
        assert raw.ask("GET", "/v1/k").body == b"one"


def test_scopes(node: NodeProcess, fresh: str) -> None:
    reader, writer = derived(node, "ro", fresh), derived(node, "rw", f"{fresh}/in")
    with Raw((node.host, node.port), writer) as raw:
        assert raw.ask("PUT", f"/v1/{fresh}/in/k", b"data").status == 200
        for at in (f"/v1/{fresh}/k", f"/v1/{fresh}/inside/k", f"/v1/{fresh}/in%2F..%2Fk", "/v1/k"):
            assert raw.ask("GET", at).status in {400, 403}
        assert raw.ask("GET", f"/v1/?prefix={fresh}/in/").status == 200
        for prefix in ("", fresh, f"{fresh}/in", f"{fresh}/i"):
            assert raw.ask("GET", f"/v1/?prefix={prefix}").status == 403
        assert raw.ask("DELETE", f"/v1/?upload={fresh}/other.kvctl-tmp").status == 403
    with Raw((node.host, node.port), reader) as raw:
        assert raw.ask("GET", f"/v1/{fresh}/in/k").body == b"data"
        assert raw.ask("DELETE", f"/v1/{fresh}/in/k").code == "scope"
        assert raw.ask("PUT", f"/v1/{fresh}/in/k", b"").code == "scope"


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../secret", "/v1/%2e%2e/secret", "/v1/a/../../secret", "/v1/a/%2e%2e/%2e%2e/secret", "/v1/..%2fsecret",
        "/v1//secret", "/v1/a//b", "/v1/a/", "/v1/./a", "/v1/a%00b", "/v1/%c0%ae%c0%ae/secret", "/v1/%ff", "/v1/%2",
        "/v1/%zz", "/v1/" + "a" * 256, "/v1/" + "a/" * 600 + "b", "/v1/k.kvctl-tmp", "//secret", "/../secret",
        "/%2e%2e/secret", "/v1/?prefix=../", "/v1/?prefix=a//b", "/v1/?prefix=%00", "/v1/?nonsense=1", "/v1/?limit=0",
        "/v1/?limit=1001", "/v1/?prefix=a&prefix=b",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
def test_no_key_leads_out_of_the_directory(node: NodeProcess, raw: Raw, target: str, method: str) -> None:
    secret = Path(node.folder) / "secret"
    secret.write_bytes(b"secret")
    answer = raw.ask(method, target, b"" if method == "PUT" else None)
    assert answer.status in {400, 405}, answer
    assert secret.read_bytes() == b"secret"


def test_a_copy_reads_and_writes_where_the_token_may(node: NodeProcess, raw: Raw, fresh: str) -> None:
    place = Path(node.data) / fresh
    (Path(node.folder) / "secret").write_bytes(b"secret")
    version = raw.ask("PUT", f"/v1/{fresh}/in/k", b"data").headers["etag"]
    raw.ask("PUT", f"/v1/{fresh}/k", b"not yours")
    (place / "in" / "out").symlink_to(Path(node.folder) / "secret")
    made = raw.ask("COPY", f"/v1/{fresh}/in/new?from={fresh}/in/k", if_match=version)
    assert (made.status, made.headers["etag"], json.loads(made.body)) == (200, version, {"size": 4, "shared": True})
    assert (place / "in" / "new").read_bytes() == b"data"
    for query, code in (("", 400), (f"?from={fresh}/in/k&x=1", 400), (f"?from={fresh}/in/none", 404)):
        assert raw.ask("COPY", f"/v1/{fresh}/in/b{query}", if_match=version).status == code
    for source in ("../secret", "%2e%2e/secret", "/etc/passwd", f"{fresh}/in/out", f"{fresh}/in"):
        assert raw.ask("COPY", f"/v1/{fresh}/in/b?from={source}", if_match=version).status in {400, 403, 404}
    assert raw.ask("COPY", f"/v1/{fresh}/in/b?from={fresh}/in/k").status == 400
    assert raw.ask("COPY", f"/v1/{fresh}/in/b?from={fresh}/in/k", if_match='"1-2-3"').status == 412
    with Raw((node.host, node.port), derived(node, "rw", f"{fresh}/in")) as scoped:
        assert scoped.ask("COPY", f"/v1/{fresh}/in/b?from={fresh}/k", if_match=version).code == "scope"
        assert scoped.ask("COPY", f"/v1/{fresh}/b?from={fresh}/in/k", if_match=version).code == "scope"
    with Raw((node.host, node.port), derived(node, "ro", fresh)) as reader:
        assert reader.ask("COPY", f"/v1/{fresh}/in/b?from={fresh}/in/k", if_match=version).code == "scope"
    assert sorted(path.name for path in (place / "in").iterdir()) == ["k", "new", "out"]


def test_links_are_followed_inside_the_directory_only(node: NodeProcess, raw: Raw, fresh: str) -> None:
    place = Path(node.data) / fresh
    place.mkdir()
    (Path(node.folder) / "outside").mkdir(exist_ok=True)
    (Path(node.folder) / "outside" / "secret").write_bytes(b"secret")
    (place / "blob").write_bytes(b"inside")
    (place / "good").symlink_to("blob")
    (place / "bad").symlink_to("../../outside/secret")
    (place / "absolute").symlink_to(Path(node.folder) / "outside" / "secret")
    (place / "folder").symlink_to("../../outside")
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    assert raw.ask("GET", f"/v1/{fresh}/good").body == b"inside"
    for name in ("bad", "absolute", "folder/secret", "loop"):
        assert raw.ask("GET", f"/v1/{fresh}/{name}").status in {403, 404}, name
        assert raw.ask("HEAD", f"/v1/{fresh}/{name}").status in {403, 404}, name
    assert raw.ask("GET", f"/v1/{fresh}/fifo").status == 404
    assert raw.ask("DELETE", f"/v1/{fresh}/folder/secret").status in {204, 403}
    assert raw.ask("PUT", f"/v1/{fresh}/folder/new", b"x").status in {400, 403}
    listed = raw.ask("GET", f"/v1/?prefix={fresh}/").body
    assert b"good" in listed
    assert not any(name in listed for name in (b"bad", b"absolute", b"secret", b"loop", b"fifo"))
    assert raw.ask("PUT", f"/v1/{fresh}/bad", b"replaced").status == 200, "the link itself is replaced"
    assert (Path(node.folder) / "outside" / "secret").read_bytes() == b"secret"
    assert sorted(item.name for item in (Path(node.folder) / "outside").iterdir()) == ["secret"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/k HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 20000 + b"\r\n\r\n", 431),
        (b"GET /v1/" + b"k" * 20000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /v1/k HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % n for n in range(100)) + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /v1/k HTTP/2.0\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET /v1/k HTTP/1.1\r\nhost : x\r\n\r\n", 400),
        (b"GET /v1/k HTTP/1.1\r\nrange: bytes=0-1\r\nrange: bytes=0-2\r\n\r\n", 400),
        (b"GET /v1/k HTTP/1.1\r\na: b\r\n c\r\n\r\n", 400),
        (b"PUT /v1/k HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"PUT /v1/k HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"PUT /v1/k HTTP/1.1\r\ncontent-length: 1e3\r\n\r\n", 400),
        (b"PUT /v1/k HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n", 400),
        (b"PUT /v1/k HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 411),
        (b"POST /v1/k HTTP/1.1\r\ncontent-length: 0\r\n\r\n", 405),
        (b"PUT /v1/k HTTP/1.1\r\n\r\n", 401),
    ],
    ids=range(16),
)
def test_malformed_heads_are_refused(node: NodeProcess, head: bytes, status: int) -> None:
    with Raw((node.host, node.port)) as raw:
        raw.sock.sendall(head)
        assert raw.answer().status == status
        if status in {400, 411, 431}:
            assert raw.ended()


def test_a_node_without_rdma_says_so(node: NodeProcess, raw: Raw, fresh: str) -> None:
    raw.ask("PUT", f"/v1/{fresh}/k", b"data")
    token = "127.0.0.1:9:0x0000000000001000:0x00001000:0x00000001"
    answer = raw.ask("GET", f"/v1/{fresh}/k", x_scal_rdma=token)
    assert (answer.status, answer.code) == (501, "no_rdma")
    answer = raw.ask("PUT", f"/v1/{fresh}/k2", b"", x_scal_rdma=token)
    assert (answer.status, answer.code) == (501, "no_rdma")
    assert "0x00001000" not in node.log(), "tokens are in no log"


def test_more_connections_than_allowed(start: Callable[..., NodeProcess]) -> None:
    node = start("--max-connections", "4")
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    address = (node.host, node.port)
    busy = [Raw(address, key) for _ in range(4)]
    for raw in busy:
        raw.send("PUT", "/v1/k", None, content_length="5")  # their bodies never come
    while connections(node, read=True) < 4:
        time.sleep(0.01)
    with Raw(address, key) as fifth:
        assert fifth.answer().status == 503
        assert fifth.ended()
    busy[0].sock.sendall(b"hello")
    assert busy[0].answer().status == 200
    with Raw(address, key) as sixth:  # the first one is idle now: it makes room
        assert sixth.ask("GET", "/v1/k").body == b"hello"
        assert busy[0].ended()
    for raw in busy:
        raw.close()


def connections(node: NodeProcess, *, read: bool = False) -> int:
    """Open sockets of the node's port, past the node itself, which would need a connection to tell. `read`: those from
    which it has taken all that came: one that was not begun with is idle, and makes room.
    """
    with open("/proc/net/tcp", encoding="ascii") as file:
        lines = file.read().splitlines()[1:]
    local = f"0100007F:{node.port:04X}"
    found = [words for words in map(str.split, lines) if words[1] == local and words[3] == "01"]
    return sum(1 for words in found if not read or int(words[4].split(":")[1], 16) == 0)


def test_a_trickle_of_a_head_is_ended(start: Callable[..., NodeProcess]) -> None:
    node = start("--head-timeout", "1")
    with Raw((node.host, node.port)) as raw:
        raw.sock.sendall(b"GET /v1/k HTTP/1.1\r\n")
        assert raw.ended()
    with socket.create_connection((node.host, node.port)) as other:
        other.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 200")


def test_a_swarm_of_slow_loris_locks_nobody_out_for_long(start: Callable[..., NodeProcess]) -> None:
    node = start("--max-connections", "4", "--head-timeout", "0.5")
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    over = threading.Event()

    def loris() -> None:
        """Sends heads byte by byte, and comes back each time that it is thrown out."""
        while not over.is_set():
            try:
                with socket.create_connection((node.host, node.port), timeout=10) as sock:
                    for byte in b"GET /v1/k HTTP/1.1\r\n" + b"a: b\r\n" * 1000:
                        sock.sendall(bytes([byte]))
                        if over.wait(0.05):
                            return
            except OSError:
                continue

    swarm = [threading.Thread(target=loris) for _ in range(6)]
    for thread in swarm:
        thread.start()
    try:
        answered, refused, deadline = 0, 0, time.monotonic() + 60
        while answered < 5 or not refused:
            assert time.monotonic() < deadline, f"{answered} requests were answered in a minute, {refused} refused"
            try:
                with Raw((node.host, node.port), key) as raw:
                    status = raw.ask("GET", "/v1/k").status
                    answered += status == 404
                    refused += status == 503
            except OSError:  # refused, or ended as one too many
                continue
    finally:
        over.set()
        for thread in swarm:
            thread.join()
    assert node.metrics()["kvctl_node_connections_refused_total"] > 0
