"""A bare RDMA WRITE: the ceiling of the RDMA paths, where pyverbs and an active device are.

Two queue pairs of one device of this host, connected to each other; one writes into the reader's memory what a storage
node would. No protocol, no server, no network beyond the device: what the NIC and its driver give. Both generations of
pyverbs are known (constants flat in `pyverbs.enums`, or as enum classes in `pyverbs.libibverbs_enums`).
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from kvctl.bench.rivals import WAIT, Batch, Memory, Range
from kvctl.core.errors import EnvError, StalledError
from kvctl.memory.buffers import HostBuffer, round_up

_SYS: Final = "/sys/class/infiniband"
_DEPTH: Final = 256
_PAUSE: Final = 20e-6  # seconds between looks: on few CPUs the driver needs them too


@dataclass(frozen=True, slots=True)
class Port:
    """An active port: its device, number, and the GID that is used."""

    device: str
    number: int
    gid_index: int
    gid: str

    @classmethod
    def find(cls) -> Port | None:
        """The first active port with a GID, one of RoCE v2 if it has any."""
        for device in _names(_SYS):
            for number in _names(f"{_SYS}/{device}/ports"):
                place = f"{_SYS}/{device}/ports/{number}"
                if "ACTIVE" not in _read(f"{place}/state"):
                    continue
                found = [
                    (_read(f"{place}/gid_attrs/types/{index}") != "RoCE v2", "ffff" not in gid, int(index), gid)
                    for index in _names(f"{place}/gids")
                    if set(gid := _read(f"{place}/gids/{index}")) - set("0:")
                ]
                if found:
                    _, _, index, gid = min(found)
                    return cls(device, int(number), index, gid)
        return None


def why_not() -> str:
    """Why a bare WRITE cannot be measured here; empty when it can."""
    if Port.find() is None:
        return "no active RDMA port with a GID"
    return "" if find_spec("pyverbs") is not None else "pyverbs is not installed (see `kvctl help rdma`)"


class RdmaRival:
    """See `kvctl.bench.rivals.Rival`. Owns the device it opened."""

    def __init__(self, name: str, data: memoryview) -> None:
        """Raises EnvError when the device cannot be used."""
        self.name = name
        port = Port.find()
        if port is None:
            raise EnvError("a bare RDMA WRITE cannot be measured", cause=why_not())
        self.port = port
        self._source = HostBuffer(len(data))
        self._source.view[:] = data
        self._target: tuple[int, Any] | None = None
        try:
            self._open()
        except EnvError:
            raise
        except Exception as problem:  # pyverbs' errors have no common base in both generations
            self._source.close()
            raise EnvError(f"the RDMA device {port.device} cannot be used", cause=str(problem)) from None

    def _open(self) -> None:
        verbs = _Verbs()
        port = self.port
        self._verbs = verbs
        self._context = verbs.device.Context(name=port.device)
        self._domain = verbs.pd.PD(self._context)
        self._access = verbs["ACCESS_LOCAL_WRITE"] | verbs["ACCESS_REMOTE_WRITE"] | verbs["ACCESS_REMOTE_READ"]
        self._queue = verbs.cq.CQ(self._context, 2 * _DEPTH, None, None, 0)
        self._pairs = [self._pair(), self._pair()]
        for mine, other in (self._pairs, self._pairs[::-1]):
            mine.to_rts(self._towards(other.qp_num))
        self._region = self._register(self._source)

    def _register(self, buffer: HostBuffer) -> Any:  # Any: Cython classes without types
        size = max(1, round_up(buffer.nbytes))
        return self._verbs.mr.MR(self._domain, size, self._access, address=buffer.address)

    def _pair(self) -> Any:
        verbs = self._verbs
        room = verbs.qp.QPCap(max_send_wr=_DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        first = verbs.qp.QPInitAttr(qp_type=verbs["QPT_RC"], scq=self._queue, rcq=self._queue, cap=room, sq_sig_all=1)
        attributes = verbs.qp.QPAttr(port_num=self.port.number)
        attributes.qp_access_flags = self._access
        return verbs.qp.QP(self._domain, first, attributes)

    def _towards(self, number: int) -> Any:
        verbs, port = self._verbs, self.port
        about = self._context.query_port(port.number)
        to = verbs.qp.QPAttr(port_num=port.number)
        to.qp_access_flags = self._access
        to.path_mtu = about.active_mtu
        to.dest_qp_num = number
        to.rq_psn = to.sq_psn = 1
        to.max_dest_rd_atomic = to.max_rd_atomic = 1
        to.min_rnr_timer, to.timeout, to.retry_cnt, to.rnr_retry = 12, 16, 3, 7
        route = verbs.addr.GlobalRoute(dgid=verbs.addr.GID(port.gid), sgid_index=port.gid_index)
        route.hop_limit = 64
        to.ah_attr = verbs.addr.AHAttr(gr=route, is_global=1, port_num=port.number, dlid=about.lid)
        return to

    def batch(self, memory: Memory, ranges: Sequence[Range], concurrency: int, seconds: float) -> Batch:
        key = self._remote_key(memory)
        batch, running, turn = Batch(), dict[int, tuple[int, int, float]](), 0
        started, cpu = time.monotonic(), time.process_time()
        for slot in range(min(concurrency, _DEPTH)):
            self._post(turn, slot, memory, ranges, key, running)
            turn += 1
        while running:
            _, completions = self._queue.poll(16)
            now = time.monotonic()
            for done in completions:
                if done.status != self._verbs["WC_SUCCESS"]:
                    raise EnvError(f"a bare RDMA WRITE failed with status {done.status} on {self.port.device}")
                slot, length, asked = running.pop(done.wr_id)
                batch.requests.append(now - asked)
                batch.bytes += length
                if now - started < seconds or len(batch.requests) + len(running) < 2 * concurrency:
                    self._post(turn, slot, memory, ranges, key, running)
                    turn += 1
            if completions:
                continue
            if now - min(asked for _, _, asked in running.values()) > WAIT:
                raise StalledError(f"a bare RDMA WRITE on {self.port.device} does not end")
            time.sleep(_PAUSE)
        batch.wall, batch.cpu = time.monotonic() - started, time.process_time() - cpu
        return batch

    def _remote_key(self, memory: Memory) -> int:
        if self._target is None or self._target[0] != memory.buffer.address:
            if self._target is not None:
                self._target[1].close()
            self._target = (memory.buffer.address, self._register(memory.buffer))
        key: int = self._target[1].rkey
        return key

    def _post(
        self,
        turn: int,
        slot: int,
        memory: Memory,
        ranges: Sequence[Range],
        key: int,
        running: dict[int, tuple[int, int, float]],
    ) -> None:
        verbs = self._verbs
        offset, length = ranges[turn % len(ranges)]
        part = verbs.wr.SGE(self._source.address + offset, length, self._region.lkey)
        work = verbs.wr.SendWR(
            wr_id=turn, opcode=verbs["WR_RDMA_WRITE"], num_sge=1, sg=[part], send_flags=verbs["SEND_SIGNALED"]
        )
        work.set_wr_rdma(key, memory.buffer.address + memory.offset(slot, length, turn))
        running[turn] = (slot, length, time.monotonic())
        self._pairs[0].post_send(work)

    def close(self) -> None:
        for pair in self._pairs:
            pair.close()
        if self._target is not None:
            self._target[1].close()
        self._region.close()
        self._queue.close()
        self._domain.close()
        self._context.close()
        self._source.close()


class _Verbs:
    """pyverbs' modules by name, and libibverbs' constants without their prefix, of either generation."""

    def __init__(self) -> None:
        # Any: Cython classes without types
        self.addr: Any = importlib.import_module("pyverbs.addr")
        self.cq: Any = importlib.import_module("pyverbs.cq")
        self.device: Any = importlib.import_module("pyverbs.device")
        self.mr: Any = importlib.import_module("pyverbs.mr")
        self.pd: Any = importlib.import_module("pyverbs.pd")
        self.qp: Any = importlib.import_module("pyverbs.qp")
        self.wr: Any = importlib.import_module("pyverbs.wr")
        flat = find_spec("pyverbs.libibverbs_enums") is None
        enums = importlib.import_module("pyverbs.enums" if flat else "pyverbs.libibverbs_enums")
        self._constants: dict[str, int] = {}
        for name, value in vars(enums).items():
            members = getattr(value, "__members__", None)
            if members is not None:
                self._constants.update({member: int(item) for member, item in members.items()})
            elif name.startswith("IBV_"):
                self._constants[name] = int(value)

    def __getitem__(self, name: str) -> int:
        return self._constants[f"IBV_{name}"]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder), key=lambda name: (len(name), name))
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:  # an unused entry of a table cannot be read
        return ""
