"""One tier of the agent's KV cache: an ordinary repo in a folder of the agent's own, held under a budget of bytes. Room
is made before anything is written, by the usual eviction, of what the shared repo is known to have; then gc without a
grace period, as nobody else collects there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from kvctl.agent.kv_counts import TierCounts
from kvctl.agent.kv_folders import PAGE, Folder
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import NotFoundError
from kvctl.kv.access import adopt_key
from kvctl.kv.catalog import Catalog
from kvctl.kv.evict import Eviction, EvictRequest, evict_sessions
from kvctl.kv.promoting import PROMOTED
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.repo import Repo

ROUNDS: Final = 4
_FIXED: Final = 32 * PAGE  # a push's leases, manifest, namespace and state, while it runs
_NODE_TOKENS: Final = 512  # the index has a node for twice as many
_CHUNKS: Final = 4 << 20  # packs are larger; each may waste a page, and has a header


def room_for(nbytes: int, tokens: int) -> int:
    """What a session takes in a folder at most: its packs' bytes, index nodes, and what a push needs."""
    nodes = tokens // _NODE_TOKENS + 16
    return nbytes + (nbytes // _CHUNKS + 8) * 2 * PAGE + nbytes // 64 + nodes * PAGE + _FIXED


@dataclass(slots=True)
class Tier:
    """`safe`: generations (TENANT/NAME@GENERATION) that the shared repo is known to have. Thread-safe."""

    name: str
    folder: Folder
    budget: int
    counts: TierCounts = field(default_factory=TierCounts)
    safe: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _reserved: dict[int, int] = field(default_factory=dict)
    _used: dict[str, datetime] = field(default_factory=dict)

    @property
    def stores(self) -> tuple[StoreConfig, ...]:
        return (StoreConfig(self.folder.url),)

    def begin(self, key: bytes | None, ctx: Context) -> None:
        """Make the repo, or take over the one that is there; it has the key before any client opens it. Raises what
        opening it raises, ConfigError or IncompatibleError when its sessions are keyed otherwise.
        """
        try:
            repo = Repo.open(self.stores, ctx)
        except NotFoundError:
            repo = Repo.init(self.stores, ctx=ctx)
        with repo:
            adopt_key(repo, key, "")

    # -- room ------------------------------------------------------------------------------------------------

    @property
    def reserved_bytes(self) -> int:
        return sum(self._reserved.values())

    def reserve(self, holder: int, nbytes: int, ctx: Context) -> bool:
        """Room for a push of `nbytes` by this holder, evicting where that helps; False: it is not to be had. One push
        of a holder at a time.
        """
        with self.lock:
            self._reserved.pop(holder, None)
            if not self._fit(nbytes, ctx):
                self.counts.refused += 1
                return False
            self._reserved[holder] = nbytes
            return True

    def release(self, holder: int, ctx: Context) -> None:
        """The holder's push has ended, or the holder has: what it wrote counts as it lies there."""
        with self.lock:
            if self._reserved.pop(holder, None) is not None:
                self._fit(0, ctx)

    def settle(self, ctx: Context) -> None:
        """Hold the budget now: what could not go before may go by now."""
        with self.lock:
            self._fit(0, ctx)

    def _fit(self, wanted: int, ctx: Context) -> bool:
        if wanted > self.budget:
            return False
        if self._over(wanted) <= 0:
            return True
        self._collect(ctx)
        for _ in range(ROUNDS):
            over = self._over(wanted)
            if over <= 0:
                return True
            if not self._evict(over, ctx):
                return False
            self._collect(ctx)
        return self._over(wanted) <= 0

    def _over(self, wanted: int) -> int:
        return self.folder.used_bytes() + self.reserved_bytes + wanted - self.budget

    def _evict(self, over: int, ctx: Context) -> bool:
        """Evict what frees so many bytes; nothing, and False, when nothing may go or all that may would not do."""
        with Repo.open(self.stores, ctx) as repo:
            catalog = Catalog.load(repo)
        chunks = {name: size for entry in catalog.entries for name, size in entry.chunks.items()}
        total = sum(chunks.values())
        self._used = {name: at for name, at in self._used.items() if name in chunks}
        spare = {str(entry.found) for entry in catalog.entries if not self._may_go(str(entry.found), entry.labels)}
        all_of_it = self._plan(0, spare, ctx, dry_run=True)
        metadata = max(0, self.folder.used_bytes() - total)
        if not all_of_it.evict or all_of_it.freed_bytes + metadata < over:
            return False
        done = self._plan(max(0, total - over), spare, ctx)
        self.counts.evicted += len(done.evict)
        self.safe -= {str(entry.found) for entry in done.evict}
        return bool(done.evict)

    def _may_go(self, session: str, labels: Collection[str]) -> bool:
        return session in self.safe or PROMOTED in labels

    def _plan(self, keep: int, spare: Collection[str], ctx: Context, *, dry_run: bool = False) -> Eviction:
        request = EvictRequest(self.stores, max_bytes=keep, spare=spare, used=self._used, dry_run=dry_run)
        return evict_sessions(request, ctx)

    def _collect(self, ctx: Context) -> None:
        with Repo.open(self.stores, ctx) as repo:
            run_gc(repo, GcOptions(grace=0))

    # -- use -------------------------------------------------------------------------------------------------

    def touch(self, chunks: Collection[str]) -> None:
        """These chunks were used now."""
        with self.lock:
            self._used.update(dict.fromkeys(chunks, datetime.now(UTC)))

    def describe(self) -> dict[str, Any]:  # Any: JSON
        with self.lock:
            return {
                "name": self.name,
                "place": self.folder.url,
                "budget_bytes": self.budget,
                "used_bytes": self.folder.used_bytes(),
                "reserved_bytes": self.reserved_bytes,
                **self.counts.to_json(),
            }
