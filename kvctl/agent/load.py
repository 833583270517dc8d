"""Loading into a slot, and swapping what it serves. The use cases behind `load-weights --into slot:NAME` and `swap`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvctl.agent.client import AgentClient
from kvctl.agent.device_target import DeviceSlotTarget
from kvctl.agent.driving import Driver
from kvctl.agent.generations import HOST
from kvctl.agent.target import SlotOptions, SlotTarget
from kvctl.core.context import Context
from kvctl.core.errors import (
    InterruptedRunError,
    KvctlError,
    NothingServesError,
    PartialError,
    SwapFailedError,
    UsageError,
)
from kvctl.memory.devices import open_shareable
from kvctl.transfer.report import Report
from kvctl.weights.load import load_into
from kvctl.weights.ondevice import devices_of, open_all
from kvctl.weights.request import LoadRequest


def load_slot(
    request: LoadRequest,
    ctx: Context,
    *,
    options: SlotOptions | None = None,
    peers: Sequence[str] = (),
    socket: str | None = None,
) -> Report:
    """Load into the slot that `request.into` names; what it holds already is not loaded again. `peers`: agents that
    load the same now (`HOST:PORT`); each byte is then read from the source by one of them.
    """
    slot = request.into.removeprefix("slot:")
    return _load(request, SlotTarget(slot, options, socket=socket), peers, ctx)


def _load(request: LoadRequest, target: SlotTarget, peers: Sequence[str], ctx: Context) -> Report:
    target.options = replace(target.options, source=_source(request))
    if request.device != HOST:
        if peers:
            raise UsageError(
                "peers load into host memory together, not onto a device", hint="leave out --peer, or --device"
            )
        report, _ = load_into(request, _on_devices(request, target), ctx)
    elif peers:
        from kvctl.agent.fanning import load_with_peers

        report = load_with_peers(request, target, peers, ctx)
    else:
        report, _ = load_into(request, target, ctx)
    if target.document is not None:
        report.extra["slot"] = dict(target.document)
    return report


def _on_devices(request: LoadRequest, target: SlotTarget) -> DeviceSlotTarget:
    """The agent's memory and the streams of the same devices. Raises UsageError, EnvError."""
    names = devices_of(request)
    target.devices = [open_shareable(name) for name in names]
    return DeviceSlotTarget(target, *open_all(names))


def swap_slot(
    slot: str,
    request: LoadRequest,
    ctx: Context,
    *,
    options: SlotOptions | None = None,
    peers: Sequence[str] = (),
    socket: str | None = None,
) -> Report:
    """Load the next generation beside the one that serves, verify it, and let it serve. Who is attached keeps the old
    one until he attaches again; it is freed with its last lease, or kept (`keep_previous`).

    What is refused before anything has changed is raised as it is (IncompatibleError for other names, dtypes or
    shapes, CapacityError, ..); after that SwapFailedError when the old one still serves, NothingServesError when it
    was freed first (`evict_first`).
    """
    target = SlotTarget(slot, replace(options or SlotOptions(), swap=True), socket=socket)
    try:
        with AgentClient(socket, label="swap") as client:
            serving = client.current(slot) or {}
        device = str(serving.get("device", HOST))  # the next one goes where the old one is
        report = _load(replace(request, into=f"slot:{slot}", device=device), target, peers, ctx)
    except KvctlError as error:
        serves = _serves(slot, socket)
        if isinstance(error, (NothingServesError, PartialError)):
            raise  # the engines say it better
        began = bool(target.ident) and not isinstance(error, InterruptedRunError)
        if began or (target.options.evict_first and not serves):
            raise _failed(slot, error, serves=serves) from error
        raise
    report.command = "swap"
    return report


def rollback_slot(slot: str, *, driver: Driver | None = None, socket: str | None = None) -> dict[str, object]:
    """The kept generation serves again; the one that served is kept in its place. `driver`: engines that take it first.
    Raises NotFoundError, SwapFailedError.
    """
    with AgentClient(socket, label="swap --rollback") as client:
        if driver is not None:
            kept = [item["ident"] for item in client.call("ls", slot=slot)["slots"] if item["state"] == "previous"]
            if kept:
                driver.prepare(slot, kept[0])
        try:
            found = client.call("rollback", slot=slot)
        except BaseException:
            if driver is not None:
                driver.undo()
            raise
        if driver is not None:
            driver.finish()
        return found


def _serves(slot: str, socket: str | None) -> bool:
    try:
        with AgentClient(socket, label="swap") as client:
            return client.current(slot) is not None
    except KvctlError:
        return False  # the agent is gone: what was attached is all there is


def _failed(slot: str, error: KvctlError, *, serves: bool) -> KvctlError:
    if serves:
        return SwapFailedError(
            f"the swap of slot {slot} failed, the old weights serve",
            cause=str(error), hint=error.hint, details={"code": error.code},
        )  # fmt: skip
    return NothingServesError(
        f"the swap of slot {slot} failed, and nothing serves",
        cause=str(error), hint=f"load again: --into slot:{slot}", details={"code": error.code},
    )  # fmt: skip


def _source(request: LoadRequest) -> str:
    version = f"@{request.version}" if request.version else ""
    return f"{request.address}{version}"
