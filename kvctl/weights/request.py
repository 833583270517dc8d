"""What a caller asks of a load. A value only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvctl.core.addresses import StoreConfig


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to load, which part of it, over which path, and where to. `repo` names the stores of the repo that
    `address` (a model's name) belongs to; None: `address` is a plain source. Rates in bytes per second.
    """

    address: str
    repo: tuple[StoreConfig, ...] | None = None
    version: str | None = None
    tp_rank: int | None = None
    tp_size: int = 1
    rules: str | None = None
    into: str = "none"
    device: str = "cpu"
    transport: str = "auto"
    transport_options: Mapping[str, str] = field(default_factory=dict)
    verify: str = "leaves"
    max_in_flight_bytes: int | None = None
    max_rate: int | None = None
    hedge: bool = True
    fallback: bool = False
    digests: str | None = None
