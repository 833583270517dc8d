"""A slot's generation as the next version of a repo's model, at a pace: a push whose reads, hashes and writes wait for
their turn. What the repo has already is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvctl.checkpoint.gentle import gently
from kvctl.checkpoint.latency import Latencies
from kvctl.checkpoint.pace import Limits
from kvctl.checkpoint.pacing import BASELINE_SECONDS, Pacer
from kvctl.checkpoint.shares import PUSHED
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.transfer.report import Report
from kvctl.weights.push import PushRequest, push_weights


@dataclass(frozen=True, slots=True)
class IntoRepo:
    """`slot`: its name. `name`, `version`: of the model in the repo whose members `stores` are (None: the next one)."""

    slot: str
    name: str
    stores: Sequence[StoreConfig]
    version: str | None = None
    limits: Limits = field(default_factory=Limits)
    baseline_seconds: float = BASELINE_SECONDS


def create_in_repo(request: IntoRepo, ctx: Context, *, latencies: Latencies | None = None) -> Report:
    """Raises what a push does. Running it again goes on: what is stored already is not written again."""
    if request.limits.paced:
        return gently(lambda: _create(request, ctx, latencies))
    return _create(request, ctx, latencies)


def _create(request: IntoRepo, ctx: Context, latencies: Latencies | None) -> Report:
    pacer = Pacer(request.limits, ctx, latencies, shares=PUSHED, baseline_seconds=request.baseline_seconds)
    pushing = PushRequest(
        f"slot://{request.slot}", request.name, tuple(request.stores), version=request.version, pace=pacer
    )
    report = push_weights(pushing, ctx)
    report.command = "checkpoint create"
    report.extra["pacing"] = pacer.report()
    return report
