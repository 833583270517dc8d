"""Running the probes: all at once, each on a thread of its own with a deadline, findings in the probes' order."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvctl.core.cancel import CancelToken
from kvctl.core.errors import EnvError
from kvctl.doctor.findings import ORDER, Finding, Probe, State

SCHEMA: Final = "kvctl.doctor/1"
_TICK: Final = 0.1


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, and how long it took (seconds)."""

    findings: Sequence[Finding]
    seconds: float

    @property
    def state(self) -> State:
        """The worst of them."""
        return max((finding.state for finding in self.findings), key=ORDER.index, default="ok")

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": SCHEMA,
            "state": self.state,
            "seconds": self.seconds,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def require_whole(self) -> None:
        """Raises EnvError that names what is broken; degraded is no error."""
        broken = [finding for finding in self.findings if finding.state == "broken"]
        if broken:
            first = broken[0]
            raise EnvError(
                f"{len(broken)} of {len(self.findings)} findings are broken: "
                f"{', '.join(f'{finding.area} {finding.name}' for finding in broken[:5])}",
                cause=first.why or first.value,
                hint=first.fix or None,
            )


def examine(probes: Sequence[Probe], cancel: CancelToken | None = None) -> Diagnosis:
    """Run the probes. One that does not end in time is a finding; its thread is left behind (it holds nothing)."""
    started = time.monotonic()
    jobs = [_Job(probe) for probe in probes]
    for job in jobs:
        job.thread.start()
    found: list[Finding] = []
    for job in jobs:
        deadline = started + job.probe.seconds
        while job.thread.is_alive() and time.monotonic() < deadline:
            if cancel is not None:
                cancel.check("looking at this machine")
            job.thread.join(_TICK)
        found += job.findings if job.findings is not None else [_late(job.probe)]
    return Diagnosis(found, time.monotonic() - started)


class _Job:
    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.findings: Sequence[Finding] | None = None
        self.thread = threading.Thread(target=self._look, name=f"kvctl-doctor-{probe.name}", daemon=True)

    def _look(self) -> None:
        probe = self.probe
        try:
            self.findings = list(probe.look())
        except Exception as problem:  # a probe looks at foreign machines: it may fail in any way
            self.findings = [
                Finding(
                    probe.area,
                    probe.name,
                    "broken",
                    "cannot be looked at",
                    f"{type(problem).__name__}: {problem}",
                    "run with -vv and report it",
                )
            ]


def _late(probe: Probe) -> Finding:
    return Finding(
        probe.area,
        probe.name,
        "broken",
        "no answer",
        f"it did not answer within {probe.seconds:g} s",
        "look at the driver, the mount or the network behind it",
    )
