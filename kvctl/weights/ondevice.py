"""Landing on a device: memory of a GPU, reached through staging slots, or written by transports that can.

The loader reads each run into a slot, verifies it there, and begins its copies; the slot is free again when they are
done. A transport that writes into the device's own memory (GPUDirect) needs no slots; what it brought is verified by
reading it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from kvctl.core.errors import EnvError, KvctlError, UsageError
from kvctl.memory.buffers import PAGE, Buffer, HostBuffer
from kvctl.memory.devices import Device, Event, Span, open_device, wait_all
from kvctl.transports import registry
from kvctl.weights.runs import OutputFile, Run
from kvctl.weights.targets import Landing, Target

_KEPT: Final = "memory"


class DeviceTarget:
    """The memory of `device`, one buffer per output file, congruent with the source modulo 4 KiB. Whoever gets the
    landings owns them; without `keep`, and after an error, they are freed. Owns the device.
    """

    def __init__(self, device: Device, *, keep: bool = True) -> None:
        self.device = device
        self.name = device.name
        self.landings: Sequence[Landing] | None = None
        self.placed: Sequence[Landing] = ()
        self._keep = keep

    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        """Raises CapacityError when the device has not enough memory: nothing of it is held then."""
        landings: list[Landing] = []
        try:
            for output in outputs:
                start = output.congruent_to % PAGE
                landings.append(Landing(self.device.allocate(start + output.data_size), start))
        except BaseException:
            for landing in landings:
                landing.buffer.close()
            raise
        self.placed = landings
        return False

    def landed(self, run: int) -> str | None:
        return None

    def record(self, run: int, checksum: str) -> None:
        return

    def publish(self) -> None:
        """The copies are done, for every stream of the device."""
        self.device.finish()
        if self._keep:
            self.landings = self.placed

    def close(self, error: BaseException | None) -> None:
        try:
            if error is not None or not self._keep:
                # nothing may still write into what is given back
                self._settle()
                for landing in self.placed:
                    landing.buffer.close()
        finally:
            self.device.close()

    def _settle(self) -> None:
        with contextlib.suppress(KvctlError):  # the error that ends the load says more
            self.device.finish()

    def copy(self, staging: Buffer, at: int, run: Run) -> None:
        """Copy a run from a staging slot (at offset `at`) to its place, and wait until the slot is free again."""
        events: list[Event] = []
        if run.dest is not None:
            landing = self.placed[run.output]
            span = Span(at, landing.data_start + run.dest, run.length)
            events.append(self.device.copy_async(staging, landing.buffer, span))
        for piece in run.pieces if run.dest is None else ():
            landing = self.placed[piece.output]
            span = Span(
                at + piece.source,
                landing.data_start + piece.dest,
                piece.row_bytes,
                piece.rows,
                piece.source_stride,
                piece.dest_stride,
            )
            if piece.nbytes:
                events.append(self.device.copy_async(staging, landing.buffer, span))
        wait_all(events)

    def read_back(self, run: Run) -> HostBuffer:
        """A run that a transport put into the device's memory, as the CPU sees it. The caller closes it."""
        assert run.dest is not None
        landing = self.placed[run.output]
        buffer = HostBuffer(run.length)
        self.device.read_back(landing.buffer, landing.data_start + run.dest, buffer.view)
        return buffer

    def look(self, landing: Landing, start: int, end: int) -> memoryview:
        """Bytes [start, end) of a landing's data section."""
        view = memoryview(bytearray(end - start))
        self.device.read_back(landing.buffer, landing.data_start + start, view)
        return view


def on_device(target: Target, device: str, into: str) -> Target:
    """The target for a load with `--device`: for 'cpu' the one that was given. Raises UsageError, EnvError."""
    if device == "cpu" or isinstance(target, DeviceTarget):
        return target
    if into not in {"none", _KEPT}:
        raise UsageError(
            f"--into {into} keeps weights in host memory or files, not on {device}",
            hint="use --into none, the Python API (kvctl.load_weights) for tensors on a GPU, or --device cpu",
        )
    return DeviceTarget(open_device(device), keep=into == _KEPT)


def direct_or_not(
    device: Device, schemes: Sequence[str], runs: Sequence[Run], transport: str, failed: Mapping[str, str]
) -> tuple[bool, str]:
    """(whether transports may write into the device's own memory, why not). Every scheme has to have one, and every
    run has to be one piece: what is cut apart or misaligned goes through a slot.
    """
    if any(run.dest is None for run in runs):
        return False, "some ranges are cut apart on their way"
    reasons: list[str] = []
    for scheme in dict.fromkeys(schemes):
        try:
            registry.choose(scheme, device.memory_kind, transport, failed=failed)
        except (EnvError, UsageError):
            reasons.append(_why_not(scheme, device.memory_kind, transport))
    return not reasons, "; ".join(reasons)


def _why_not(scheme: str, kind: str, transport: str) -> str:
    """Which transports could write there, and what keeps each from it."""
    found = []
    for spec in registry.transport_specs().values():
        if kind in spec.memory_kinds and (not spec.schemes or scheme in spec.schemes):
            probed = registry.probe(spec)
            if not probed.available:
                found.append(f"{spec.name}: {probed.reason}")
            elif transport not in {"auto", spec.name}:
                found.append(f"{spec.name}: {transport} was asked for")
    return ", ".join(found) or f"no transport for {scheme}:// writes into {kind} memory"
