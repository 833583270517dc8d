"""`nixl-posix`: files into host memory through NIXL's POSIX back end (io_uring, or Linux AIO by option)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from kvctl.core.errors import EnvError, UsageError
from kvctl.memory.buffers import PAGE, HostBuffer
from kvctl.transports.api import HOST_KINDS, Capabilities, Op, Store, StoreConfig
from kvctl.transports.options import check_names, choice, number
from kvctl_nixl.files import PIECE, SMALLEST, NixlFiles
from kvctl_nixl.memory import Known
from kvctl_nixl.places import FilePlace, bare
from kvctl_nixl.probes import io_uring_refusal

BOUNCE: Final = 4 << 20
_DIRECT_CHUNK: Final = 1 << 20


class NixlPosix(NixlFiles):
    """See `kvctl.transports.api.Transport`. With `direct` several descriptors are in flight at once, and after an error
    nobody can tell when the others end: such an operation ends as UNKNOWN.
    """

    name = "nixl-posix"
    _without_direct = "leave direct=true out"

    def __init__(
        self, place: FilePlace, *, direct: bool, threads: int, chunk: int, queue: int, aio: bool = False
    ) -> None:
        super().__init__(
            place,
            Capabilities(memory_kinds=HOST_KINDS, max_in_flight=2 * threads, one_sided=direct),
            Known(),
            backend="POSIX",
            params={"use_aio" if aio else "use_uring": "true", "kernel_queue_size": str(queue)},
            threads=threads,
            chunk=chunk if direct else 0,
            certain=not direct,
        )
        self._direct_io = direct

    def close_worker(self) -> None:
        super().close_worker()
        bounce: HostBuffer | None = getattr(self._local, "bounce", None)
        if bounce is not None:
            bounce.close()

    def fill(self, op: Op, fd: int, path: str) -> None:
        if self._direct_io:
            self._fill_direct(op, fd, path)
        else:
            super().fill(op, fd, path)

    def _fill_direct(self, op: Op, fd: int, path: str) -> None:
        """The aligned middle by O_DIRECT, the ragged ends through the page cache. Memory that is not congruent with the
        file modulo 4 KiB takes a bounce buffer: one copy.
        """
        first = -op.offset % PAGE
        last = (op.offset + op.length) // PAGE * PAGE - op.offset
        view = op.view
        if last <= first:
            _read_plain(fd, view, op.offset)
            return
        if first:
            _read_plain(fd, view[:first], op.offset)
        if last < op.length:
            _read_plain(fd, view[last:], op.offset + last)
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            self.check_same(fd, direct, path)
            if (op.buffer.address + op.buffer_offset + first) % PAGE == 0:
                place = op.buffer_offset + first
                self.move(op, "READ", direct, op.offset + first, op.buffer, place, last - first)
                return
            bounce = self._bounce()
            for start in range(first, last, BOUNCE):
                size = min(BOUNCE, last - start)
                self.move(op, "READ", direct, op.offset + start, bounce, 0, size)
                view[start : start + size] = bounce.view[:size]
        finally:
            os.close(direct)

    def _bounce(self) -> HostBuffer:
        bounce: HostBuffer | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = HostBuffer(BOUNCE)
        return bounce


def _read_plain(fd: int, view: memoryview, offset: int) -> None:
    """At most two pages: the ends of a range that O_DIRECT cannot read."""
    done = 0
    while done < len(view):
        moved = os.preadv(fd, [view[done:]], offset + done)
        if moved == 0:
            raise OSError(0, f"the file ended at byte {offset + done}")
        done += moved


def open_transport(config: StoreConfig, store: Store, endpoint: str | None, options: Mapping[str, str]) -> NixlPosix:
    """Options: api=uring|aio, direct=false|true, threads, chunk (bytes), queue."""
    if endpoint is not None:
        raise UsageError(f"{config.url}: a file store has no endpoints")
    check_names("nixl-posix", options, ("api", "direct", "threads", "chunk", "queue"))
    api = choice(options, "api", ("uring", "aio"))
    direct = choice(options, "direct", ("false", "true")) == "true"
    refusal = io_uring_refusal() if api == "uring" else ""
    if refusal:
        raise EnvError(
            "nixl-posix is not available",
            cause=f"the kernel refuses {refusal}",
            hint="allow it (sysctl kernel.io_uring_disabled, the container's seccomp profile), or api=aio",
        )
    if "chunk" in options and not direct:
        raise UsageError("chunk= means something with direct=true only", hint="a buffered transfer is one descriptor")
    cores = max(2, min(8, os.cpu_count() or 2))
    return NixlPosix(
        bare(store, "path", "writing"),
        direct=direct,
        threads=number(options, "threads", max(4, cores) if direct else cores, 1, 256),
        chunk=number(options, "chunk", _DIRECT_CHUNK, SMALLEST, PIECE),
        queue=number(options, "queue", 256, 1, 32768),
        aio=api == "aio",
    )
