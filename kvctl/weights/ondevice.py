"""Landing on a device: memory of a GPU, reached through staging slots, or written by transports that can.

The loader reads each run into a slot, verifies it there, and begins its copies; the slot is free again when they are
done. A transport that writes into the device's own memory (GPUDirect) needs no slots; what it brought is verified by
reading it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvctl.core.errors import EnvError, KvctlError, UsageError
from kvctl.memory.buffers import PAGE, Buffer, HostBuffer
from kvctl.memory.devices import Device, Event, Span, device_names, open_device, wait_all
from kvctl.transports import registry
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import OutputFile, Run
from kvctl.weights.targets import Landing, Target

_KEPT: Final = "memory"


class DeviceTarget:
    """The memory of one device, or of several of a kind with an output file (a rank) each: one buffer per output,
    congruent with the source modulo 4 KiB. Whoever gets the landings owns them; without `keep`, and after an error,
    they are freed. Owns the devices.
    """

    def __init__(self, *devices: Device, keep: bool = True) -> None:
        self.devices = devices
        first, last = devices[0].name, devices[-1].name
        self.name = first if first == last else f"{first}-{last.partition(':')[2]}"
        self.memory_kind, self.staging_kind = devices[0].memory_kind, devices[0].staging_kind
        self.landings: Sequence[Landing] | None = None
        self.placed: Sequence[Landing] = ()
        self._keep = keep
        self._closed = False

    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        """Raises CapacityError when a device has not enough memory: nothing of any is held then."""
        assert len(self.devices) in {1, len(outputs)}, "several devices take a rank each"
        landings: list[Landing] = []
        try:
            for number, output in enumerate(outputs):
                start = output.congruent_to % PAGE
                landings.append(Landing(self.device_of(number).allocate(start + output.data_size), start))
        except BaseException:
            for landing in landings:
                landing.buffer.close()
            raise
        self.placed = landings
        return False

    def device_of(self, output: int) -> Device:
        return self.devices[output] if len(self.devices) > 1 else self.devices[0]

    def landed(self, run: int) -> str | None:
        return None

    def record(self, run: int, checksum: str) -> None:
        return

    def publish(self) -> None:
        """The copies are done, for every stream of the devices."""
        for device in self.devices:
            device.finish()
        if self._keep:
            self.landings = self.placed

    def close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if error is not None or not self._keep:
                # nothing may still write into what is given back
                self._settle()
                for landing in self.placed:
                    landing.buffer.close()
        finally:
            for device in self.devices:
                device.close()

    def _settle(self) -> None:
        for device in self.devices:
            with contextlib.suppress(KvctlError):  # the error that ends the load says more
                device.finish()

    def copy(self, staging: Buffer, at: int, run: Run) -> None:
        """Copy a run from a staging slot (at offset `at`) to its place, and wait until the slot is free again."""
        events: list[Event] = []
        if run.dest is not None:
            landing = self.placed[run.output]
            span = Span(at, landing.data_start + run.dest, run.length)
            events.append(self.device_of(run.output).copy_async(staging, landing.buffer, span))
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
                events.append(self.device_of(piece.output).copy_async(staging, landing.buffer, span))
        wait_all(events)

    def read_back(self, run: Run) -> HostBuffer:
        """A run that a transport put into the device's memory, as the CPU sees it. The caller closes it."""
        assert run.dest is not None
        landing = self.placed[run.output]
        buffer = HostBuffer(run.length)
        self.device_of(run.output).read_back(landing.buffer, landing.data_start + run.dest, buffer.view)
        return buffer

    def look(self, landing: Landing, start: int, end: int) -> memoryview:
        """Bytes [start, end) of a landing's data section."""
        view = memoryview(bytearray(end - start))
        number = next(number for number, item in enumerate(self.placed) if item is landing)
        self.device_of(number).read_back(landing.buffer, landing.data_start + start, view)
        return view


def on_device(target: Target, request: LoadRequest) -> Target:
    """The target for a load with `--device`: for 'cpu' the one that was given. Raises UsageError, EnvError."""
    if request.device == "cpu" or isinstance(target, DeviceTarget):
        return target
    names = device_names(request.device)
    if request.into not in {"none", _KEPT}:
        raise UsageError(
            f"--into {request.into} keeps weights in host memory or files, not on {request.device}",
            hint="use --into none, the Python API (kvctl.load_weights) for tensors on a GPU, or --device cpu",
        )
    if len(names) > 1 and (len(names) != request.tp_size or request.tp_rank is not None):
        raise UsageError(
            f"{request.device} are {len(names)} devices, which take a rank each",
            hint=f"add --tp-size {len(names)}, without --tp-rank",
        )
    return DeviceTarget(*_open_all(names), keep=request.into == _KEPT)


def _open_all(names: Sequence[str]) -> list[Device]:
    with contextlib.ExitStack() as stack:
        opened: list[Device] = []
        for name in names:
            device = open_device(name)
            stack.callback(device.close)
            opened.append(device)
        stack.pop_all()
        return opened


@contextlib.contextmanager
def releasing(target: Target) -> Iterator[None]:
    """Whatever goes wrong, before the target is opened too, its devices are closed."""
    try:
        yield
    except BaseException as error:
        if isinstance(target, DeviceTarget):
            target.close(error)
        raise


def direct_or_not(
    kind: str, schemes: Sequence[str], runs: Sequence[Run], transport: str, failed: Mapping[str, str]
) -> tuple[bool, str]:
    """(whether transports may write into memory of `kind`, a device's own, and why not). Every scheme has to have one,
    and every run has to be one piece: what is cut apart or misaligned goes through a slot.
    """
    if any(run.dest is None for run in runs):
        return False, "some ranges are cut apart on their way"
    reasons: list[str] = []
    for scheme in dict.fromkeys(schemes):
        try:
            registry.choose(scheme, kind, transport, failed=failed)
        except (EnvError, UsageError):
            reasons.append(_why_not(scheme, kind, transport))
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
