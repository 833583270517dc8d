"""A client of the public RDMA object protocol that shares nothing with ours: http.client, librdmacm by ctypes.

It does what the vendors' public clients do: registers memory, listens with the RDMA connection manager, sends requests
with an empty body and a token `IP:PORT:0x<addr>:0x<size>:0x<rkey>`, and takes 2xx for done.
"""

from __future__ import annotations

import ctypes
import http.client
import mmap
import socket
import struct
import threading
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from dataclasses import dataclass

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4
PS_TCP, RC = 0x106, 2
CONNECT_REQUEST, ESTABLISHED, DISCONNECTED = 4, 9, 10


class QpInit(Structure):
    _fields_ = (
        ("context", c_void_p), ("send", c_void_p), ("recv", c_void_p), ("srq", c_void_p),
        ("max_send_wr", c_uint32), ("max_recv_wr", c_uint32), ("max_send_sge", c_uint32), ("max_recv_sge", c_uint32),
        ("max_inline", c_uint32), ("type", c_int), ("signal_all", c_int),
    )  # fmt: skip


class Param(Structure):
    _fields_ = (
        ("data", c_void_p), ("data_len", c_uint8), ("responder", c_uint8), ("initiator", c_uint8), ("flow", c_uint8),
        ("retry", c_uint8), ("rnr_retry", c_uint8), ("srq", c_uint8), ("qp_num", c_uint32),
    )  # fmt: skip


class Event(Structure):
    _fields_ = (("id", c_void_p), ("listener", c_void_p), ("kind", c_int), ("status", c_int))


class Mr(Structure):
    _fields_ = (
        ("context", c_void_p), ("pd", c_void_p), ("addr", c_void_p), ("length", c_size_t), ("handle", c_uint32),
        ("lkey", c_uint32), ("rkey", c_uint32),
    )  # fmt: skip


def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    cm, verbs = ctypes.CDLL("librdmacm.so.1"), ctypes.CDLL("libibverbs.so.1")
    for function, result, arguments in (
        (cm.rdma_create_event_channel, c_void_p, ()),
        (cm.rdma_create_id, c_int, (c_void_p, POINTER(c_void_p), c_void_p, c_int)),
        (cm.rdma_bind_addr, c_int, (c_void_p, c_void_p)),
        (cm.rdma_listen, c_int, (c_void_p, c_int)),
        (cm.rdma_get_src_port, c_uint16, (c_void_p,)),
        (cm.rdma_get_cm_event, c_int, (c_void_p, POINTER(POINTER(Event)))),
        (cm.rdma_ack_cm_event, c_int, (POINTER(Event),)),
        (cm.rdma_create_qp, c_int, (c_void_p, c_void_p, POINTER(QpInit))),
        (cm.rdma_accept, c_int, (c_void_p, POINTER(Param))),
        (cm.rdma_reject, c_int, (c_void_p, c_void_p, c_uint8)),
        (verbs.ibv_alloc_pd, c_void_p, (c_void_p,)),
        (verbs.ibv_reg_mr, POINTER(Mr), (c_void_p, c_void_p, c_size_t, c_int)),
    ):
        function.restype, function.argtypes = result, arguments
    return cm, verbs


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Stranger:
    """Memory of `nbytes` in `memory`, a listener on `ip`, and one HTTP connection to the node. `accepts`: how many
    connections it takes.
    """

    def __init__(self, ip: str, node: tuple[str, int], nbytes: int, *, accepts: int = 100) -> None:
        self.cm, self.verbs = libraries()
        self.ip = ip
        self.accepts = accepts
        self.connections = 0
        self.http = http.client.HTTPConnection(*node, timeout=60)
        self.map = mmap.mmap(-1, nbytes)
        self.memory = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.channel = self.cm.rdma_create_event_channel()
        assert self.channel
        self.listener = c_void_p()
        assert self.cm.rdma_create_id(self.channel, byref(self.listener), None, PS_TCP) == 0
        place = ctypes.create_string_buffer(struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(ip)), 16)
        assert self.cm.rdma_bind_addr(self.listener, place) == 0
        assert self.cm.rdma_listen(self.listener, 16) == 0
        self.port = socket.ntohs(self.cm.rdma_get_src_port(self.listener))
        assert self.listener.value
        self.pd = self.verbs.ibv_alloc_pd(ctypes.cast(self.listener.value, POINTER(c_void_p))[0])
        self.rkey = self.register(self.address, nbytes)
        threading.Thread(target=self.serve, daemon=True).start()

    def register(self, address: int, nbytes: int) -> int:
        found = self.verbs.ibv_reg_mr(self.pd, address, nbytes, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ)
        assert found
        return int(found.contents.rkey)

    def serve(self) -> None:
        while True:
            event = POINTER(Event)()
            if self.cm.rdma_get_cm_event(self.channel, byref(event)):
                return
            kind, ident = event.contents.kind, event.contents.id
            if kind == CONNECT_REQUEST:
                if self.connections >= self.accepts:
                    self.cm.rdma_reject(ident, None, 0)
                else:
                    self.connections += 1
                    init = QpInit(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, type=RC, signal_all=1)
                    assert self.cm.rdma_create_qp(ident, self.pd, byref(init)) == 0
                    param = Param(responder=16, initiator=16, retry=7, rnr_retry=7)
                    assert self.cm.rdma_accept(ident, byref(param)) == 0
            self.cm.rdma_ack_cm_event(event)

    def token(self, offset: int, size: int, **other: int | str) -> str:
        ip, port = other.get("ip", self.ip), other.get("port", self.port)
        address, rkey = other.get("address", self.address + offset), other.get("rkey", self.rkey)
        return f"{ip}:{port}:0x{address:016x}:0x{size:08x}:0x{rkey:08x}"

    def ask(self, method: str, path: str, token: str | None = None, *, span: tuple[int, int] | None = None) -> Answer:
        headers = {"Content-Length": "0"} if method in {"GET", "PUT"} else {}
        if token is not None:
            headers["x-scal-rdma"] = token
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1]}"
        self.http.request(method, path, headers=headers)
        answer = self.http.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
