"""The KV tiers of this host's agent, ahead of the shared repo, as an engine uses them: each is a repo like any other,
so a lookup asks one after the other, fastest first, and the longest prefix wins, the fastest tier on a tie.

The agent says where its tiers are, makes room for pushes, and counts. One that is gone, or started again, costs nothing
but its tiers: the shared repo serves, the log says so once, and once when the agent is back. A push is acknowledged
when the shared repo has it; what only a tier has, the agent brings there later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvctl.agent.client import AgentClient
from kvctl.agent.kv_requests import want_document
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, KvctlError, MemberDownError, StalledError
from kvctl.kv.prefix import Prefix, Want, find_prefix
from kvctl.kv.push import PushSession, push_session
from kvctl.repo.repo import Repo
from kvctl.transfer.report import Report
from kvctl_vllm.depot import PATIENCE, Depot

log = logging.getLogger("vllm.kvctl")
SHARED: Final = "shared"
ANSWER: Final = 5.0  # seconds for the agent's short answers
ROOM: Final = 60.0  # for making room, which evicts
TOLD: Final = 10_000  # lookups that are remembered until they are reported
_GONE: Final = set[str | None]()  # agents that do not answer: a process with both sides of a connector says it once
_GONE_LOCK: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Tier:
    """`depot`: its repo."""

    name: str
    depot: Depot


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix, and the tier that has it; `prefix` None where no tier answered."""

    prefix: Prefix | None = None
    tier: str = SHARED


@dataclass(frozen=True, slots=True)
class Looked:
    """A lookup: the tiers that were asked, and the one that is loaded from, if any."""

    asked: tuple[str, ...]
    hit: str | None


@dataclass(frozen=True, slots=True)
class Pushed:
    """`report` of the push into the shared repo, None when that did not answer; `held`: the generation in the agent's
    first tier, None when it is not there.
    """

    report: Report | None
    held: str | None


class Tiers:
    """`socket`: of the agent, None without one. `rest`: seconds between tries of an agent that is gone. Thread-safe."""

    def __init__(self, shared: Depot, socket: str | None, rest: float) -> None:
        self.shared = Tier(SHARED, shared)
        self._socket = socket
        self._rest = rest
        self._lock = threading.Lock()
        self._own: tuple[Tier, ...] = ()
        self._lines: dict[float, AgentClient] = {}
        self._until = 0.0
        self._gone = False
        self._refused = ""
        self.looked: deque[Looked] = deque(maxlen=TOLD)

    # -- where -----------------------------------------------------------------------------------------------

    def all(self) -> list[Tier]:
        """The tiers that are there now, fastest first, the shared repo last."""
        said = self._call("kv_places")
        with self._lock:
            known = {tier.depot.stores[0].url: tier for tier in self._own}
            rows = [] if said is None else said["tiers"]
            self._own = tuple(known.get(url) or self._tier(name, url) for name, url in rows)
            own = self._own
        if said is not None and own and not self._same_repo(str(said["shared"])):
            with self._lock:
                self._own = own = ()
        return [*own, self.shared]

    def _tier(self, name: str, url: str) -> Tier:
        return Tier(name, Depot((StoreConfig(url),), self._rest, f"the agent's KV in {name}"))

    def _same_repo(self, theirs: str) -> bool:
        """Whether the agent's tiers are ahead of our repo; as long as nobody knows better, they are."""
        ours = self.shared.depot.use("asking the repo who it is", lambda repo: repo.id) if theirs else None
        if ours is None or ours == theirs:
            return True
        if self._refused != theirs:
            self._refused = theirs
            log.warning("kvctl: the agent's KV tiers are not used: they are ahead of repo %s, not %s", theirs, ours)
        return False

    @property
    def resting(self) -> bool:
        """Whether nothing can be asked: the shared repo is left alone, and there is no tier ahead of it."""
        return self.shared.depot.resting and not self._own

    # -- looking -----------------------------------------------------------------------------------------------

    def find(self, want: Want, ctx: Context, *, session: str | None, above: int, least: int) -> Found:
        """The longest prefix that any tier has. It counts as a hit when it has `least` tokens more than `above`."""
        best = Found()
        asked: list[str] = []
        doing = f"looking up a prefix of {len(want.tokens)} tokens"
        for tier in self.all():
            if tier.depot.resting:
                continue
            asked.append(tier.name)
            found = tier.depot.use(doing, lambda repo: find_prefix(repo, want, ctx, session=session, above=above))
            if found is not None and (best.prefix is None or found.tokens > best.prefix.tokens):
                best = Found(found, tier.name)
            if best.prefix is not None and len(want.tokens) - best.prefix.tokens < want.descriptor.block_tokens:
                break  # none can have a block more
        hit = best.tier if best.prefix is not None and best.prefix.tokens - above >= least else None
        self.looked.append(Looked(tuple(asked), hit))
        self._call("kv_looked", asked=asked if self._socket else [], hit=hit)
        return best

    def since(self, name: str) -> list[Tier]:
        """The tier called `name`, and those behind it; from the first on when it is not there any more."""
        tiers = self.all()
        names = [tier.name for tier in tiers]
        return tiers[names.index(name) :] if name in names else tiers

    def loaded(self, tier: str, found: Prefix, tokens: int, nbytes: int, want: Want | None) -> None:
        """Tell the agent what was loaded from where; with `want`, what to bring up."""
        self._call(
            "kv_loaded", tier=tier, tokens=tokens, bytes=nbytes, chunks=[use.chunk.name for use in found.uses],
            want=None if want is None or tier == self._first else want_document(want),
        )  # fmt: skip

    @property
    def _first(self) -> str:
        own = self._own
        return own[0].name if own else SHARED

    # -- pushing -----------------------------------------------------------------------------------------------

    def push(self, request: PushSession, nbytes: int) -> Pushed:
        """Into the agent's first tier, then into the shared repo. `nbytes` of KV."""
        doing = f"storing {request.address}"
        first = self.all()[0]
        room = None
        if first is not self.shared:
            tokens = len(request.source.tokens)
            room = self._call("kv_room", ROOM, tier=first.name, bytes=nbytes, tokens=tokens)
        held = None
        granted = room is not None and bool(room["granted"])
        if granted:
            held = self._push(first, doing, request)
        report = self._push(self.shared, doing, request)
        mine = None if held is None else f"{request.address}@{held.extra['generation']}"
        if granted:
            self._call("kv_stored", ROOM, tier=first.name, session=mine, shared=report is not None)
        return Pushed(report, mine)

    @staticmethod
    def _push(tier: Tier, doing: str, request: PushSession) -> Report | None:
        own = replace(request, repo=tuple(tier.depot.stores))

        def put(_: Repo) -> Report:
            return push_session(own, Context(retry=PATIENCE))

        return tier.depot.use(doing, put)

    # -- the agent ---------------------------------------------------------------------------------------------

    def _call(self, operation: str, seconds: float = ANSWER, **fields: Any) -> dict[str, Any] | None:  # Any: JSON
        """The agent's answer; None when there is no agent, or it refused. Calls that may take long have a connection of
        their own, so that short ones do not wait behind them.
        """
        if self._socket is None or time.monotonic() < self._until:
            return None
        try:
            found = self._asked(self._socket, operation, seconds, fields)
        except (EnvError, MemberDownError, StalledError) as error:
            self._lost(error)
            return None
        except KvctlError as error:
            log.info("kvctl: the agent refuses %s: %s", operation, error)
            if operation == "kv_places":
                self._lost(error)
            return None
        self._back()
        return found

    def _asked(
        self, socket: str, operation: str, seconds: float, fields: dict[str, Any]
    ) -> dict[str, Any]:  # Any: JSON
        with self._lock:
            line = self._lines.get(seconds)
        if line is not None:
            try:
                return line.call(operation, **fields)
            except MemberDownError:
                self._hang_up()  # one that was started again answers on a new line
        made = AgentClient(socket, label="vllm", seconds=seconds)
        with self._lock:
            line = self._lines.setdefault(seconds, made)  # room belongs to a connection: all ask over the same one
        if line is not made:
            made.close()
        return line.call(operation, **fields)

    def _hang_up(self) -> None:
        with self._lock:
            for line in self._lines.values():
                line.close()
            self._lines = {}

    def _lost(self, error: KvctlError) -> None:
        self._hang_up()
        with self._lock:
            self._gone = True
            self._until = time.monotonic() + self._rest
            self._own = ()
        with _GONE_LOCK:
            first = self._socket not in _GONE
            _GONE.add(self._socket)
        if first:
            log.warning("kvctl: the agent's KV tiers are gone (%s); the repo serves until they are back", error)

    def _back(self) -> None:
        with self._lock:
            back, self._gone = self._gone, False
        if back:
            with _GONE_LOCK:
                back = self._socket in _GONE
                _GONE.discard(self._socket)
            if back:
                log.warning("kvctl: the agent's KV tiers are back")

    def taken(self) -> Sequence[Looked]:
        """The lookups since the last call."""
        found: list[Looked] = []
        while self.looked:
            found.append(self.looked.popleft())
        return found

    def close(self) -> None:
        """Hang up, and give up the repos that this thread has open."""
        self._hang_up()
        for tier in (*self._own, self.shared):
            tier.depot.close()
