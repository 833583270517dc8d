"""The node's quick way for reads: it means what the careful way means, and what it keeps open is never stale."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.node.answers import rdma_token
from kvctl.node.guard import Guard
from kvctl.node.messages import HttpError, parse_request
from kvctl.node.metrics import Metrics
from kvctl.node.openfiles import OpenFiles
from kvctl.node.plain import PlainChannel
from kvctl.node.quick import Ask, QuickReads
from kvctl.node.settings import Limits
from kvctl.node.tree import Tree
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.node_auth import RDMA_HEADERS, TOKEN_HEADER, Asked, MasterKey
from tests.node.rawhttp import Key, Raw

MIB = 1 << 20


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Mostly of the form that is understood, with parts swapped, repeated, dropped or damaged."""
    target = draw(st.sampled_from(["/v1/a/b", "/v1/../b", "/v1//", "/v1/%61", "/v1/a?x=1", "/a", "/v1/a b", "/v1/é"]))
    version = draw(st.sampled_from(["1.1", "1.1", "1.1", "1.0"]))
    fields = [
        "host: n:1", "user-agent: kvctl",
        draw(st.sampled_from([f"{TOKEN_HEADER}: v1.a", f"{TOKEN_HEADER.upper()}: x", f"{TOKEN_HEADER}:x", ""])),
        draw(st.sampled_from(["range: bytes=0-9", "range: bytes=5-", "range: bytes=9-1", "range: bytes=00-007", ""])),
        draw(st.sampled_from(['if-match: "v"', "if-match: *", 'if-match: "a", "b"', "if-match: v", ""])),
        draw(st.sampled_from(["", "x-scal-rdma: t", "x-rdma-info: t", "X-Scal-Rdma: t", "x-scal-rdma: a b"])),
        draw(st.sampled_from(["", "content-length: 3", "x-scal-rdma: t", "connection: close", " folded", "a\tb: c"])),
    ]  # fmt: skip
    if draw(st.booleans()):
        fields = draw(st.permutations(fields))
    fields = [field for field in fields if field]
    if draw(st.integers(0, 9)) == 0:
        fields.append(draw(st.sampled_from(fields)))
    head = "\r\n".join([f"GET {target} HTTP/{version}", *fields]) + "\r\n\r\n"
    data = head.encode("latin-1")
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(data) - 1))
        data = data[:place] + draw(st.binary(min_size=0, max_size=2)) + data[place + 1 :]
    return data


@given(heads())
def test_what_the_quick_way_understands_means_the_same_to_the_careful_way(head: bytes) -> None:
    try:
        ask = Ask(head)
    except ValueError:
        return
    request = parse_request(head, 64)
    assert (request.method, request.target) == ("GET", ask.asked.target)
    assert request.path == f"/v1/{ask.key}"
    assert (request.get("range"), request.get("if-match")) == (ask.asked.range, ask.asked.if_match)
    assert request.get(TOKEN_HEADER) == ask.token
    assert (request.length, request.keep_alive, dict(request.query)) == (0, True, {})
    assert set(request.headers) <= {"host", "user-agent", TOKEN_HEADER, "range", "if-match", *RDMA_HEADERS}
    assert ask.asked.rdma == ask.rdma
    assert rdma_token(request) == (ask.rdma, ask.dialect if ask.rdma else "scal")
    if ask.first is not None:
        assert ask.asked.range.startswith(f"bytes={head.decode().split('bytes=')[1].split('-')[0]}-")


def test_the_form_that_our_client_writes_is_understood() -> None:
    from kvctl_native.route import Route
    from kvctl_native.settings import NodeAccess, parse_place

    key = MasterKey(bytes(32)).scoped("ro", "models")
    place = parse_place("127.0.0.1:1")
    route = Route(NodeAccess("node://127.0.0.1:1", "", (place,), key, None, 1.0, 1.0), place)
    ask = Ask(route.read_head("models/a", 5, 9, "v1"))
    assert (ask.key, ask.first, ask.last, ask.version) == ("models/a", 5, 9, "v1")
    assert Ask(route.read_head("models/a", 0, 0, None)).version is None
    assert Ask(route.head("GET", "models/a")).first is None
    for header, dialect in zip(RDMA_HEADERS, ("scal", "s3"), strict=True):
        ask = Ask(route.head("GET", "models/a", span=(5, 9), if_match="v", rdma="1.2.3.4:5:0x6", rdma_header=header))
        assert (ask.rdma, ask.dialect, ask.first, ask.version) == ("1.2.3.4:5:0x6", dialect, 5, "v")
    # the many reads have a writer of their own: it writes what the general one does, but for the token
    general = route.head("GET", "models/é", span=(5, 9), if_match="v").split(b"\r\n")
    own = route.read_head("models/é", 5, 9, "v").split(b"\r\n")
    assert [line for line in own if b"token" not in line] == [line for line in general if b"token" not in line]
    with pytest.raises(ValueError, match="form"):  # an escape is for the careful way
        Ask(route.read_head("models/é", 5, 9, "v"))


@given(st.text(max_size=300), st.text(max_size=40), st.text(max_size=300))
def test_tokens_are_framed_as_specified_whatever_is_in_them(span: str, match: str, rdma: str) -> None:
    from kvctl.transports.node_auth import parse_token

    text = [value.encode("utf-8", "ignore").decode() for value in (span, match, rdma)]
    master = MasterKey(bytes(range(32)))
    ours = master.scoped("rw", "p").token(Asked("GET", "/v1/p/k", text[0], text[1], "", text[2]))
    found = parse_token(ours)
    assert found is not None
    theirs = Key.derived(master.text(), "rw", "p").token(
        "GET", "/v1/p/k", span=text[0], if_match=text[1], rdma=text[2], expiry=found.expiry, nonce=found.nonce
    )
    assert theirs == ours


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    found = Tree(str(tmp_path))
    yield found
    found.close()


def test_an_object_is_kept_open_only_while_its_key_names_it_unchanged(tree: Tree, tmp_path: Path) -> None:
    files = OpenFiles(tree)
    place = tmp_path / "a" / "k"
    place.parent.mkdir()
    place.write_bytes(b"one")
    first = files.take("a/k")
    assert files.take("a/k") is first
    for change in (
        lambda: place.write_bytes(b"two!"),
        lambda: os.replace(_other(tmp_path), place),
        lambda: os.utime(place, ns=(1, 1)),
        lambda: place.chmod(0o600),
        lambda: _new_folder(place),
    ):
        before = files.take("a/k")
        change()
        assert files.take("a/k") is not before
    place.unlink()
    with pytest.raises(Exception, match="no such object"):
        files.take("a/k")
    assert os.pread(first.fd, 3, 0), "a user's descriptor stays good until it is given back"
    files.close()


def _new_folder(place: Path) -> None:
    place.parent.rename(place.parent.with_name("moved"))
    place.parent.mkdir()
    place.write_bytes(b"three")


def _other(folder: Path) -> Path:
    (folder / "other").write_bytes(b"four")
    return folder / "other"


def test_what_nobody_uses_is_closed(tree: Tree, tmp_path: Path) -> None:
    before = _open_files()
    files = OpenFiles(tree)
    for number in range(300):  # more than it keeps
        (tmp_path / f"k{number}").write_bytes(b"x")
        files.take(f"k{number}").release()
    held = files.take("k299")
    assert before + 200 < _open_files() <= before + 257
    deadline = time.monotonic() + 30
    while _open_files() > before + 1:
        assert time.monotonic() < deadline
        files.sweep()
        time.sleep(0.05)
    assert os.pread(held.fd, 1, 0) == b"x"
    held.release()
    assert _open_files() == before
    files.close()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def ours(key: Key, at: str, span: str) -> bytes:
    token = key.token("GET", at, span=span)
    return (
        f"GET {at} HTTP/1.1\r\nhost: n\r\nuser-agent: kvctl\r\nx-kvctl-token: {token}\r\nrange: {span}\r\n\r\n".encode()
    )


def test_replaced_deleted_and_cut_objects_are_seen_at_once(node: NodeProcess, fresh: str) -> None:
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    at = f"/v1/{fresh}/k"
    place = Path(node.data) / fresh / "k"
    place.parent.mkdir()

    def read(raw: Raw) -> tuple[int, bytes]:
        raw.sock.sendall(ours(key, at, "bytes=0-9"))
        answer = raw.answer()
        return answer.status, answer.body

    with Raw((node.host, node.port), key) as raw, Raw((node.host, node.port), key) as other:
        for turn in range(20):
            data = b"%010d" % turn
            if turn % 2:
                place.write_bytes(data)
            else:
                assert other.ask("PUT", at, data).status == 200
            assert read(raw) == (206, data)
            assert read(raw) == (206, data)
        assert other.ask("DELETE", at).status == 204
        assert read(raw)[0] == 404
        place.write_bytes(b"short")
        assert read(raw) == (206, b"short")
        place.unlink()
        place.symlink_to("/etc/hostname")
        assert read(raw)[0] == 403


def test_cold_and_large_bodies_and_requests_behind_them(start: Callable[..., NodeProcess]) -> None:
    node = start()
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    data = os.urandom(24 * MIB)
    place = Path(node.data) / "k"
    place.write_bytes(data)
    with Raw((node.host, node.port), key) as raw:
        for cold in (False, True):
            if cold:
                with open(place, "rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            # several at once: the later ones wait in the socket while the first, larger than its buffers, is sent
            raw.sock.sendall(ours(key, "/v1/k", f"bytes=1-{len(data) - 2}"))
            raw.sock.sendall(ours(key, "/v1/k", "bytes=100-199") + ours(key, "/v1/k", "bytes=0-0"))
            raw.send("GET", "/v1/none")
            answers = [raw.answer() for _ in range(4)]
            assert [answer.status for answer in answers] == [206, 206, 206, 404]
            assert answers[0].body == data[1:-1]
            assert (answers[1].body, answers[2].body) == (data[100:200], data[:1])
    assert node.metrics()["kvctl_node_sent_bytes_total"] == 2 * (len(data) - 2 + 101)
    assert node.metrics()["kvctl_node_requests_in_flight"] == 1


def test_large_uploads_are_stored_as_sent(node: NodeProcess, fresh: str) -> None:
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    with Raw((node.host, node.port), key) as raw:
        for size in (MIB - 1, MIB, 5 * MIB + 13):
            data = os.urandom(size)
            raw.send("PUT", f"/v1/{fresh}/k", None, content_length=str(size))
            for start in range(0, size, 700_001):  # pieces that meet no boundary of pages or pipes
                raw.sock.sendall(data[start : start + 700_001])
            assert raw.answer().status == 200
            assert (Path(node.data) / fresh / "k").read_bytes() == data


def test_a_head_that_is_damaged_is_refused_as_ever(node: NodeProcess, fresh: str) -> None:
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    good = ours(key, f"/v1/{fresh}/k", "bytes=0-1")
    for bad, status in ((good.replace(b"host: n", b"host : n"), 400), (good.replace(b"bytes=0-1", b"bytes=0-2"), 401)):
        with Raw((node.host, node.port), key) as raw:
            raw.sock.sendall(bad)
            assert raw.answer().status == status
    with pytest.raises(HttpError):
        parse_request(good.replace(b"host: n", b"host : n"), 64)


@pytest.mark.parametrize(
    "target", ["/v1/../secret", "/v1//secret", "/v1/a/../../secret", "/v1/./a", "/v1/a/", "/v1/.."]
)
def test_the_quick_way_leads_nowhere_else(node: NodeProcess, target: str) -> None:
    (Path(node.folder) / "secret").write_bytes(b"secret")
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    with Raw((node.host, node.port), key) as raw:
        raw.sock.sendall(ours(key, target, "bytes=0-9"))
        assert raw.answer().status == 400


def test_the_quick_way_knows_foreign_expired_and_narrow_keys(node: NodeProcess, fresh: str) -> None:
    master = (Path(node.folder) / "master.key").read_text()
    key = Key.derived(master)
    at = f"/v1/{fresh}/k"
    with Raw((node.host, node.port), key) as raw:
        assert raw.ask("PUT", at, b"0123456789").status == 200
        raw.sock.sendall(ours(key, at, "bytes=0-9"))  # it is open and known now
        assert raw.answer().status == 206
        span = "bytes=0-9"
        cases = [
            (Key.derived(master, "ro", "elsewhere").token("GET", at, span=span), 403),
            (Key(key.key_id, "rw", "", os.urandom(32)).token("GET", at, span=span), 401),
            (Key("deadbeef", "rw", "", os.urandom(32)).token("GET", at, span=span), 401),
            (key.token("GET", at, span=span, expiry=int(time.time()) - 1), 401),
            (key.token("GET", at, span="bytes=0-8"), 401),
            (key.token("GET", at, span=span), 206),
        ]
        for token, status in cases:
            head = (
                f"GET {at} HTTP/1.1\r\nhost: n\r\nuser-agent: kvctl\r\nx-kvctl-token: {token}\r\nrange: {span}\r\n\r\n"
            )
            raw.sock.sendall(head.encode())
            assert raw.answer().status == status
        raw.sock.sendall(f"GET {at} HTTP/1.1\r\nhost: n\r\nuser-agent: kvctl\r\nrange: {span}\r\n\r\n".encode())
        assert raw.answer().status == 401


def test_a_reader_of_the_quick_way_that_does_not_read_is_let_go(start: Callable[..., NodeProcess]) -> None:
    node = start("--body-timeout", "0.3")
    key = Key.derived((Path(node.folder) / "master.key").read_text())
    (Path(node.data) / "k").write_bytes(bytes(64 * MIB))
    with Raw((node.host, node.port), key) as slow, Raw((node.host, node.port), key) as other:
        slow.sock.sendall(ours(key, "/v1/k", f"bytes=0-{64 * MIB - 1}"))
        deadline = time.monotonic() + 60
        while node.metrics()["kvctl_node_connections"] > 2:  # the other one, and the one that asks
            other.sock.sendall(ours(key, "/v1/k", "bytes=0-0"))
            assert other.answer().body == b"\0"
            assert time.monotonic() < deadline
        assert node.metrics()["kvctl_node_requests_in_flight"] == 1
        assert len(slow.file.read()) < 64 * MIB


def test_a_connection_is_not_idle_from_the_moment_its_request_is_read(tmp_path: Path) -> None:
    tree = Tree(str(tmp_path))
    quick = QuickReads(OpenFiles(tree), Guard([], [], nonces=1), Metrics(), None, in_memory=False)

    async def run() -> None:
        ours, peer = socket.socketpair()
        with peer, ThreadPoolExecutor(1) as pool:
            channel = PlainChannel(ours, "p", Limits(), pool, quick)
            reading = asyncio.create_task(channel.read_head())
            await asyncio.sleep(0)
            assert channel.idle_since is not None
            peer.sendall(b"PUT /v1/k HTTP/1.1\r\n\r\n")
            channel._on_readable()
            assert channel.idle_since is None  # though the task has not had its turn
            assert await reading == b"PUT /v1/k HTTP/1.1\r\n\r\n"
            await channel.close()

    asyncio.run(run())
    tree.close()
