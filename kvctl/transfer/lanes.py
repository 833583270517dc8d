"""Lanes: one member reached over one endpoint by one transport, with what it did so far.

A lane's window starts small and doubles with each success up to what the transport takes, so that an endpoint
slowed to a crawl holds few ranges when the others have run dry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.transfer.report import PathReport, TransportReport
from kvctl.transports.api import Store, Transport
from kvctl.transports.limit import LimitedTransport, TokenBucket
from kvctl.transports.registry import Choice, choose, open_store, open_transports
from kvctl.transports.retry import RetryStore
from kvctl.transports.traced import TracedTransport

FIRST_WINDOW: Final = 2


@dataclass(frozen=True, slots=True)
class Member:
    """A store as the executor and its report know it. `name` is shown to people and holds no secret."""

    name: str
    index: int
    config: StoreConfig
    store: Store


def open_member(name: str, index: int, config: StoreConfig, ctx: Context) -> Member:
    """The store of `config`, wrapped for retries."""
    return Member(name, index, config, RetryStore(open_store(config), ctx.retry, cancel=ctx.cancel))


@dataclass(slots=True)
class Lane:
    """Mutable state of one path, owned by the executor. Times in seconds."""

    member: int
    member_name: str
    endpoint: str
    transport: Transport
    window: int = FIRST_WINDOW
    bytes: int = 0
    requests: int = 0
    retries: int = 0
    failures: int = 0
    streak: int = 0  # failures since the last success
    not_before: float = 0.0
    down: str = ""
    active_s: float = 0.0  # with at least one operation in flight
    active_since: float = 0.0
    durations: list[float] = field(default_factory=list)

    @property
    def max_window(self) -> int:
        return self.transport.capabilities.max_in_flight

    def widen(self) -> None:
        self.window = min(self.max_window, self.window * 2)

    def report(self) -> PathReport:
        p50, p99 = percentile(self.durations, 0.5), percentile(self.durations, 0.99)
        return PathReport(
            self.member_name, self.endpoint, self.transport.name, self.bytes, self.requests, self.retries,
            self.failures, p50, p99, self.down,
        )  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; 0.0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True)
class LaneSet:
    """The lanes of a run and which transport was chosen for each scheme."""

    lanes: tuple[Lane, ...]
    choices: tuple[Choice, ...]

    def report(self) -> list[TransportReport]:
        return [TransportReport(choice.spec.name, choice.reason, list(choice.passed_over)) for choice in self.choices]

    def close(self) -> None:
        for lane in self.lanes:
            lane.transport.close()


def transports_of(*sets: LaneSet) -> list[TransportReport]:
    """What ran on either end of a copy and why, each choice once."""
    found: list[TransportReport] = []
    for entry in (entry for lanes in sets for entry in lanes.report()):
        if entry not in found:
            found.append(entry)
    return found


def open_lanes(
    members: Sequence[Member],
    *,
    memory_kind: str = "host",
    transport: str = "auto",
    options: Mapping[str, str] | None = None,
    max_rate: int | None = None,
    failed: Mapping[str, str] | None = None,
    trace: Callable[[str], None] | None = None,
) -> LaneSet:
    """A lane for each endpoint of each member, together no faster than `max_rate` bytes/s. `failed`: transports
    that failed in this run, passed over now. `trace` is told each request.

    Raises UsageError or EnvError when the asked transport cannot serve a member: nothing falls back silently.
    """
    lanes: list[Lane] = []
    choices: dict[str, Choice] = {}
    bucket = None if max_rate is None else TokenBucket(max_rate)
    try:
        for member in members:
            scheme = member.config.scheme
            if scheme not in choices:
                stores = [(other.config, other.store) for other in members if other.config.scheme == scheme]
                choices[scheme] = choose(scheme, memory_kind, transport, failed=failed, stores=stores)
            opened = open_transports(member.config, member.store, choices[scheme], options)
            names = member.config.endpoints or ("",)
            for endpoint, way in zip(names, opened, strict=True):
                told = way if trace is None else TracedTransport(way, trace)
                held = told if bucket is None else LimitedTransport(told, bucket=bucket)
                lanes.append(Lane(member.index, member.name, endpoint, held))
    except BaseException:
        for lane in lanes:
            lane.transport.close()
        raise
    return LaneSet(tuple(lanes), tuple(choices.values()))
