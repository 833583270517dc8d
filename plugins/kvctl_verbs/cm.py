"""RDMA's connection manager: the few calls of librdmacm that are needed, by ctypes.

pyverbs has a connection manager too, but its waits cannot be polled (no file descriptor), hold the interpreter's lock
while they block, and do not tell a listener's port or a peer's address; so this part goes to the library itself, whose
binary interface is stable. Queue pairs are made by pyverbs: what librdmacm calls external ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import fcntl
import ipaddress
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, Final

from kvctl.core.errors import EnvError

DEPTH: Final = 16  # one-sided reads in flight, both ways, as the public protocol has it
_PS_TCP: Final = 0x0106
_BACKLOG: Final = 64
_SOCKADDR: Final = 128
_PEER_AT: Final = 32 + _SOCKADDR  # in rdma_cm_id: four pointers, the source address, then the peer's


class Kind(IntEnum):
    """enum rdma_cm_event_type."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15


class _ConnParam(ctypes.Structure):
    _fields_ = (
        ("private_data", ctypes.c_void_p),
        ("private_data_len", ctypes.c_uint8),
        ("responder_resources", ctypes.c_uint8),
        ("initiator_depth", ctypes.c_uint8),
        ("flow_control", ctypes.c_uint8),
        ("retry_count", ctypes.c_uint8),
        ("rnr_retry_count", ctypes.c_uint8),
        ("srq", ctypes.c_uint8),
        ("qp_num", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """The start of rdma_cm_event; what follows is of no use here."""

    _fields_ = (
        ("id", ctypes.c_void_p),
        ("listen_id", ctypes.c_void_p),
        ("event", ctypes.c_int),
        ("status", ctypes.c_int),
    )


class AddressHandle(ctypes.Structure):
    """ibv_ah_attr, with its ibv_global_route."""

    _fields_ = (
        ("dgid", ctypes.c_uint64 * 2),  # as bytes; the type is for its alignment
        ("flow_label", ctypes.c_uint32),
        ("sgid_index", ctypes.c_uint8),
        ("hop_limit", ctypes.c_uint8),
        ("traffic_class", ctypes.c_uint8),
        ("dlid", ctypes.c_uint16),
        ("sl", ctypes.c_uint8),
        ("src_path_bits", ctypes.c_uint8),
        ("static_rate", ctypes.c_uint8),
        ("is_global", ctypes.c_uint8),
        ("port_num", ctypes.c_uint8),
        ("_pad", ctypes.c_uint8),
    )


class QpAttributes(ctypes.Structure):
    """ibv_qp_attr: what the connection manager says a queue pair must be set to."""

    _fields_ = (
        ("qp_state", ctypes.c_int),
        ("cur_qp_state", ctypes.c_int),
        ("path_mtu", ctypes.c_int),
        ("path_mig_state", ctypes.c_int),
        ("qkey", ctypes.c_uint32),
        ("rq_psn", ctypes.c_uint32),
        ("sq_psn", ctypes.c_uint32),
        ("dest_qp_num", ctypes.c_uint32),
        ("qp_access_flags", ctypes.c_uint),
        ("cap", ctypes.c_uint32 * 5),
        ("ah_attr", AddressHandle),
        ("alt_ah_attr", AddressHandle),
        ("pkey_index", ctypes.c_uint16),
        ("alt_pkey_index", ctypes.c_uint16),
        ("en_sqd_async_notify", ctypes.c_uint8),
        ("sq_draining", ctypes.c_uint8),
        ("max_rd_atomic", ctypes.c_uint8),
        ("max_dest_rd_atomic", ctypes.c_uint8),
        ("min_rnr_timer", ctypes.c_uint8),
        ("port_num", ctypes.c_uint8),
        ("timeout", ctypes.c_uint8),
        ("retry_cnt", ctypes.c_uint8),
        ("rnr_retry", ctypes.c_uint8),
        ("alt_port_num", ctypes.c_uint8),
        ("alt_timeout", ctypes.c_uint8),
        ("rate_limit", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class Event:
    """`ident` is the handle of the connection (a new one for a request), `listener` that of the listener asked."""

    kind: Kind
    status: int
    ident: int
    listener: int


@cache
def _library() -> Any:  # Any: a ctypes library
    """Raises EnvError."""
    try:
        cm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
        verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as problem:
        raise EnvError(
            "RDMA's connection manager is not installed", cause=str(problem),
            hint="Debian, Ubuntu: apt install librdmacm1 ibverbs-providers",
        ) from None  # fmt: skip
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("rdma_create_event_channel", pointer, ()),
        ("rdma_destroy_event_channel", None, (pointer,)),
        ("rdma_create_id", number, (pointer, ctypes.POINTER(pointer), pointer, number)),
        ("rdma_destroy_id", number, (pointer,)),
        ("rdma_bind_addr", number, (pointer, pointer)),
        ("rdma_listen", number, (pointer, number)),
        ("rdma_get_src_port", ctypes.c_uint16, (pointer,)),
        ("rdma_resolve_addr", number, (pointer, pointer, pointer, number)),
        ("rdma_resolve_route", number, (pointer, number)),
        ("rdma_connect", number, (pointer, ctypes.POINTER(_ConnParam))),
        ("rdma_establish", number, (pointer,)),
        ("rdma_accept", number, (pointer, ctypes.POINTER(_ConnParam))),
        ("rdma_reject", number, (pointer, pointer, ctypes.c_uint8)),
        ("rdma_disconnect", number, (pointer,)),
        ("rdma_get_cm_event", number, (pointer, ctypes.POINTER(ctypes.POINTER(_Event)))),
        ("rdma_ack_cm_event", number, (ctypes.POINTER(_Event),)),
        ("rdma_init_qp_attr", number, (pointer, ctypes.POINTER(QpAttributes), ctypes.POINTER(number))),
    ):
        function = getattr(cm, name)
        function.restype, function.argtypes = result, arguments
    cm.ibv_get_device_name = verbs.ibv_get_device_name  # type: ignore[attr-defined]  # one object for all calls
    cm.ibv_get_device_name.restype, cm.ibv_get_device_name.argtypes = ctypes.c_char_p, (pointer,)
    return cm


def load() -> None:
    """Raises EnvError when the libraries are missing."""
    _library()


def _check(what: str, code: int) -> None:
    """Raises OSError with the call's errno."""
    if code:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _sockaddr(ip: str, port: int) -> ctypes.Array[ctypes.c_char]:
    found = ipaddress.ip_address(ip)
    if found.version == 4:
        data = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", port, found.packed)
    else:
        data = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16sI", port, 0, found.packed, 0)
    return ctypes.create_string_buffer(data, _SOCKADDR)


class Channel:
    """Where events of connections come in. Raises OSError, with the reason, when there is no RDMA in the kernel."""

    def __init__(self) -> None:
        self._cm = _library()
        self._handle: int | None = self._cm.rdma_create_event_channel()
        if not self._handle:
            number = ctypes.get_errno()
            raise OSError(number, f"rdma_create_event_channel: {os.strerror(number)}")
        self.fd: int = ctypes.cast(self._handle, ctypes.POINTER(ctypes.c_int))[0]
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise OSError(errno.EBADF, "the channel is closed")
        return self._handle

    def next(self) -> Event | None:
        """An event that is there, None otherwise. It is acknowledged, so that its connection can be destroyed."""
        pointer = ctypes.POINTER(_Event)()
        if self._cm.rdma_get_cm_event(self.handle, ctypes.byref(pointer)):
            number = ctypes.get_errno()
            if number in {errno.EAGAIN, errno.EINTR}:
                return None
            raise OSError(number, f"rdma_get_cm_event: {os.strerror(number)}")
        raw = pointer.contents
        event = Event(Kind(raw.event), raw.status, raw.id or 0, raw.listen_id or 0)
        _check("rdma_ack_cm_event", self._cm.rdma_ack_cm_event(pointer))
        return event

    def wait(self, deadline: float) -> Event:
        """The next event. Raises TimeoutError at `deadline` (monotonic seconds)."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        while (event := self.next()) is None:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError("no answer from the RDMA connection manager in time")
        return event

    def close(self) -> None:
        """After all its connections are closed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._cm.rdma_destroy_event_channel(handle)


class Ident:
    """One rdma_cm_id: a listener or a connection. Its owner's thread alone calls it. Raises OSError."""

    def __init__(self, channel: Channel, handle: int | None = None) -> None:
        """`handle`: one that an event brought."""
        self._cm = _library()
        self._handle: int | None = handle
        if handle is None:
            made = ctypes.c_void_p()
            _check("rdma_create_id", self._cm.rdma_create_id(channel.handle, ctypes.byref(made), None, _PS_TCP))
            self._handle = made.value

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise OSError(errno.EBADF, "the connection is closed")
        return self._handle

    @property
    def device(self) -> str | None:
        """The name of the RDMA device that it is bound to."""
        context = ctypes.cast(self.handle, ctypes.POINTER(ctypes.c_void_p))[0]
        if not context:
            return None
        device = ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p))[0]
        name: bytes = self._cm.ibv_get_device_name(device)
        return name.decode()

    @property
    def port(self) -> int:
        return socket.ntohs(self._cm.rdma_get_src_port(self.handle))

    @property
    def peer(self) -> str:
        """The other end's IP address."""
        raw = ctypes.string_at(self.handle + _PEER_AT, 28)
        (family,) = struct.unpack_from("=H", raw)
        if family == socket.AF_INET:
            return socket.inet_ntop(family, raw[4:8])
        if family == socket.AF_INET6:
            return socket.inet_ntop(family, raw[8:24])
        return ""

    def bind(self, ip: str, port: int = 0) -> None:
        _check("rdma_bind_addr", self._cm.rdma_bind_addr(self.handle, _sockaddr(ip, port)))

    def listen(self) -> None:
        _check("rdma_listen", self._cm.rdma_listen(self.handle, _BACKLOG))

    def resolve(self, source: str | None, ip: str, port: int, milliseconds: int) -> None:
        """Answered by ADDR_RESOLVED."""
        start = None if source is None else _sockaddr(source, 0)
        code = self._cm.rdma_resolve_addr(self.handle, start, _sockaddr(ip, port), milliseconds)
        _check("rdma_resolve_addr", code)

    def route(self, milliseconds: int) -> None:
        """Answered by ROUTE_RESOLVED."""
        _check("rdma_resolve_route", self._cm.rdma_resolve_route(self.handle, milliseconds))

    def connect(self, qp_number: int, retries: int) -> None:
        """Answered by CONNECT_RESPONSE."""
        param = _parameters(qp_number, retries)
        _check("rdma_connect", self._cm.rdma_connect(self.handle, ctypes.byref(param)))

    def establish(self) -> None:
        _check("rdma_establish", self._cm.rdma_establish(self.handle))

    def accept(self, qp_number: int, retries: int) -> None:
        param = _parameters(qp_number, retries)
        _check("rdma_accept", self._cm.rdma_accept(self.handle, ctypes.byref(param)))

    def reject(self) -> None:
        with contextlib.suppress(OSError):
            _check("rdma_reject", self._cm.rdma_reject(self.handle, None, 0))

    def disconnect(self) -> None:
        """Tell the other end. A connection that is none (any more) is no error."""
        with contextlib.suppress(OSError):
            _check("rdma_disconnect", self._cm.rdma_disconnect(self.handle))

    def attributes(self, state: int) -> tuple[QpAttributes, int]:
        """What a queue pair of this connection needs to get into `state`, and the mask of what counts."""
        found, mask = QpAttributes(qp_state=state), ctypes.c_int()
        _check("rdma_init_qp_attr", self._cm.rdma_init_qp_attr(self.handle, ctypes.byref(found), ctypes.byref(mask)))
        # bits 21-23 are the kernel's own (MAC and VLAN of RoCE), which the verbs of user space refuse
        return found, mask.value & ~0xE00000

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._cm.rdma_destroy_id(handle)


def _parameters(qp_number: int, retries: int) -> _ConnParam:
    return _ConnParam(
        responder_resources=DEPTH, initiator_depth=DEPTH, flow_control=1, retry_count=retries, rnr_retry_count=7,
        qp_num=qp_number,
    )  # fmt: skip


def devices_of(ips: Sequence[str]) -> dict[str, str]:
    """The RDMA device behind each of these local addresses that has one. Raises OSError without RDMA in the kernel."""
    found: dict[str, str] = {}
    channel = Channel()
    try:
        for ip in ips:
            ident = Ident(channel)
            try:
                ident.bind(ip)
                device = ident.device
            except OSError:
                continue
            finally:
                ident.close()
            if device is not None:
                found[ip] = device
    finally:
        channel.close()
    return found
