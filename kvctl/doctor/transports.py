"""The plug-ins of this installation: broken entry points, and what each transport's probe says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvctl.doctor import children
from kvctl.doctor.findings import Finding, Probe
from kvctl.transports import registry
from kvctl.transports.http import pump

AREA: Final = "transports"


def probes() -> list[Probe]:
    return [
        Probe(AREA, "plug-ins", lambda: list(broken())),
        Probe(AREA, "compiled reader", lambda: list(compiled())),
        Probe(AREA, "probes", lambda: list(transports()), children.START + 4 * children.SECONDS),
    ]


def broken() -> Iterator[Finding]:
    """Plug-ins that were installed and cannot be used."""
    found = registry.broken_plugins()
    for item in found:
        yield Finding(AREA, f"plug-in {item.name}", "broken", item.group, item.reason, "reinstall or uninstall it")
    if not found:
        yield Finding(AREA, "plug-ins", "ok", f"{len(registry.transport_specs())} transports, none broken")


def compiled() -> Iterator[Finding]:
    reason = pump.why_not()
    if reason:
        why = f"{reason}: s3 and native-tcp read in Python, at more CPU per request"
        yield Finding(AREA, "compiled reader", "degraded", "none", why, pump.HINT)
    else:
        yield Finding(AREA, "compiled reader", "ok", "loads")


def transports() -> Iterator[Finding]:
    """Each transport: can it run here, why not, and how to get it. The probes run in a child process."""
    said, broke = children.transports()
    for row in said:
        if row["available"]:
            yield Finding(AREA, str(row["name"]), "ok", "available")
        else:
            yield Finding(AREA, str(row["name"]), "degraded", "not available", str(row["reason"]), str(row["hint"]))
    for name, how in broke.items():
        yield Finding(AREA, name, "broken", "its probe broke", how, "uninstall the plug-in, or report it to its maker")
