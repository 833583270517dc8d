"""A load out of the tiers: from the one that was chosen, and what that has lost meanwhile (evicted, damaged, its agent
gone) from those behind it. What none has is left to be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvctl.core.context import Context
from kvctl.kv.prefix import Prefix, Want, find_prefix, pull_prefix
from kvctl.kv.seams import KvSink
from kvctl.repo.repo import Repo
from kvctl.transfer.report import Report
from kvctl_vllm.tiers import Tier, Tiers

STAGING: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """Tokens [start, end) of `want`, found as `found` in `tier`. `whole`: all of them or none (windows would begin
    elsewhere). `early`: each layer is handed over as it comes; once one was, no other tier can take over.
    """

    want: Want
    found: Prefix
    tier: str
    start: int
    end: int
    whole: bool = False
    early: bool = False


@dataclass(slots=True)
class Filled:
    """`usable` tokens, counted from 0, are there and verified. `parts`: (tier, tokens, report), in order."""

    usable: int
    parts: list[tuple[str, int, Report]] = field(default_factory=list)


def fill(
    tiers: Tiers,
    wanted: Wanted,
    sink: Callable[[], KvSink],
    ctx: Context,
    *,
    handed: Callable[[], bool] = lambda: True,
    rank: tuple[int, int] = (0, 1),
    batch: int = STAGING,
) -> Filled:
    """`sink` makes one for each tier that is tried. `handed`: whether a layer was handed over by now. Raises nothing
    but failures of the sink.
    """
    done = Filled(wanted.start)
    want = replace(wanted.want, tokens=wanted.want.tokens[: wanted.end])
    for tier in tiers.since(wanted.tier):
        found: Prefix | None = wanted.found
        if tier.name != wanted.tier or done.parts:
            found = tier.depot.use("looking for the rest of a prefix", _finder(want, ctx, done.usable))
        if found is None or found.tokens <= done.usable or (wanted.whole and found.tokens < wanted.end):
            continue
        own = wanted if found is wanted.found else replace(wanted, want=want)
        got = _pull(tier, own, found, done.usable, sink(), ctx, rank, batch)
        if got is not None:
            report, tokens = got
            usable = min(max(tokens, done.usable), wanted.end)
            if wanted.whole and usable < wanted.end:
                usable = done.usable
            done.parts.append((tier.name, usable - done.usable, report))
            brought = want if rank[0] == 0 and usable > done.usable else None
            counted = usable - done.usable if rank[0] == 0 else 0
            tiers.loaded(tier.name, found, counted, report.fetched, brought)
            done.usable = usable
        if done.usable >= wanted.end or (wanted.early and handed()):
            break
    return done


def _finder(want: Want, ctx: Context, above: int) -> Callable[[Repo], Prefix]:
    return lambda repo: find_prefix(repo, want, ctx, above=above)


def _pull(
    tier: Tier,
    wanted: Wanted,
    found: Prefix,
    start: int,
    sink: KvSink,
    ctx: Context,
    rank: tuple[int, int],
    batch: int,
) -> tuple[Report, int] | None:
    def pull(repo: Repo) -> tuple[Report, int]:
        return pull_prefix(repo, wanted.want, found, sink, ctx, start=start, rank=rank, early=wanted.early, batch=batch)

    return tier.depot.use(f"loading {wanted.end - start} tokens of KV", pull)
