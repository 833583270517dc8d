"""From an address to a plan: open the source, check all of its headers, and say which runs a load takes.

`Opened` is a source with its members open; `LoadPlan` is what a load will do, and what `--dry-run` prints.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import blake3

from kvctl.core.addresses import Slot, parse_weights
from kvctl.core.context import Context
from kvctl.core.errors import ConfigError
from kvctl.transfer.lanes import Member
from kvctl.weights.layout import Layout, layout_files, layout_rank
from kvctl.weights.plan import over_fetch
from kvctl.weights.request import LoadRequest
from kvctl.weights.rules import Rules, parse_rules
from kvctl.weights.runs import LoadedTensor, OutputFile, Run
from kvctl.weights.safetensors import Header
from kvctl.weights.slicing import slice_model

PLAN_SCHEMA: Final = "kvctl.load-plan/1"


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
            "over_fetch": over_fetch(self.runs),
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

    def moved(self) -> bool:
        """Whether a new `plan` would look for bytes in other places than the last one did. Asks the source."""
        return False

    @property
    def retries(self) -> int:
        """Control calls (lists, headers) that were tried again so far."""
        return sum(getattr(member.store, "retries", 0) for member in self.members)

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(request: LoadRequest, ctx: Context) -> Opened:
    """Open what the request names; `slot:NAME` is the store that it is. Raises everything that is wrong with it before
    a weight byte moves.
    """
    if request.repo is not None:
        from kvctl.weights.from_repo import RepoModel

        return RepoModel(request, request.repo, ctx)
    from kvctl.weights.from_files import PlainModel

    if request.address.startswith("slot:") and "://" not in request.address:
        found = parse_weights(request.address)
        assert isinstance(found, Slot)
        request = replace(request, address=found.url)
    return PlainModel(request, ctx)


@dataclass(frozen=True, slots=True)
class Sliced:
    """Which ranks' slices a load holds (none: the whole model), and what to say about them."""

    ranks: tuple[int, ...] = ()
    tp: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def identity(self, request: LoadRequest) -> list[object]:
        """What of the request changes the result: part of the fingerprint."""
        rules = read_rules(request.rules).to_json() if request.rules and self.ranks else []
        return [list(self.ranks), request.tp_size, rules]


def lay_out(
    request: LoadRequest,
    files: Sequence[tuple[str, Header]],
    config: Callable[[], Mapping[str, object] | None],
    *,
    congruent: bool,
) -> tuple[Layout, Sliced]:
    """Where everything lands: the files as they are, or one file for each rank asked for (all, when none is named).

    `config` reads the model's config.json, when slicing needs it. Raises UsageError, ConfigError, IncompatibleError.
    """
    if request.tp_size == 1 and request.tp_rank is None:
        return layout_files(files, congruent=congruent), Sliced()
    ranks = range(request.tp_size) if request.tp_rank is None else (request.tp_rank,)
    rules = read_rules(request.rules)
    headers = [header for _, header in files]
    tensors = [tensor for header in headers for tensor in header.tensors]
    model_config = config()
    layouts: list[Layout] = []
    notes: dict[str, None] = {}
    tp = {"size": request.tp_size, "sharded_bytes": 0, "replicated_bytes": 0}
    if request.tp_rank is not None:
        tp["rank"] = request.tp_rank
    for output, rank in enumerate(ranks):
        slices = slice_model(tensors, rank, request.tp_size, rules, model_config)
        layouts.append(layout_rank(headers, slices, output=output))
        tp["sharded_bytes"] += slices.sharded_bytes
        tp["replicated_bytes"] += slices.replicated_bytes
        notes.update(dict.fromkeys(slices.notes))
        notes.update(dict.fromkeys(f"{name}: no rule knows it, replicated" for name in slices.unknown))
    merged = Layout(
        tuple(output for layout in layouts for output in layout.outputs),
        tuple(tensor for layout in layouts for tensor in layout.tensors),
        tuple(want for layout in layouts for want in layout.wants),
    )
    return merged, Sliced(tuple(ranks), tp, tuple(notes))


def read_rules(path: str | None) -> Rules:
    """The rules file of `--rules`, or the built-in rules. Raises ConfigError."""
    if path is None:
        return Rules()
    try:
        with open(path, "rb") as file:
            return parse_rules(file.read(), path)
    except OSError as error:
        raise ConfigError(f"cannot read the rules file {path}", cause=error.strerror) from error


def keeps_files(request: LoadRequest) -> bool:
    """Whether the target holds files (a folder, a slot), which small files of the model belong into."""
    return request.into.partition(":")[0] in {"dir", "shm", "slot"}


def fingerprint_of(parts: object) -> str:
    """A short name for exactly this source and slice, for resuming: BLAKE3 of the canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=list)
    return blake3.blake3(text.encode()).hexdigest()[:32]
