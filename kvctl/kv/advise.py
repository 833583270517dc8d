"""Is restoring a session's KV worth it, or is computing it again faster? Break-even length, expected times, and
whether to store at all, with the reason. Pure: sizes, speeds and measured points in, advice out.

    restore(n)   = latency + bytes(n) / bandwidth           bytes(n): what a pull of n tokens fetches, group by group
    recompute(n) = linear * n + quadratic * n**2            the projections are linear, attention is quadratic

A sliding-window group fetches its window at most, a recurrent one its state whatever the length. So restore is concave
in n and recompute convex, and their difference changes its sign at most once: a search by halves finds the break-even.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvctl.core.errors import UsageError
from kvctl.core.units import format_seconds, format_size
from kvctl.kv.geometry import state_bytes, token_bytes_of
from kvctl.kv.identity import Group

SCHEMA: Final = "kvctl.kv-advice/1"
LONGEST: Final = 1 << 24  # tokens; no context is longer, so a break-even beyond it is none
MARGIN: Final = 1.1  # a restore has to win by this factor to be called worth storing: both times vary by as much


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What one layer group costs to keep: `bytes_per_token` over its layers while the window is not full (`window`
    None: never), and `fixed_bytes` whatever the length.
    """

    name: str
    layers: int
    bytes_per_token: int
    window: int | None = None
    fixed_bytes: int = 0

    def bytes(self, tokens: int) -> int:
        """What a pull of `tokens` tokens fetches of it."""
        counted = tokens if self.window is None else min(tokens, self.window)
        return self.bytes_per_token * counted + (self.fixed_bytes if tokens else 0)


def group_costs(groups: Iterable[Group], dtype: str) -> tuple[GroupCost, ...]:
    """The costs of a model's layer groups with KV of `dtype`. Raises IncompatibleError for an unknown dtype."""
    return tuple(
        GroupCost(group.kind, len(group.layers), token_bytes_of(group, dtype), group.window, state_bytes([group]))
        for group in groups
    )


@dataclass(frozen=True, slots=True)
class Restore:
    """`bandwidth` in bytes per second, end to end; `latency` in seconds, before the first byte, whatever the size."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency < 0:
            raise UsageError(
                "a restore needs a bandwidth above 0 and a latency of at least 0",
                cause=f"{self.bandwidth:g} bytes/s, {self.latency:g} s",
            )

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Restore:  # Any: JSON, kvctl.report/1
        """The speed that a saved report shows: its set-up is the latency, the rest of it moved the bytes.
        Raises UsageError for a report of a run that moved nothing.
        """
        moved = report.get("bytes") or 0
        seconds = (report.get("seconds") or 0.0) - (report.get("setup_s") or 0.0)
        if moved <= 0 or seconds <= 0:
            raise UsageError(
                f"report {report.get('id', '?')} shows no transfer to take a bandwidth from",
                cause=f"{moved} bytes in {seconds:g} s",
                hint="name the report of a kv pull or a load-weights run, or give --bandwidth",
            )
        return cls(moved / seconds, report.get("setup_s") or 0.0)

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Prefill:
    """Seconds to compute n tokens: `linear * n + quadratic * n**2`."""

    linear: float
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if self.linear < 0 or self.quadratic < 0 or self.linear + self.quadratic <= 0:
            raise UsageError(
                "computing a token takes some time",
                cause=f"{self.linear:g} s per token and {self.quadratic:g} s per token squared were given",
                hint="give a prefill rate above 0",
            )

    @classmethod
    def at_rate(cls, tokens_per_second: float, quadratic: float = 0.0) -> Prefill:
        """Raises UsageError for a rate that is not above 0."""
        if tokens_per_second <= 0:
            raise UsageError(f"{tokens_per_second:g} tokens per second is no prefill rate")
        return cls(1 / tokens_per_second, quadratic)

    @classmethod
    def fitted(cls, points: Sequence[tuple[int, float]]) -> Prefill:
        """Through measured (tokens, seconds): one point gives a rate, several a least-squares fit of both terms,
        weighted by relative error, so that a short prompt counts as much as a long one. Raises UsageError.
        """
        if not points or any(tokens <= 0 or seconds <= 0 for tokens, seconds in points):
            raise UsageError("prefill points are tokens and seconds, all above 0", cause=repr(list(points)))
        # minimise sum((a*n/s + b*n*n/s - 1)**2)
        rows = [(tokens / seconds, tokens * tokens / seconds) for tokens, seconds in points]
        xx, xy, yy = (sum(left * right for left, right in pairs) for pairs in _products(rows))
        x, y = sum(row[0] for row in rows), sum(row[1] for row in rows)
        determinant = xx * yy - xy * xy
        if len({tokens for tokens, _ in points}) > 1 and determinant > 1e-12 * xx * yy:
            linear, quadratic = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
            if linear >= 0 and quadratic >= 0:
                return cls(linear, quadratic)
            if linear < 0:
                return cls(0.0, y / yy)
        return cls(x / xx)

    def seconds(self, tokens: int) -> float:
        return self.linear * tokens + self.quadratic * tokens * tokens


def _products(rows: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return (
        [(first, first) for first, _ in rows],
        [(first, second) for first, second in rows],
        [(second, second) for _, second in rows],
    )


@dataclass(frozen=True, slots=True)
class Advice:
    """Times in seconds, sizes in bytes, lengths in tokens. `break_even` None: restoring never wins, at any length up
    to `longest`. `needed_bandwidth`: what would make `tokens` break even; None: no bandwidth would.
    """

    tokens: int
    bytes: int
    restore_s: float
    recompute_s: float
    break_even: int | None
    longest: int
    store: bool
    reason: str
    needed_bandwidth: float | None
    bandwidth: float
    latency_s: float
    prefill_linear_s: float
    prefill_quadratic_s: float
    bytes_per_token: int
    groups: tuple[GroupCost, ...]

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        faster = self.recompute_s / self.restore_s if self.restore_s else None
        return {"schema": SCHEMA, **dataclasses.asdict(self), "speedup": faster}


def session_bytes(groups: Sequence[GroupCost], tokens: int) -> int:
    """What a pull of `tokens` tokens fetches."""
    return sum(group.bytes(tokens) for group in groups)


def break_even(
    groups: Sequence[GroupCost], restore: Restore, prefill: Prefill, *, longest: int = LONGEST
) -> int | None:
    """The shortest length that is restored at least as fast as it is computed; None when there is none."""

    def wins(tokens: int) -> bool:
        return restore.seconds(session_bytes(groups, tokens)) <= prefill.seconds(tokens)

    if not wins(longest):
        return None
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def advise(
    groups: Sequence[GroupCost], restore: Restore, prefill: Prefill, tokens: int, *, longest: int = LONGEST
) -> Advice:
    """The advice for sessions of `tokens` tokens; `longest`: the model's context. Raises UsageError."""
    if tokens <= 0:
        raise UsageError(f"{tokens} tokens are no session")
    size = session_bytes(groups, tokens)
    restored, computed = restore.seconds(size), prefill.seconds(tokens)
    point = break_even(groups, restore, prefill, longest=max(longest, tokens))
    spare = computed - restore.latency
    store = restored * MARGIN <= computed
    return Advice(
        tokens=tokens,
        bytes=size,
        restore_s=restored,
        recompute_s=computed,
        break_even=point,
        longest=max(longest, tokens),
        store=store,
        reason=_reason(tokens, size, restored, computed, restore, point, store=store),
        needed_bandwidth=size / spare if spare > 0 else None,
        bandwidth=restore.bandwidth,
        latency_s=restore.latency,
        prefill_linear_s=prefill.linear,
        prefill_quadratic_s=prefill.quadratic,
        bytes_per_token=session_bytes(groups, tokens) - session_bytes(groups, tokens - 1),
        groups=tuple(groups),
    )


def _reason(
    tokens: int, size: int, restored: float, computed: float, restore: Restore, point: int | None, *, store: bool
) -> str:
    times = f"{format_size(size)} restore in {format_seconds(restored)}, {tokens:,} tokens compute in " + (
        format_seconds(computed)
    )
    if store:
        return f"{times}: {computed / restored:.3g} times faster; worth it from {point:,} tokens on"
    if restored <= computed:
        return f"{times}: a gain below {MARGIN - 1:.0%} is within what both vary by"
    if restore.latency >= computed:
        return f"{times}: the fixed latency of {format_seconds(restore.latency)} alone takes longer than computing"
    if point is None:
        return f"{times}: no length is restored faster than it is computed"
    return f"{times}: computing is faster below {point:,} tokens"
