"""A guest's program: two peers, one reliable connection, one-sided READ and WRITE through pyverbs (Debian's 44).

    serve --size N                       memory full of a pattern; answers what it holds; ends with its client
    read|write HOST --size N [..]        moves N bytes, `--rounds` times; prints one JSON line

It stands apart from kvctl: the lab's own proof that verbs work in it, and how they fail. A TCP connection carries what
the peers must tell each other, and nothing of the data.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import select
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

from pyverbs import enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

DEVICE = "rxe0"
PORT = 18600
PIECE = 1 << 20
DEPTH = 8
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE
_PORT_FOLDER = Path(f"/sys/class/infiniband/{DEVICE}/ports/1")


class CompletionError(Exception):
    """`status`: the work completion's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"work completion {status}")
        self.status = status


class Peer:
    """Registered memory and a queue pair. pyverbs has no types, hence the Any."""

    def __init__(self, size: int, timeout: int, retries: int) -> None:
        self.size = size
        self._timeout = timeout
        self._retries = retries
        self._context: Any = Context(name=DEVICE)
        domain = PD(self._context)
        self._region: Any = MR(domain, size, ACCESS)
        self._queue: Any = CQ(self._context, 4 * DEPTH, None, None, 0)
        capacity = QPCap(max_send_wr=2 * DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self._gid_index = _gid_index()
        first = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        self._pair: Any = QP(domain, first, attributes)
        # pyverbs copies on read and write: this is the registered memory itself
        self.memory = memoryview((ctypes.c_ubyte * size).from_address(self._region.buf)).cast("B")

    def describe(self) -> dict[str, Any]:
        gid = self._context.query_gid(1, self._gid_index).gid
        return {"gid": gid, "pair": self._pair.qp_num, "key": self._region.rkey, "address": self._region.buf,
                "size": self.size, "sha256": self.digest()}  # fmt: skip

    def digest(self) -> str:
        return hashlib.sha256(self.memory).hexdigest()

    def connect(self, other: dict[str, Any]) -> None:
        to = QPAttr(port_num=1)
        to.qp_access_flags = ACCESS
        to.path_mtu = self._context.query_port(1).active_mtu
        to.dest_qp_num = other["pair"]
        to.rq_psn = to.sq_psn = 1
        to.max_dest_rd_atomic = to.max_rd_atomic = 16
        to.min_rnr_timer = 12
        to.timeout, to.retry_cnt, to.rnr_retry = self._timeout, self._retries, 7
        route = GlobalRoute(dgid=GID(other["gid"]), sgid_index=self._gid_index)
        route.hop_limit = 64
        to.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self._pair.to_rts(to)

    def move(self, operation: int, other: dict[str, Any], first_done: str | None) -> None:
        """All of the memory, in pieces, a few in flight. Raises CompletionError with the first bad status."""
        posted = ended = 0
        pieces = -(-self.size // PIECE)
        while ended < pieces:
            while posted < pieces and posted - ended < DEPTH:
                at = posted * PIECE
                part = SGE(self._region.buf + at, min(PIECE, self.size - at), self._region.lkey)
                work = SendWR(wr_id=posted, opcode=operation, num_sge=1, sg=[part], send_flags=e.IBV_SEND_SIGNALED)
                work.set_wr_rdma(other["key"], other["address"] + at)
                self._pair.post_send(work)
                posted += 1
            _, completions = self._queue.poll(DEPTH)
            for completion in completions:
                if completion.status != e.IBV_WC_SUCCESS:
                    raise CompletionError(completion.status)
                ended += 1
            if first_done and ended:
                Path(first_done).touch()
                first_done = None
            if not completions:
                time.sleep(0.0005)  # the guest has one processor: the network needs it too


def counters() -> dict[str, int]:
    folder = _PORT_FOLDER / "hw_counters"
    return {path.name: int(path.read_text()) for path in folder.iterdir() if path.name != "lifespan"}


def _gid_index() -> int:
    """The index of the GID that stands for an IPv4 address in RoCE v2."""
    for index in range(16):
        gid = (_PORT_FOLDER / f"gids/{index}").read_text()
        try:
            kind = (_PORT_FOLDER / f"gid_attrs/types/{index}").read_text()
        except OSError:
            continue  # an unused entry
        if gid.startswith("0000:0000:0000:0000:0000:ffff:") and kind.strip() == "RoCE v2":
            return index
    raise SystemExit(f"{DEVICE} has no IPv4 GID")


def fill(memory: memoryview, seed: bytes) -> None:
    memory[:] = hashlib.shake_256(seed).digest(len(memory))


def serve(size: int) -> None:
    """One client. When it goes away, or its host does, so does this."""
    peer = Peer(size, 14, 7)
    fill(peer.memory, b"served")
    with socket.create_server(("", PORT)) as listener:
        print("serving", flush=True)
        connection, _ = listener.accept()
    with connection, connection.makefile("rw") as line:
        _say(line, peer.describe())
        peer.connect(json.loads(line.readline()))
        _say(line, {})
        while line.readline():
            _say(line, {"sha256": peer.digest()})


def move(known: argparse.Namespace) -> NoReturn:
    with _dial(known.host) as connection, connection.makefile("rw") as line:
        other = json.loads(line.readline())
        peer = Peer(known.size, known.timeout, known.retries)
        fill(peer.memory, b"mine")
        _say(line, peer.describe())
        peer.connect(other)
        line.readline()
        other["key"] ^= 0xFF00 if known.wrong_key else 0
        before = counters()
        began = time.monotonic()
        said: dict[str, Any] = {"status": 0, "rounds": 0}
        try:
            for _ in range(known.rounds):
                operation = e.IBV_WR_RDMA_READ if known.what == "read" else e.IBV_WR_RDMA_WRITE
                peer.move(operation, other, known.started)
                said["rounds"] += 1
        except CompletionError as error:
            said["status"] = error.status
        said["seconds"] = round(time.monotonic() - began, 3)
        after = counters()
        said["counters"] = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        if said["status"] == 0:
            if known.what == "write":
                _say(line, {})
                other = json.loads(line.readline())
            said["same"] = peer.digest() == other["sha256"]
        print(json.dumps(said), flush=True)
        # a queue pair in error state, a peer that is gone: nothing is left to take down politely
        os._exit(0)


def _dial(host: str) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            found = socket.create_connection((host, PORT), 5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            select.select([], [], [], 0.1)
        else:
            found.settimeout(60)
            return found


def _say(line: Any, what: dict[str, Any]) -> None:  # Any: a text file made of a socket
    line.write(json.dumps(what) + "\n")
    line.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["serve", "read", "write"])
    parser.add_argument("host", nargs="?")
    parser.add_argument("--size", type=int, default=8 << 20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=14, help="of an acknowledgement: 4.096 us * 2^n")
    parser.add_argument("--retries", type=int, default=7)
    parser.add_argument("--wrong-key", action="store_true")
    parser.add_argument("--started", help="a file to make when the first piece has come")
    known = parser.parse_args()
    if known.what == "serve":
        serve(known.size)
    else:
        move(known)


if __name__ == "__main__":
    main()
