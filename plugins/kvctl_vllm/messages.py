"""What the connector's two sides tell each other, in the metadata of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvctl.kv.prefix import Prefix, Want
from kvctl_vllm.tiers import Looked


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [start, end) of a request, found in `tier`, into its blocks (`blocks`: per cache group of the engine, in
    order). `waits`: the request runs in this very step, and waits at each layer.
    """

    request: str
    want: Want
    found: Prefix
    tier: str
    start: int
    end: int
    blocks: tuple[tuple[int, ...], ...]
    waits: bool


@dataclass(frozen=True, slots=True)
class Store:
    """The first tokens of a request, out of its blocks, as a session. `session` None: named after its tokens.
    `generation` of the weights that made it.
    """

    request: str
    want: Want
    blocks: tuple[tuple[int, ...], ...]
    session: str | None
    with_tokens: bool
    generation: int


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """`looked`: lookups since the last orders, to be counted."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    looked: list[Looked] = field(default_factory=list)


@dataclass
class News(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The weights that the worker holds. `digest` None: not known, because `problem` (empty: not yet)."""

    generation: int
    digest: str | None
    problem: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Ranks hold the same weights; one that knows the digest speaks for all."""
        assert isinstance(other, News)
        if other.generation != self.generation:
            return self if self.generation < other.generation else other  # a swap is under way: the old ones, for now
        return self if self.digest is not None else other
