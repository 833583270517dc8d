"""Queue pairs of pyverbs, brought up with what the connection manager says, and completions waited for without
burning a core.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvctl.core.errors import EnvError
from kvctl_verbs.bindings import load
from kvctl_verbs.cm import AddressHandle, Ident, QpAttributes
from kvctl_verbs.device import EVENT_FILES, Device, Memory

_LINK: Final = "anon_inode:[infinibandevent]"
_TRIES: Final = 20
_BATCH: Final = 16


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a device tries: `timeout` is 4.096 us * 2^timeout per try, `retries` tries. 16 and 3 give a dead peer
    up after about a second.
    """

    timeout: int = 16
    retries: int = 3


class Completions:
    """A completion queue with a descriptor to wait on. One thread uses it."""

    def __init__(self, device: Device, entries: int) -> None:
        verbs = load()
        self._channel, self.fd = _event_channel(device)
        os.set_blocking(self.fd, False)
        self._armed = False  # an event is there, or comes with the next completion
        self._cq: Any = verbs.cq.CQ(device.context, entries, None, self._channel, 0)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    @property
    def queue(self) -> Any:
        return self._cq

    def watch(self, fd: int) -> None:
        """`wait` ends as well when this descriptor is readable."""
        self._poll.register(fd, select.POLLIN)

    def poll(self) -> list[Any]:
        found: list[Any] = self._cq.poll(_BATCH)[1]
        return found

    def wait(self, seconds: float) -> tuple[list[Any], Sequence[int]]:
        """Completions, and the other watched descriptors that are readable; neither when the time is over."""
        found = self.poll() or self.arm()
        if found:
            return found, ()
        ready = [fd for fd, _ in self._poll.poll(max(0.0, seconds) * 1000)]
        if self.fd in ready:
            self.take_event()
        return self.poll(), [fd for fd in ready if fd != self.fd]

    def arm(self) -> list[Any]:
        """Have `fd` become readable with the next completion; what came before that makes no event, and is here."""
        if self._armed:
            return []
        self._cq.req_notify()
        self._armed = True
        return self.poll()

    def take_event(self) -> None:
        """`fd` is readable no more. An event says that there may be completions, no more than that."""
        with contextlib.suppress(Exception):  # pyverbs' own: none was there
            self._channel.get_cq_event(self._cq)
            self._cq.ack_events(1)
            self._armed = False

    def close(self) -> None:
        """After its queue pairs are closed."""
        self._cq.close()
        with EVENT_FILES:
            self._channel.close()


def _event_channel(device: Device) -> tuple[Any, int]:
    """A completion channel and its descriptor. pyverbs does not tell that: it is the event file that appeared while the
    channel was made. Under a lock, since a number that another of our threads gives back would be taken again at once;
    and several times, since others (librdmacm, when it first meets a device) open such files too. Raises EnvError.
    """
    verbs = load()
    for _ in range(_TRIES):
        with EVENT_FILES:
            before = _event_files()
            channel = verbs.cq.CompChannel(device.context)
            made = _event_files() - before
            if len(made) == 1:
                return channel, made.pop()
            channel.close()
    raise EnvError(f"the completion channel of {device.name} has no descriptor to wait on")


def _event_files() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _LINK:
                found.add(int(name))
        except OSError:  # the listing's own descriptor, or one just closed
            continue
    return found


class QueuePair:
    """A reliable connection's end. `close` may be called from any thread, once; after it the device touches no memory
    on behalf of the other end.
    """

    def __init__(self, device: Device, queue: Any, work: int) -> None:
        """`work`: operations that may be posted at once."""
        verbs = load()
        self._device = device
        cap = verbs.qp.QPCap(max_send_wr=work, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        start = verbs.qp.QPInitAttr(qp_type=verbs["QPT_RC"], scq=queue, rcq=queue, cap=cap, sq_sig_all=0)
        self._qp: Any = verbs.qp.QP(device.pd, start)
        self._look: _Request | None = None

    @property
    def number(self) -> int:
        found: int = self._qp.qp_num
        return found

    def prepare(self, ident: Ident) -> None:
        """To INIT: before the connection is asked for, or accepted."""
        verbs = load()
        raw, mask = ident.attributes(verbs["QPS_INIT"])
        attributes = _attributes(raw)
        access = verbs["ACCESS_LOCAL_WRITE"] | verbs["ACCESS_REMOTE_WRITE"] | verbs["ACCESS_REMOTE_READ"]
        attributes.qp_access_flags = access
        self._qp.modify(attributes, mask | verbs["QP_ACCESS_FLAGS"])

    def start(self, ident: Ident, patience: Patience) -> None:
        """To RTR and RTS, once the other end is known."""
        verbs = load()
        raw, mask = ident.attributes(verbs["QPS_RTR"])
        self._qp.modify(_attributes(raw), mask)
        raw, mask = ident.attributes(verbs["QPS_RTS"])
        attributes = _attributes(raw)
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = patience.timeout, patience.retries, 7
        self._qp.modify(attributes, mask | verbs["QP_TIMEOUT"] | verbs["QP_RETRY_CNT"] | verbs["QP_RNR_RETRY"])

    def write(
        self, number: int, local: int, memory: Memory, length: int, remote: int, rkey: int, *, told: bool = True
    ) -> None:
        """Posts a WRITE of [local, local + length) to the other end's memory. Its completion carries `number`; where it
        is not `told`, that of a later operation stands for it too.
        """
        with _request("WR_RDMA_WRITE", number, local, memory, length, remote, rkey, told=told) as write:
            self._qp.post_send(write)

    def read(self, number: int, local: int, memory: Memory, length: int, remote: int, rkey: int) -> None:
        """Posts a READ of the other end's memory into [local, local + length)."""
        with _request("WR_RDMA_READ", number, local, memory, length, remote, rkey) as read:
            self._qp.post_send(read)

    def write_and_look(
        self, number: int, local: int, memory: Memory, length: int, remote: int, rkey: int, look: int, scratch: int
    ) -> None:
        """A WRITE whose last byte is read back into `scratch`, posted together: the completion, which carries `look`,
        says that this and all that was written before is in the other end's memory. The last two never change.
        """
        if self._look is None:
            self._look = _Request("WR_RDMA_READ", look, scratch, memory, 1)
        read = self._look.at(remote + length - 1, rkey)
        with _request("WR_RDMA_WRITE", number, local, memory, length, remote, rkey, told=False) as write:
            write.next_wr = read
            self._qp.post_send(write)

    def close(self) -> None:
        self._qp.close()
        look, self._look = self._look, None
        if look is not None:
            look.close()


class _Request:
    """A work request. It is to be closed: pyverbs frees what is in one for nobody who does not ask (rdma-core 44 to
    59).
    """

    def __init__(self, code: str, number: int, local: int, memory: Memory, length: int, *, told: bool = True) -> None:
        verbs = load()
        flags = verbs["SEND_SIGNALED"] if told else 0
        self._place: Any = verbs.wr.SGE(local, length, memory.lkey)
        self._work: Any = verbs.wr.SendWR(
            wr_id=number, opcode=verbs[code], num_sge=1, sg=[self._place], send_flags=flags
        )

    def at(self, remote: int, rkey: int) -> Any:
        """It, for this place of the other end's memory."""
        self._work.set_wr_rdma(rkey, remote)
        return self._work

    def close(self) -> None:
        self._work.close()
        self._place.close()


@contextlib.contextmanager
def _request(
    code: str, number: int, local: int, memory: Memory, length: int, remote: int, rkey: int, *, told: bool = True
) -> Iterator[Any]:
    made = _Request(code, number, local, memory, length, told=told)
    try:
        yield made.at(remote, rkey)
    finally:
        made.close()


def _attributes(raw: QpAttributes) -> Any:
    """Them, as pyverbs has them."""
    verbs = load()
    out = verbs.qp.QPAttr(port_num=raw.port_num or 1)
    for name in (
        "qp_state", "path_mtu", "rq_psn", "sq_psn", "dest_qp_num", "qp_access_flags", "pkey_index", "max_rd_atomic",
        "max_dest_rd_atomic", "min_rnr_timer", "timeout", "retry_cnt", "rnr_retry",
    ):  # fmt: skip
        setattr(out, name, getattr(raw, name))
    out.ah_attr = _address(raw.ah_attr)
    return out


def _address(raw: AddressHandle) -> Any:
    verbs = load()
    digits = bytes(memoryview(raw.dgid).cast("B")).hex()
    gid = verbs.addr.GID(":".join(digits[at : at + 4] for at in range(0, 32, 4)))
    route = verbs.addr.GlobalRoute(
        dgid=gid, flow_label=raw.flow_label, sgid_index=raw.sgid_index, hop_limit=raw.hop_limit,
        traffic_class=raw.traffic_class,
    )  # fmt: skip
    return verbs.addr.AHAttr(
        dlid=raw.dlid, sl=raw.sl, src_path_bits=raw.src_path_bits, static_rate=raw.static_rate,
        is_global=raw.is_global, port_num=raw.port_num or 1, gr=route,
    )  # fmt: skip


def left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
