"""The agent's KV cache ahead of the shared repo: tiers, fastest first, and one thread that moves sessions between them.

    engines push      into the first tier, then into the shared repo themselves: that acknowledges a push
    written down      what was pushed into the first tier goes to the one behind it, and to the shared repo when the
                      engine could not reach that; until the shared repo has it, no tier evicts it
    promoted          a prefix that was hit in a lower tier is copied to each tier above
    evicted           before anything is written, under each tier's budget (`kv_tier`)

What fails is tried again after a pause that doubles; reads and pushes of engines never wait for it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvctl.agent.kv_counts import TierCounts
from kvctl.agent.kv_folders import PAGE, local_folder, memory_folder, memory_roots
from kvctl.agent.kv_tier import Tier, room_for
from kvctl.agent.settings import KvSettings
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import KvctlError, NotFoundError
from kvctl.kv import sessions
from kvctl.kv.access import check_key
from kvctl.kv.copying import CopySession, copy_session
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.names import SessionName, parse_session
from kvctl.kv.prefix import Want
from kvctl.kv.promoting import PROMOTED, copy_prefix
from kvctl.repo.repo import Repo

SCHEMA: Final = "kvctl.kv-tiers/1"
MEMORY, LOCAL, SHARED = "memory", "local", "shared"
PAUSE: Final = 1.0  # seconds before what failed is tried again; doubles
LONGEST: Final = 60.0
LAST: Final = 10.0  # seconds for writing down, when the agent ends
WAITING: Final = 1_000  # promotions that wait at most: a cache may forget what it wanted
_OURS: Final = 0  # holder of the agent's own room; clients' are 1 and up
_PATIENCE: Final = RetryPolicy(base=0.05, cap=1.0, attempts=3, stall_timeout=30.0)


@dataclass(frozen=True, slots=True)
class WriteDown:
    """A session that was pushed into a tier (or lies there since an earlier agent) and may have to go further down."""

    tier: str
    session: str


@dataclass(frozen=True, slots=True)
class Promote:
    """What was hit in a tier below others."""

    tier: str
    want: Want

    @property
    def same(self) -> tuple[str, str, bytes]:
        return self.tier, self.want.descriptor.digest, self.want.tokens.tobytes()


class KvCache:
    """`note`: where problems are told. `start` makes the tiers, `close` ends them. Thread-safe."""

    def __init__(self, settings: KvSettings, note: Callable[[str], None]) -> None:
        self._settings = settings
        self._note = note
        self._ctx = Context(retry=_PATIENCE)
        self._tiers: list[Tier] = []
        self._shared = TierCounts()
        self._shared_id = ""
        self._down: deque[WriteDown] = deque()
        self._up: deque[Promote] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._busy = False
        self._failures = 0
        self._problem = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises EnvError, AuthError, CapacityError for places that cannot be used, and what opening repos raises."""
        asked = self._settings
        try:
            if asked.memory:
                folder, removed = memory_folder(asked.memory, memory_roots())
                self._tiers.append(Tier(MEMORY, folder, asked.memory))
                if removed:
                    self._note(f"KV in memory of {removed} agents that died was removed")
            if asked.local is not None:
                self._tiers.append(Tier(LOCAL, local_folder(asked.local), asked.local_bytes))
            for tier in self._tiers:
                tier.begin(asked.key, self._ctx)
            self._take_over()
        except BaseException:
            self._close_tiers()
            raise
        self._thread = threading.Thread(target=self._run, name="kvctl-kv-tiers", daemon=True)
        self._thread.start()

    def _take_over(self) -> None:
        """What an earlier agent left on disk may not be in the shared repo yet."""
        for tier in self._tiers:
            with Repo.open(tier.stores, self._ctx) as repo:
                self._down.extend(WriteDown(tier.name, str(item)) for item in sessions.list_generations(repo))

    # -- clients -----------------------------------------------------------------------------------------------

    def places(self) -> dict[str, Any]:  # Any: JSON
        """What a client needs to read and push: tiers by name with their URLs, fastest first, and the id of the shared
        repo as far as it is known.
        """
        return {"tiers": [[tier.name, tier.folder.url] for tier in self._tiers], "shared": self._shared_id}

    def reserve(self, name: str, holder: int, nbytes: int, tokens: int) -> bool:
        """Room for a push of KV of so many bytes. Raises NotFoundError for a tier that is none."""
        return self._tier(name).reserve(holder, room_for(nbytes, tokens), self._ctx)

    def stored(self, name: str, holder: int, session: str | None, *, shared: bool) -> None:
        """The push that room was made for has ended: as this generation of the tier, or not at all (None). `shared`:
        the shared repo has acknowledged the same.
        """
        tier = self._tier(name)
        if session is not None:
            with tier.lock:
                tier.counts.written += 1
                if shared:
                    tier.safe.add(session)
            if not shared or tier is not self._tiers[-1]:
                self._later(WriteDown(name, session))
        tier.release(holder, self._ctx)

    def looked(self, asked: Sequence[str], hit: str | None) -> None:
        for name in asked:
            counts = self._counts(name)
            with self._wake:
                counts.requests += 1
                counts.hits += name == hit

    def loaded(self, name: str, tokens: int, nbytes: int, chunks: Sequence[str], want: Want | None) -> None:
        """So much was loaded from a tier. `want`: its tokens, to be promoted."""
        counts = self._counts(name)
        with self._wake:
            counts.tokens += tokens
            counts.bytes += nbytes
        if name != SHARED:
            self._tier(name).touch(chunks)
        if want is not None and self._above(name):
            self._later(Promote(name, replace(want, key=self._settings.key)))

    def release(self, holder: int) -> None:
        """A client has gone."""
        for tier in self._tiers:
            tier.release(holder, self._ctx)

    def describe(self) -> dict[str, Any]:  # Any: JSON
        """The document of `kv tiers`."""
        with self._wake:
            shared = {"name": SHARED, "place": ", ".join(store.url for store in self._settings.shared)}
            waiting = len(self._down) + len(self._up) + self._busy
            problem = self._problem
            counts = {**shared, **self._shared.to_json()}
        return {
            "schema": SCHEMA,
            "tiers": [*(tier.describe() for tier in self._tiers), counts],
            "waiting": waiting,
            "problem": problem,
        }

    def _tier(self, name: str) -> Tier:
        found = next((tier for tier in self._tiers if tier.name == name), None)
        if found is None:
            raise NotFoundError(f"the agent has no KV tier {name!r}", hint="`kvctl kv tiers` lists them")
        return found

    def _counts(self, name: str) -> TierCounts:
        return self._shared if name == SHARED else self._tier(name).counts

    def _above(self, name: str) -> list[Tier]:
        """The tiers above, the slowest first: each is filled from the one before."""
        names = [tier.name for tier in self._tiers]
        return list(reversed(self._tiers[: names.index(name) if name in names else len(names)]))

    # -- the thread --------------------------------------------------------------------------------------------

    def _later(self, job: WriteDown | Promote) -> None:
        with self._wake:
            if isinstance(job, WriteDown):
                self._down.append(job)
            elif all(job.same != other.same for other in self._up):
                self._up.append(job)
                while len(self._up) > WAITING:
                    self._up.popleft()
            self._wake.notify_all()

    def _run(self) -> None:
        try:
            with Repo.open(self._settings.shared, self._ctx) as repo:
                self._shared_id = repo.id
                check_key(repo, self._settings.key)
        except KvctlError as error:
            self._note(f"KV: {error}")
            self._problem = str(error)
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stop or self._down or self._up)
                if self._stop:
                    return
                # while write-downs fail, what the tiers can do among themselves goes first
                first = bool(self._up) and (self._failures > 0 or not self._down)
                job: WriteDown | Promote = self._up.popleft() if first else self._down.popleft()
                self._busy = True
            again = self._try(job)
            with self._wake:
                self._busy = False
                if again and isinstance(job, WriteDown):
                    self._down.append(job)
                if again:
                    pause = min(LONGEST, PAUSE * 2 ** (self._failures - 1))
                    self._wake.wait_for(lambda: self._stop, pause)

    def _try(self, job: WriteDown | Promote) -> bool:
        """Whether the job is to be tried again."""
        try:
            if isinstance(job, WriteDown):
                self._write_down(job)
            else:
                self._promote(job)
        except Exception as error:  # whatever it is, the agent goes on; a write-down is never forgotten
            again = isinstance(job, WriteDown)
            if self._stop:
                return again
            self._failures += 1
            if self._failures == 1 or not isinstance(error, KvctlError):
                what = job.session if isinstance(job, WriteDown) else f"a prefix of {len(job.want.tokens)} tokens"
                self._note(f"KV: {what} of tier {job.tier} could not be copied: {error}")
            self._problem = str(error)
            return again
        if self._failures:
            self._note("KV: copies between tiers work again")
        self._failures, self._problem = 0, ""
        return False

    def _write_down(self, job: WriteDown) -> None:
        """To disk first, where that is the next tier: what is there outlives the agent."""
        tier = self._tier(job.tier)
        try:
            with Repo.open(tier.stores, self._ctx) as repo:
                manifest = sessions.read_session(repo, _key_of(job.session))
        except NotFoundError:
            return  # evicted: the shared repo has it
        if PROMOTED in manifest.labels:
            return
        below = self._tiers[self._tiers.index(tier) + 1 :]
        copied = self._to_tier(tier, below[0], job.session, manifest) if below else None
        if job.session not in tier.safe:
            self._to_shared(tier, job.session, manifest)
        if copied is not None:
            with below[0].lock:
                below[0].safe.add(copied)
        tier.settle(self._ctx)

    def _to_shared(self, tier: Tier, session: str, manifest: SessionManifest) -> None:
        """Make sure that the shared repo has it. A later generation of the session that others pushed meanwhile stays
        the latest: this one becomes a session of its own, found by its tokens as ever.
        """
        name = SessionName(manifest.tenant, manifest.session)
        with Repo.open(self._settings.shared, self._ctx) as repo:
            self._shared_id = repo.id
            known = [sessions.read_session(repo, item.key) for item in sessions.list_generations(repo, name.prefix)]
        if not any((item.ns, item.token_hmac) == (manifest.ns, manifest.token_hmac) for item in known):
            late = any(item.created > manifest.created for item in known)
            target = f"{name.tenant}/auto-{manifest.token_hmac[:16]}" if late else str(name)
            copy_session(self._copy(tier, session, self._settings.shared, target), self._ctx)
            with self._wake:
                self._shared.copied += 1
        with tier.lock:
            tier.safe.add(session)

    def _to_tier(self, tier: Tier, below: Tier, session: str, manifest: SessionManifest) -> str | None:
        """Copy it to the tier below; its generation there, or None where there is no room."""
        name = SessionName(manifest.tenant, manifest.session)
        nbytes = sum(-(-size // PAGE) * PAGE for _, size in manifest.chunks)
        if not below.reserve(_OURS, room_for(nbytes, manifest.tokens), self._ctx):
            return None
        try:
            report = copy_session(self._copy(tier, session, below.stores, str(name)), self._ctx)
            with below.lock:
                below.counts.copied += bool(report.extra["new_generation"])
        finally:
            below.release(_OURS, self._ctx)
        return f"{name}@{report.extra['generation']}"

    def _copy(self, tier: Tier, session: str, target: tuple[StoreConfig, ...], name: str) -> CopySession:
        key = self._settings.key
        return CopySession(tier.stores, session, target, name, source_key=key, target_key=key)

    def _promote(self, job: Promote) -> None:
        source = self._settings.shared if job.tier == SHARED else self._tier(job.tier).stores
        for tier in self._above(job.tier):

            def admit(nbytes: int, tokens: int, tier: Tier = tier) -> bool:
                return tier.reserve(_OURS, room_for(nbytes, tokens), self._ctx)

            try:
                report = copy_prefix(source, tier.stores, job.want, self._ctx, admit)
            finally:
                tier.release(_OURS, self._ctx)
            if report is not None:
                with tier.lock:
                    tier.counts.promoted += 1
                    tier.counts.promoted_bytes += report.written
                source = tier.stores

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread, then write down what the shared repo lacks, as far as `LAST` seconds go. What is lost with
        the memory is noted: nothing that anybody was told is stored.
        """
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        self._ctx.cancel.request(signal.SIGTERM)
        if self._thread is not None:
            self._thread.join()
        self._ctx = Context(retry=_PATIENCE)
        end = time.monotonic() + LAST
        jobs = [job for job in dict.fromkeys(self._down) if job.tier == MEMORY]
        lost = sum(not (time.monotonic() < end and self._save(job)) for job in jobs)
        if lost:
            self._note(f"KV: {lost} sessions in memory never reached the repo, and are gone")
        self._close_tiers()

    def _save(self, job: WriteDown) -> bool:
        """Whether the session is in the shared repo now, or on disk for the next agent to bring it there."""
        tier = self._tier(job.tier)
        with contextlib.suppress(KvctlError):
            self._write_down(job)
        if job.session in tier.safe or len(self._tiers) == 1:
            return job.session in tier.safe
        below = self._tiers[1]
        with contextlib.suppress(KvctlError), Repo.open(tier.stores, self._ctx) as repo:
            manifest = sessions.read_session(repo, _key_of(job.session))
            return self._to_tier(tier, below, job.session, manifest) is not None
        return False

    def _close_tiers(self) -> None:
        for tier in self._tiers:
            tier.folder.close()
        self._tiers = []


def _key_of(session: str) -> str:
    address = parse_session(session)
    assert address.generation is not None
    return address.session.key(address.generation)
