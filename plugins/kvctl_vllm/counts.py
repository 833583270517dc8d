"""What a worker has loaded and stored since the engine started, in all and by tier: the engine's `info`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvctl.agent.kv_counts import TierUse
from kvctl_vllm.tiers import Looked


@dataclass(slots=True)
class Counts:
    """`fetched` and `needed` in bytes; tokens that were wanted and came, and that did not. `stores`: acknowledged by
    the shared repo; `held`: in the agent's tier only, which brings it there later; `dropped`: nowhere. `tiers` by name.
    """

    loads: int = 0
    tokens: int = 0
    lost: int = 0
    needed: int = 0
    fetched: int = 0
    stores: int = 0
    held: int = 0
    stored_tokens: int = 0
    written: int = 0
    dropped: int = 0
    tiers: dict[str, TierUse] = field(default_factory=dict)

    def tier(self, name: str) -> TierUse:
        return self.tiers.setdefault(name, TierUse())

    def looked(self, lookups: Iterable[Looked]) -> None:
        for lookup in lookups:
            for name in lookup.asked:
                self.tier(name).requests += 1
            if lookup.hit is not None:
                self.tier(lookup.hit).hits += 1

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        numbers = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "tiers"}
        return {**numbers, "tiers": {name: use.to_json() for name, use in list(self.tiers.items())}}
