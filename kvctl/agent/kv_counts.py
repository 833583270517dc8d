"""How much each KV tier serves, as the agent and the engines count it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class TierUse:
    """`requests`: lookups that asked this tier, `hits`: those that it answered best; `tokens` and `bytes` that were
    loaded from it, verified.
    """

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        rate = round(self.hits / self.requests, 4) if self.requests else None
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "hit_rate": rate}


@dataclass(slots=True)
class TierCounts(TierUse):
    """Since the agent started. `promoted`: prefixes copied up into it, with their bytes; `written`: sessions that
    engines pushed into it; `copied`: those that the agent wrote down into it; `refused`: for want of room.
    """

    promoted: int = 0
    promoted_bytes: int = 0
    written: int = 0
    copied: int = 0
    evicted: int = 0
    refused: int = 0
