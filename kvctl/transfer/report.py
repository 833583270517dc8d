"""The report of one run: what moved, which path ran, what it cost, what limited it. Pure values.

JSON form: `to_json`, schema `kvctl.report/1` (shipped as kvctl/cli/schemas/report.schema.json).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

from kvctl.core.units import gigabytes_per_second

SCHEMA: Final = "kvctl.report/1"


@dataclass(slots=True)
class PathReport:
    """One member reached over one endpoint by one transport. Times in seconds."""

    member: str
    endpoint: str
    transport: str
    bytes: int = 0
    requests: int = 0
    retries: int = 0
    failures: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    down: str = ""  # why it was given up, if it was


@dataclass(slots=True)
class TransportReport:
    """Which transport ran and why each faster one did not."""

    name: str
    reason: str
    passed_over: list[tuple[str, str]] = field(default_factory=list)
    fallback: str = ""


@dataclass(slots=True)
class Verification:
    """state: 'full' (digests), 'leaves' (fast checksums of what landed), 'none'. `why` says what was not
    verified and why. Bytes verified.
    """

    state: str = "none"
    why: str = ""
    bytes: int = 0


@dataclass(slots=True)
class Report:
    """`bytes` is payload handed over, `needed` what the request needs, `fetched` what came over the wire (data
    only, headers and manifests are `metadata_bytes`). Seconds are wall time; `setup_s` is the part before the
    first data request. `stages` maps a stage to the share of the run it was busy (0..1 per worker).
    """

    command: str
    source: str = ""
    target: str = ""
    started: str = ""  # RFC 3339, UTC
    seconds: float = 0.0
    setup_s: float = 0.0
    bytes: int = 0
    needed: int = 0
    fetched: int = 0
    written: int = 0
    metadata_bytes: int = 0
    objects: int = 0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    hedged_bytes: int = 0
    misaligned_bytes: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    limiter: str = ""
    ceiling_gbps: float | None = None
    ceiling_how: str = ""
    transport: list[TransportReport] = field(default_factory=list)
    paths: list[PathReport] = field(default_factory=list)
    verified: Verification = field(default_factory=Verification)
    tensors: int = 0
    tp: dict[str, int] = field(default_factory=dict)  # rank, size, sharded_bytes, replicated_bytes
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # Any: per-command facts, JSON values

    @property
    def gbps(self) -> float:
        """Decimal GB/s over the whole run, setup included."""
        return gigabytes_per_second(self.bytes, self.seconds)

    @property
    def over_fetch(self) -> float:
        """Fetched / needed; 1.0 when nothing was needed."""
        return self.fetched / self.needed if self.needed else 1.0

    @property
    def cpu_s_per_gb(self) -> float:
        moved = max(self.fetched, self.written, self.bytes)
        return self.cpu_s / (moved / 1e9) if moved else 0.0

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self),
            "gb_per_s": self.gbps,
            "over_fetch": self.over_fetch,
            "client_cpu_s_per_gb": self.cpu_s_per_gb,
        }
