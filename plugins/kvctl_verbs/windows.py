"""Memory windows of type 1: a key for one range of registered memory, given for one operation.

A window is bound and unbound by work on a queue pair. Ours is connected to itself and sends nothing, so that a window
can be there, and be told in a token, before the other end has connected. Two things end a window: binding it to
nothing, after which its key is another one, and freeing it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

from kvctl.core.errors import EnvError
from kvctl_verbs import sysfs
from kvctl_verbs.bindings import load
from kvctl_verbs.device import Device, Memory
from kvctl_verbs.queues import Completions

_SECONDS: Final = 5.0  # for a bind, which no other host takes part in
_HINT: Final = "memory=op gives each request a registration of its own"


class Window:
    """One window and the queue pair that binds it. One operation at a time."""

    def __init__(self, device: Device) -> None:
        """Raises EnvError where the device has no windows of this type."""
        verbs = load()
        self._device = device
        with contextlib.ExitStack() as made:
            try:
                self._completions = Completions(device, 4)
                made.callback(self._completions.close)
                self._qp: Any = _to_itself(device, self._completions.queue)
                made.callback(self._qp.close)
                self._mw: Any = verbs.mr.MW(device.pd, verbs["MW_TYPE_1"])
                made.callback(self._mw.close)
            except EnvError:
                raise
            except Exception as problem:  # pyverbs' errors have no common base in both generations
                raise _lacking(device.name, str(problem)) from None
            self._made = made.pop_all()

    def bind(self, memory: Memory, address: int, length: int, *, writable: bool) -> int:
        """The key of [address, address + length) for the other end, to read it, and write to it if `writable`. Raises
        EnvError.
        """
        verbs = load()
        # who writes reads a byte back, so as to know that all of it is placed
        access = verbs["ACCESS_REMOTE_READ"] | (verbs["ACCESS_REMOTE_WRITE"] if writable else 0)
        self._bind(memory, address, length, access)
        key: int = self._mw.rkey  # another one with each bind
        return key

    def unbind(self, memory: Memory) -> None:
        """When it returns, the key opens nothing. Raises EnvError."""
        self._bind(memory, 0, 0, 0)

    def _bind(self, memory: Memory, address: int, length: int, access: int) -> None:
        verbs = load()
        info = verbs.mr.MWBindInfo(memory.mr, address, length, access)
        try:
            self._qp.bind_mw(self._mw, verbs.mr.MWBind(info, verbs["SEND_SIGNALED"]))
        except Exception as problem:
            raise _lacking(self._device.name, str(problem)) from None
        found, _ = self._completions.wait(_SECONDS)
        status = found[0].status if found else None
        if status != verbs["WC_SUCCESS"]:
            raise _lacking(self._device.name, "no completion" if status is None else f"completion status {status}")

    def close(self) -> None:
        """Its key opens nothing from now on."""
        self._made.close()


class Windows:
    """Windows of one device, made as operations need them. Thread-safe."""

    def __init__(self, device: Device) -> None:
        """Raises EnvError where the device has none."""
        self._device = device
        self._lock = threading.Lock()
        self._idle: list[Window] = [Window(device)]

    @contextlib.contextmanager
    def bound(self, memory: Memory, address: int, length: int, *, writable: bool) -> Iterator[int]:
        """The key of a range of `memory`, good while the block runs. Raises EnvError."""
        with self._lock:
            window = self._idle.pop() if self._idle else None
        window = window or Window(self._device)
        try:
            yield window.bind(memory, address, length, writable=writable)
            window.unbind(memory)
        except BaseException:
            window.close()  # which ends its key whatever state it is in
            raise
        with self._lock:
            self._idle.append(window)

    def close(self) -> None:
        """After all operations have ended, and before the memory they were in."""
        with self._lock:
            idle, self._idle = self._idle, []
        for window in idle:
            window.close()


def _to_itself(device: Device, queue: Any) -> Any:
    """A queue pair that is ready to send, to itself."""
    verbs = load()
    port = next((port for port in sysfs.ports() if port.device == device.name and port.usable), None)
    if port is None:
        raise EnvError(f"{device.name} has no active port with a GID")
    room = verbs.qp.QPCap(max_send_wr=2, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
    start = verbs.qp.QPInitAttr(qp_type=verbs["QPT_RC"], scq=queue, rcq=queue, cap=room, sq_sig_all=1)
    pair = verbs.qp.QP(device.pd, start, verbs.qp.QPAttr(port_num=port.number))
    try:
        about = device.context.query_port(port.number)
        to = verbs.qp.QPAttr(port_num=port.number)
        to.path_mtu, to.dest_qp_num, to.rq_psn, to.sq_psn = about.active_mtu, pair.qp_num, 0, 0
        to.max_dest_rd_atomic = to.max_rd_atomic = 1
        to.min_rnr_timer, to.timeout, to.retry_cnt, to.rnr_retry = 12, 14, 7, 7
        route = verbs.addr.GlobalRoute(dgid=verbs.addr.GID(port.gid), sgid_index=port.gid_index, hop_limit=1)
        to.ah_attr = verbs.addr.AHAttr(gr=route, is_global=1, port_num=port.number, dlid=about.lid)
        pair.to_rts(to)
    except BaseException:
        pair.close()
        raise
    return pair


def _lacking(device: str, why: str) -> EnvError:
    return EnvError(f"{device} binds no memory window", cause=why, hint=_HINT)
