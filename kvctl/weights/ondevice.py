"""Landing on a device: memory of a GPU, reached through staging slots, or written by transports that can.

A run is read into a slot, verified there, and its copies are begun; the slot is free again when they are done. A
transport that writes into the device's own memory (GPUDirect) needs no slots; what it brought is verified by reading it
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvctl.core.context import Context
from kvctl.core.errors import EnvError, KvctlError, TransientError, UsageError
from kvctl.memory.arena import Arena
from kvctl.memory.buffers import PAGE, Buffer, HostBuffer, address_of
from kvctl.memory.devices import Device, Event, Span, device_names, open_device, wait_all
from kvctl.transfer.lanes import Lane, LaneSet, Member, percentile
from kvctl.transfer.report import Report, TransportReport
from kvctl.transfer.summary import Stopwatch, limiter
from kvctl.transports import registry
from kvctl.transports.api import Store, StoreConfig
from kvctl.weights.moving import Loading
from kvctl.weights.planning import LoadPlan, Opened
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import OutputFile, Run
from kvctl.weights.targets import Landing, Target, UnrecordedTarget

_KEPT: Final = "memory"
_WAITERS: Final = 2  # more finishers: those that wait for copies keep no CPU busy


class DeviceTarget(UnrecordedTarget):
    """The memory of one device, or of several of a kind with an output file (a rank) each: one buffer per output,
    congruent with the source modulo 4 KiB. Whoever gets the landings owns them; without `keep`, and after an error,
    they are freed. Owns the devices.
    """

    def __init__(self, *devices: Device, keep: bool = True) -> None:
        self.devices = devices
        first, last = devices[0].name, devices[-1].name
        self.name = first if first == last else f"{first}-{last.partition(':')[2]}"
        self.memory_kind, self.staging_kind = devices[0].memory_kind, devices[0].staging_kind
        self.landings = None
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
    names = devices_of(request)
    if request.into not in {"none", _KEPT}:
        raise UsageError(
            f"--into {request.into} keeps weights in host memory or files, not on {request.device}",
            hint="use --into slot:NAME (of an agent with --device-memory), --into none, or --device cpu;"
            " kvctl.load_weights gives tensors on a GPU",
        )
    return DeviceTarget(*open_all(names), keep=request.into == _KEPT)


def devices_of(request: LoadRequest) -> tuple[str, ...]:
    """The devices that a load names: one, or one for each rank. Raises UsageError."""
    names = device_names(request.device)
    if len(names) > 1 and (len(names) != request.tp_size or request.tp_rank is not None):
        raise UsageError(
            f"{request.device} are {len(names)} devices, which take a rank each",
            hint=f"add --tp-size {len(names)}, without --tp-rank",
        )
    return names


def open_all(names: Sequence[str]) -> list[Device]:
    """Every one of these devices, or none. Raises EnvError."""
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


class DeviceLoading(Loading):
    """One or two passes: what a transport can write straight into the device's memory, and what goes through slots,
    because it is cut apart or misaligned, or because no transport reaches there.
    """

    def __init__(
        self, request: LoadRequest, source: Opened, plan: LoadPlan, target: Target, report: Report, ctx: Context
    ) -> None:
        super().__init__(request, source, plan, target, report, ctx)
        assert isinstance(target, DeviceTarget)
        self.device = target
        self.direct = False  # this pass: transports write into the device's own memory
        self._passes: tuple[bool, ...] = (False,)
        self._lanes: list[Lane] = []
        self._way: dict[str, object] = {"name": target.name}

    def move(self, watch: Stopwatch) -> None:
        """Every pass, and one report of all."""
        why = self._choose_passes()
        report = self.report
        transports: list[TransportReport] = []
        fetched = needed = misaligned = straight = 0
        for direct in self._passes:
            self.direct = direct
            try:
                super().move(watch)
            except (EnvError, TransientError) as error:
                if not direct or not self.request.fallback:
                    raise
                # slots are the next way: all of it goes through them
                self._passes, why = (False,), f"writing into its memory failed: {error}"
                self.ctx.progress.note(f"falling back to staging slots: {error}")
                self.move_staged(watch)
            transports += [entry for entry in report.transport if entry not in transports]
            fetched, needed = fetched + report.fetched, needed + report.needed
            misaligned += report.misaligned_bytes
            straight += report.fetched if self.direct else 0
            if self._passes == (False,):
                break
        report.fetched, report.needed, report.misaligned_bytes = fetched, needed, misaligned
        report.transport = transports
        self._way["straight_bytes"] = straight
        report.extra["device"] = self._way
        self._sum_up()
        if why:
            slots = f"{self.device.staging_kind} staging slots"
            report.notes.append(f"{self.device.name} is reached through {slots}: {why}")

    def move_staged(self, watch: Stopwatch) -> None:
        """All of it through slots, after a transport that wrote straight has failed."""
        self.direct = False
        super().move(watch)
        for entry in self.report.transport:
            entry.fallback = entry.fallback or "a transport that writes into the device's memory failed"

    def _sum_up(self) -> None:
        """What is counted over all passes."""
        report, wall = self.report, max(self.stats.seconds, 1e-9)
        report.p50_s, report.p99_s = percentile(self.stats.durations, 0.5), percentile(self.stats.durations, 0.99)
        report.paths = [lane.report() for lane in self._lanes]
        busy = self.clock.busy()
        report.stages = {stage: min(1.0, spent / wall / self._workers()) for stage, spent in sorted(busy.items())}
        if self._lanes:
            report.stages["transfer"] = sum(lane.active_s for lane in self._lanes) / wall / len(self._lanes)
        report.limiter = limiter(report.stages, self._lanes, wall)

    def _choose_passes(self) -> str:
        """Sets them; says why slots are used, if they are."""
        whole = [run for run in self.plan.runs if run.dest is not None]
        why = _no_direct(self.device.memory_kind, self.source.members, self.request.transport) if whole else ""
        if not whole or why:
            self._passes = (False,)
            return why or "every range is cut apart or moved on its way"
        apart = len(self.plan.runs) - len(whole)
        self._passes = (True, False) if apart else (True,)
        return f"{apart} of {len(self.plan.runs)} ranges are cut apart or moved on their way" if apart else ""

    @property
    def _schemes(self) -> list[str]:
        return list(dict.fromkeys(member.config.scheme for member in self.source.members))

    def _transport(self) -> tuple[str, Mapping[str, str]]:
        """The one that was asked for, in the passes that it can serve."""
        name, options = super()._transport()
        if len(self._passes) == 1 or self.direct or name == "auto":
            return name, options
        try:
            for scheme in self._schemes:
                registry.choose(scheme, self.device.staging_kind, name)
        except (EnvError, UsageError):
            self.report.notes.append(f"{name} cannot serve what goes through slots: another transport does")
            return "auto", {}
        return name, options

    def _memory_kind(self) -> str:
        return self.device.memory_kind if self.direct else self.device.staging_kind

    def _still_to_do(self) -> dict[int, Run]:
        """The runs of this pass."""
        left = super()._still_to_do()
        if len(self._passes) == 1:
            return left
        return {number: run for number, run in left.items() if (run.dest is not None) is self.direct}

    def _attempt(self, lanes: LaneSet, watch: Stopwatch) -> None:
        super()._attempt(lanes, watch)
        self._lanes += lanes.lanes

    @property
    def _keeps(self) -> bool:
        return True

    @property
    def _hedges(self) -> bool:
        return not self.direct  # its copy is made by the CPU

    def _workers(self) -> int:
        return super()._workers() + _WAITERS

    def _staged(self, run: Run) -> bool:
        return not self.direct

    def _arena(self, lanes: LaneSet, longest: int) -> Arena:
        made = super()._arena(lanes, longest)
        self._way |= {"staging": self.device.staging_kind, "slots": made.slots, "slot_bytes": made.slot_bytes}
        return made

    def _slots_of(self, nbytes: int) -> Buffer:
        return self.device.devices[0].staging(nbytes)

    @property
    def _computes(self) -> bool:
        return False  # copies to and from the device are waited for

    def _landing(self, run: Run) -> Landing:
        return self.device.placed[run.output]

    @property
    def _forgets(self) -> bool:
        return True

    def _land(self, number: int, run: Run, view: memoryview) -> None:
        """From the slot that `view` is to the device; or, where it was written there, back for verification. The slot
        is used again when this returns: after the copies' events.
        """
        if self.direct:
            with self.clock.timed("read back"):
                held = self.device.read_back(run)
            try:
                self._verify(run, held.view)
            finally:
                held.close()
            return
        self._verify(run, view)
        assert self.staging is not None
        with self.clock.timed("copy"):
            self.device.copy(self.staging.buffer, address_of(view) - self.staging.buffer.address, run)


def _no_direct(kind: str, members: Sequence[Member], transport: str) -> str:
    """Why not every store has a transport that writes into memory of `kind`, a device's own; empty when each has."""
    stores: dict[str, list[tuple[StoreConfig, Store]]] = {}
    for member in members:
        stores.setdefault(member.config.scheme, []).append((member.config, member.store))
    reasons: list[str] = []
    for scheme, places in stores.items():
        try:
            registry.choose(scheme, kind, transport, stores=places)
        except (EnvError, UsageError):
            reasons.append(_why_not(scheme, kind, transport, places))
    return "; ".join(reasons)


def _why_not(scheme: str, kind: str, transport: str, stores: Sequence[tuple[StoreConfig, Store]]) -> str:
    """Which transports could write there, and what keeps each from it."""
    found = []
    for spec in registry.transport_specs().values():
        if kind in spec.memory_kinds and (not spec.schemes or scheme in spec.schemes):
            probed = registry.probe(spec)
            if not probed.available:
                found.append(f"{spec.name}: {probed.reason}")
            elif refusal := registry.unserved(spec, stores):
                found.append(f"{spec.name}: {refusal}")
            elif transport not in {"auto", spec.name}:
                found.append(f"{spec.name}: {transport} was asked for")
    return ", ".join(found) or f"no transport for {scheme}:// writes into {kind} memory"
