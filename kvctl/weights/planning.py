"""From an address to a plan: open the source, check all of its headers, and say which runs a load takes.

`Opened` is a source with its members open; `LoadPlan` is what a load will do, and what `--dry-run` prints.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import blake3

from kvctl.core.context import Context
from kvctl.core.units import MIB
from kvctl.transfer.lanes import Member
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import Run
from kvctl.weights.targets import OutputFile

RUN: Final = 16 * MIB
PLAN_SCHEMA: Final = "kvctl.load-plan/1"


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A tensor of the result: bytes [start, end) of the data section of output file `output`. `shape` is the
    slice's, for a TP rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    output: int
    start: int
    end: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load will do. Bytes; `needed_bytes` is what the caller gets, runs may fetch more (see `Run.needed`)."""

    source: str
    outputs: tuple[OutputFile, ...]
    tensors: tuple[LoadedTensor, ...]
    runs: tuple[Run, ...]
    members: tuple[str, ...]
    objects: int
    fingerprint: str
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    metadata_bytes: int = 0
    metadata_requests: int = 0
    unverified_because: str = ""
    tp: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def needed_bytes(self) -> int:
        return sum(tensor.end - tensor.start for tensor in self.tensors)

    @property
    def fetched_bytes(self) -> int:
        return sum(run.length for run in self.runs)

    def tp_report(self) -> dict[str, int]:
        return dict(self.tp)

    def spread(self) -> dict[str, dict[str, int]]:
        """Bytes and requests per member, as planned (a run's first place)."""
        spread = {name: {"bytes": 0, "requests": 0} for name in self.members}
        for run in self.runs:
            entry = spread[self.members[run.places[0].member]]
            entry["bytes"] += run.length
            entry["requests"] += 1
        return spread

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        needed, fetched = self.needed_bytes, self.fetched_bytes
        return {
            "schema": PLAN_SCHEMA,
            "source": self.source,
            "files": [{"name": output.name, "bytes": output.data_size} for output in self.outputs],
            "objects": self.objects,
            "tensors": len(self.tensors),
            "bytes": needed,
            "fetched": fetched,
            "over_fetch": fetched / sum(run.needed for run in self.runs) if self.runs else 1.0,
            "requests": len(self.runs),
            "metadata_bytes": self.metadata_bytes,
            "metadata_requests": self.metadata_requests,
            "spread": self.spread(),
            "tp": dict(self.tp),
            "verification": self.unverified_because or "leaves",
            "notes": list(self.notes),
        }


class Opened(ABC):
    """An opened source of weights: its members stay open until `close`."""

    members: Sequence[Member]

    @abstractmethod
    def plan(self) -> LoadPlan: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(request: LoadRequest, ctx: Context) -> Opened:
    """Open what the request names. Raises everything that is wrong with it before a weight byte moves."""
    if request.repo is not None:
        from kvctl.weights.from_repo import RepoModel

        return RepoModel(request, request.repo, ctx)
    from kvctl.weights.from_files import PlainModel

    return PlainModel(request, ctx)


def fingerprint_of(parts: object) -> str:
    """A short name for exactly this source and slice, for resuming: BLAKE3 of the canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=list)
    return blake3.blake3(text.encode()).hexdigest()[:32]
