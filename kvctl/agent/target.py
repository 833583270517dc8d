"""`slot:NAME` as the target of a load: memory that the agent owns, filled from here, sealed by the agent. What is on
devices is filled by `kvctl.agent.device_target`, which has one of these.

The agent gives descriptors of fresh memfds; the load writes into them as into any memory of its own, whatever the
source and the transport. When all has landed and was verified, the mappings go, the agent seals the memory and lets
it serve. A load that dies before is freed with its connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.agent.client import AgentClient, OpenedSlot
from kvctl.agent.driving import Driver
from kvctl.agent.generations import HAVE, HAVE_ENTRY, SlotFile, Space, check_name, check_same_shape
from kvctl.agent.memory import MemfdBuffer
from kvctl.core.errors import UsageError
from kvctl.memory.buffers import PAGE
from kvctl.memory.shareable import Shareable
from kvctl.weights.engine_layout import check_is_checkpoint
from kvctl.weights.runs import OutputFile
from kvctl.weights.safetensors import parse_header
from kvctl.weights.targets import Landing

Shapes = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """`swap`: replace what the slot serves, by weights of the same names, dtypes and shapes. `driver`: what else has to
    take the new generation, when it is complete and sealed, before it serves. `runs`: how many runs the load has, where
    peers want to know which have landed.
    """

    swap: bool = False
    keep_previous: bool = False
    evict_first: bool = False
    evict: bool = False
    source: str = ""
    runs: int = 0
    driver: Driver | None = None


class SlotTarget:
    """See `kvctl.weights.targets.Target`."""

    def __init__(self, slot: str, options: SlotOptions | None = None, *, socket: str | None = None) -> None:
        check_name(slot)
        self.devices: Sequence[Shareable] = ()  # where the data sections go: one for all, or one for each output
        self.spaces: list[tuple[Space, int]] = []  # what the agent gave there, with the descriptors
        self.slot = slot
        self.name = f"slot:{slot}"
        self.address = "" if socket else f"slot://{slot}"
        self.options = options or SlotOptions()
        self.landings: Sequence[Landing] | None = None
        self.ident = ""
        self.number = 0
        self.document: Mapping[str, Any] | None = None  # Any: JSON; the generation that serves, once it does
        self.socket = socket
        self._client: AgentClient | None = None
        self._buffers: list[MemfdBuffer] = []
        self._have: MemfdBuffer | None = None

    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        """Raises EnvError (no agent), CapacityError, ConflictError, UsageError, IncompatibleError."""
        options = self.options
        client = self._client = AgentClient(self.socket, label="load-weights")
        shapes = shapes_of((output.header, len(output.header) + output.data_size, output.name) for output in outputs)
        if options.swap:
            self._check_shapes(client, shapes)
        spaces = [self._space(number, output) for number, output in enumerate(outputs)]
        files = [
            SlotFile(output.name, len(output.header) + output.data_size, len(output.header), space)
            for output, space in zip(outputs, spaces, strict=True)
        ]
        files += [SlotFile(name, len(data)) for name, data in side_files.items()]
        for file in files:
            if file.name in {"", HAVE} or "/" in file.name:
                raise UsageError(f"{file.name!r} cannot be a file of a slot")
        answer, fds = client.call_fds(
            "reserve",
            slot=self.slot,
            fingerprint=fingerprint,
            source=options.source,
            files=[file.to_json() for file in files],
            facts={"tensors": len(shapes)},
            runs=options.runs,
            swap=options.swap,
            evict_first=options.evict_first,
            evict=options.evict,
        )
        if answer["state"] == "present":
            self.document = client.current(self.slot)
            return True
        self.ident, self.number = answer["ident"], answer["number"]
        count = len(files) + 1  # with the one that says what has landed
        self.spaces = list(zip((space for space in spaces if space is not None), fds[count:], strict=True))
        self._fill_small(outputs, side_files, fds[:count])
        return False

    def device_of(self, output: int) -> Shareable:
        return self.devices[output] if len(self.devices) > 1 else self.devices[0]

    def _space(self, number: int, output: OutputFile) -> Space | None:
        if not self.devices:
            return None
        device = self.device_of(number)
        start = output.congruent_to % PAGE  # what can go straight there is aligned as the source is
        return Space(device.ident, device.size_of(start + output.data_size), start)

    def _check_shapes(self, client: AgentClient, shapes: Shapes) -> None:
        serving = client.open(self.slot, devices=True)
        try:
            check_same_shape(read_shapes(serving), shapes)
        finally:
            close_files(serving)
            client.call("release", ident=serving.ident)  # now, or our own lease is in the way of --evict-first

    def _fill_small(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fds: Sequence[int]) -> None:
        landings: list[Landing] = []
        taken = iter(fds)
        for output in outputs:
            if self.devices:
                _write(next(taken), output.header)
                continue
            buffer = MemfdBuffer(next(taken), len(output.header) + output.data_size)
            self._buffers.append(buffer)
            buffer.view[: len(output.header)] = output.header
            landings.append(Landing(buffer, len(output.header)))
        for data in side_files.values():
            _write(next(taken), data)
        self._have = MemfdBuffer(next(taken), max(1, self.options.runs) * HAVE_ENTRY)
        self.landings = landings

    def landed(self, run: int) -> str | None:
        return None

    def record(self, run: int, checksum: str) -> None:
        return

    def share(self, run: int, checksum: int) -> None:
        """Run number `run` has landed and was verified: peers see it at once, with the XXH3 of its bytes (not 0)."""
        if self._have is not None:
            at = run * HAVE_ENTRY
            self._have.view[at : at + HAVE_ENTRY] = checksum.to_bytes(HAVE_ENTRY, "little")

    def publish(self) -> None:
        assert self._client is not None
        self.landings = None
        for buffer in self._buffers:
            buffer.unmap()
        self._client.call("stage", ident=self.ident)
        driver = self.options.driver
        if driver is not None:
            driver.prepare(self.slot, self.ident)
        try:
            self.document = self._client.call("commit", ident=self.ident, keep_previous=self.options.keep_previous)
        except BaseException:
            if driver is not None:
                driver.undo()
            raise
        if driver is not None:
            driver.finish()

    def close(self, error: BaseException | None) -> None:
        self.landings = None
        for buffer in (*self._buffers, *([self._have] if self._have is not None else [])):
            buffer.close()
        self._buffers, self._have = [], None
        for _, fd in self.spaces:
            os.close(fd)
        self.spaces = []
        if self._client is not None:
            self._client.close()  # what was not committed is freed with the connection


def _write(fd: int, data: bytes) -> None:
    """Fill memory from its beginning, and close it."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)
    os.close(fd)


def shapes_of(headers: Iterable[tuple[bytes, int, str]]) -> Shapes:
    """Name -> (dtype, shape) over all headers: (bytes of the header, size of the file, its name). What several ranks
    have is told apart by the file's name. Raises IncompatibleError for what an engine has laid out.
    """
    found: Shapes = {}
    for raw, size, file in headers:
        header = parse_header(raw, size, file)
        check_is_checkpoint(header.metadata, file)
        for tensor in header.tensors:
            name = f"{tensor.name} ({file})" if tensor.name in found else tensor.name
            found[name] = (tensor.dtype, tensor.shape)
    return found


def read_shapes(opened: OpenedSlot) -> Shapes:
    return shapes_of((os.pread(file.fd, file.header, 0), file.size, file.name) for file in opened.files if file.header)


def close_files(opened: OpenedSlot) -> None:
    for file in opened.files:
        file.close()


def make_target(value: str) -> SlotTarget:
    """The target behind `slot:NAME`."""
    return SlotTarget(value)
