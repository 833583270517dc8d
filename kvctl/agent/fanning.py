"""A fan-out: many agents load the same at once, and each byte leaves the source once.

This process loads for one of them. Its share of the runs (`fanout.Assignment`) comes from the source by the executor,
everything else from the peers, as soon as one of them has it; what has landed is served on at once. When a peer dies
its share moves to those that are left, and only what nobody has is read again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import xxhash

from kvctl.agent.client import AgentClient
from kvctl.agent.fanout import Assignment
from kvctl.agent.peering import Extent, Peer, agent_at
from kvctl.agent.target import SlotTarget
from kvctl.core.context import Context
from kvctl.core.errors import IntegrityError, KvctlError, StalledError, UsageError
from kvctl.memory.arena import Arena
from kvctl.memory.budget import staging_budget
from kvctl.repo.chunks import digest_of, verify_leaves
from kvctl.transfer.execute import Executor
from kvctl.transfer.lanes import LaneSet, open_lanes
from kvctl.transfer.report import PathReport, Report, Verification
from kvctl.transfer.summary import Stopwatch, cpu_share, fill
from kvctl.transfer.tasks import RunStats, StageClock, Task
from kvctl.weights.moving import STAGING
from kvctl.weights.planning import LoadPlan, Opened, open_weights
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import Run, scatter
from kvctl.weights.targets import Landing, opened

BATCH: Final = 16  # runs of our share that are read before we look again who is alive
PATIENCE: Final = 20.0  # seconds that a peer may take to begin
STALL: Final = 60.0  # seconds for a range of a peer; one that sends no byte at all is noticed after five


def load_with_peers(
    request: LoadRequest,
    target: SlotTarget,
    peers: Sequence[str],
    ctx: Context,
    *,
    options: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
    stall: float = STALL,
) -> Report:
    """Load into the target's slot together with the agents at `peers` (HOST:PORT, this host's among them), each of
    which loads the same into a slot of the same name. `options`: of the peers' node:// stores (key_file, tls, ..);
    without them KVCTL_NODE_KEY_FILE. Raises UsageError when this host's agent is not among them.
    """
    watch = Stopwatch()
    found = dict(options or {})
    me = _find_self(peers, target, found)
    report = Report("load-weights", source=request.address, target=target.name)
    with open_weights(request, ctx) as source:
        plan = source.plan()
        report.metadata_bytes, report.requests = plan.metadata_bytes, plan.metadata_requests
        report.tensors, report.tp, report.objects = len(plan.tensors), plan.tp_report(), plan.objects
        report.notes.extend(plan.notes)
        target.options = replace(target.options, runs=len(plan.runs))
        with opened(target):
            if target.open(plan.outputs, plan.side_files, plan.fingerprint):
                report.notes.append(f"{target.name} holds exactly this already: nothing was fetched")
                report.verified = Verification("none", "what was there was not read again")
            else:
                fan = _Fan(request, source, plan, target, Assignment(len(plan.runs), sorted(set(peers)), me), ctx)
                links = [
                    Peer(place, f"{target.slot}/{plan.fingerprint}", found, fan.extents, fan,
                         patience=patience, stall=stall)
                    for place in sorted(set(peers)) if place != me
                ]  # fmt: skip
                fan.run(links, report, watch)
                target.publish()
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return report


def _find_self(peers: Sequence[str], target: SlotTarget, options: Mapping[str, str]) -> str:
    """Which of the peers is this host's own agent."""
    with AgentClient(target.socket, label="load-weights") as client:
        own, ident = client.agent_peers.removeprefix("peer://").partition("?")[0], client.agent_ident
    if own in peers:
        return own
    for place in peers:
        if agent_at(place, target.slot, options) == ident:
            return place
    raise UsageError(
        "this host's agent is not among the peers",
        cause=f"it listens at {own}" if own else "it lets no peer read (`kvctl agent serve --peers`)",
        hint="name every agent that loads, this one included",
    )


class _Fan:
    """The board of one load; see `peering.Board`. The caller's thread reads our share from the source."""

    def __init__(
        self, request: LoadRequest, source: Opened, plan: LoadPlan, target: SlotTarget, assignment: Assignment,
        ctx: Context,
    ) -> None:  # fmt: skip
        self.request = request
        self.source = source
        self.plan = plan
        self.target = target
        self.ctx = ctx
        self.clock = StageClock()
        self.stats = RunStats()
        self.assignment = assignment
        self.landings: Sequence[Landing] = tuple(target.landings or ())
        self.data = [landing.buffer.view[landing.data_start :] for landing in self.landings]
        self.extents = [self._extents(run) for run in plan.runs]
        self.peer_bytes: dict[str, int] = {}
        self.source_bytes = 0
        self.verified_bytes = 0
        self._ended = threading.Event()
        self._free = bytearray(b"\1" * len(plan.runs))
        self._share: list[int] | None = None  # ours that may still be free, last first; None: to be made again
        self._left = len(plan.runs)
        self._dead: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._error: BaseException | None = None
        self._progress = time.monotonic()
        self._cv = threading.Condition()

    def _extents(self, run: Run) -> list[Extent]:
        """Where the run's bytes lie in the output files, neighbours as one."""
        if run.dest is not None:
            spans = [(run.output, run.dest, run.length)]
        else:
            spans = []
            for piece in run.pieces:
                packed = piece.rows == 1 or piece.dest_stride == piece.row_bytes
                rows, width = (1, piece.nbytes) if packed else (piece.rows, piece.row_bytes)
                spans += [(piece.output, piece.dest + row * piece.dest_stride, width) for row in range(rows)]
            spans.sort()
        found: list[Extent] = []
        for output, dest, length in spans:
            landing = self.landings[output]
            offset = landing.data_start + dest
            last = found[-1] if found else None
            if last is not None and last.buffer is landing.buffer and last.offset + last.length == offset:
                found[-1] = replace(last, length=last.length + length)
            else:
                found.append(
                    Extent(self.plan.outputs[output].name, landing.buffer.nbytes, landing.buffer, offset, length)
                )
        return found

    @property
    def over(self) -> bool:
        return self._ended.is_set()

    # -- what peers call -----------------------------------------------------------------------------------

    def claim(self, peer: str, has: bytearray, most: int) -> list[int]:
        preference = self.assignment.preference(peer)
        with self._cv:
            chosen: list[int] = []
            for run in preference:
                if has[run] and self._free[run]:
                    self._free[run] = 0
                    chosen.append(run)
                    if len(chosen) == most:
                        break
        return chosen

    def give_back(self, run: int) -> None:
        with self._cv:
            self._free[run] = 1
            self._share = None
            self._cv.notify_all()

    def landed(self, run: int, peer: str, nbytes: int, checksum: int) -> None:
        with self.clock.timed("verify"):
            got = self._checksum(run)
        if got != checksum:
            raise IntegrityError(f"{peer} gave wrong bytes for run {run}", cause=f"XXH3 {got:x}, it said {checksum:x}")
        with self._cv:
            self.peer_bytes[peer] = self.peer_bytes.get(peer, 0) + nbytes
        self._done(run, nbytes, checksum)

    def alive(self, peer: str) -> None:
        with self._cv:
            if self._dead.pop(peer, None) is not None:
                self._share = None
                self._cv.notify_all()

    def dead(self, peer: str, why: str) -> None:
        with self._cv:
            if peer in self._dead:
                return
            self._dead[peer] = self._lost[peer] = why
            self._share = None
            self._cv.notify_all()
        self.ctx.progress.note(f"peer {peer}: {why}; others take its share")

    def broken(self, error: BaseException) -> None:
        with self._cv:
            self._error = self._error or error
            self._cv.notify_all()

    def wait(self, seconds: float) -> None:
        self._ended.wait(seconds)

    # -- our share of the source -----------------------------------------------------------------------------

    def run(self, peers: Sequence[Peer], report: Report, watch: Stopwatch) -> None:
        lanes = open_lanes(
            self.source.members, transport=self.request.transport, options=self.request.transport_options,
            max_rate=self.request.max_rate, trace=self.ctx.trace,
        )  # fmt: skip
        arena: Arena | None = None
        threads = [threading.Thread(target=peer.run, name=f"kvctl-peer-{peer.place}", daemon=True) for peer in peers]
        workers = min(4, os.cpu_count() or 1)
        try:
            staged = [run.length for run in self.plan.runs if run.dest is None]
            if staged:
                slots = max(2, min(2 * BATCH, staging_budget(STAGING) // max(staged)))
                arena = Arena(slots, max(staged))
            watch.ready()
            self.ctx.progress.begin("loading", sum(run.length for run in self.plan.runs))
            for thread in threads:
                thread.start()
            self._read_share(lanes, arena, workers)
        finally:
            self._ended.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self.ctx.progress.end()
            lanes.close()
            if arena is not None:
                arena.close()
            for view in self.data:
                view.release()
        fill(report, self.stats, lanes, self.clock.busy(), workers, seconds=watch.since_ready)
        self._tell(report, {peer.place: peer.transport for peer in peers})

    def _read_share(self, lanes: LaneSet, arena: Arena | None, workers: int) -> None:
        while True:
            with self._cv:
                if self._error is not None:
                    raise self._error
                if not self._left:
                    return
                self.ctx.cancel.check("loading with peers")
                mine = self._next_share()
                if not mine:
                    self._check_stall()
                    self._cv.wait(0.05)
                    continue
            executor = Executor(
                lanes.lanes, self.ctx, arena=arena, budget=self.request.max_in_flight_bytes, hedge=self.request.hedge,
                finishers=workers, max_rate=self.request.max_rate,
            )  # fmt: skip
            try:
                executor.run([self._task(run) for run in mine])
            finally:
                self.stats.add(executor.stats)

    def _next_share(self) -> list[int]:
        """Up to a batch of our runs, now claimed. Under the lock."""
        if self._share is None:
            dead = self._dead
            self._share = [
                run for run in reversed(range(len(self._free))) if self._free[run] and self.assignment.mine(run, dead)
            ]
        chosen: list[int] = []
        while self._share and len(chosen) < BATCH:
            run = self._share.pop()
            if self._free[run]:  # an earlier owner may have brought it
                self._free[run] = 0
                chosen.append(run)
        return chosen

    def _check_stall(self) -> None:
        limit = self.ctx.retry.stall_timeout
        if time.monotonic() - self._progress > limit:
            raise StalledError(
                f"no progress for {limit:g} s",
                cause=f"{self._left} runs are still missing; dead peers: {', '.join(self._dead) or 'none'}",
                hint="check the peers; --stall-timeout sets how long to wait",
            )

    def _task(self, number: int) -> Task:
        run = self.plan.runs[number]

        def on_bytes(_: Task, view: memoryview) -> None:
            self._from_source(number, run, view)

        if run.dest is None:
            return Task(run.places, run.offset, run.length, object_size=run.object_size, on_bytes=on_bytes)
        landing = self.landings[run.output]
        return Task(
            run.places, run.offset, run.length, object_size=run.object_size, buffer=landing.buffer,
            buffer_offset=landing.data_start + run.dest, on_bytes=on_bytes,
        )  # fmt: skip

    def _from_source(self, number: int, run: Run, view: memoryview) -> None:
        """Verify, put in place, serve on. On a finisher's thread."""
        if run.leaves is not None and self.request.verify != "none":
            with self.clock.timed("verify"):
                try:
                    verify_leaves(view, run.leaves.start, run.leaves.table)
                    if self.request.verify == "full" and run.leaves.digest and digest_of(view) != run.leaves.digest:
                        raise IntegrityError("a chunk's digest is wrong")
                except KvctlError as error:
                    error.what = f"{run.places[0].key}: {error.what}"
                    raise
            self.verified_bytes += run.length
        if run.dest is None:
            with self.clock.timed("copy"):
                scatter(view, run.pieces, self.data)
        with self.clock.timed("checksum"):
            checksum = self._checksum(number)
        self.source_bytes += run.length
        self._done(number, 0, checksum)

    def _checksum(self, run: int) -> int:
        """XXH3 of the run's bytes where they are; never 0, which means 'not there'."""
        state = xxhash.xxh3_64()
        for item in self.extents[run]:
            state.update(item.buffer.view[item.offset : item.offset + item.length])
        return state.intdigest() or 1

    def _done(self, run: int, advance: int, checksum: int) -> None:
        self.target.share(run, checksum)
        with self._cv:
            self._left -= 1
            self._progress = time.monotonic()
            self._cv.notify_all()
        if advance:  # what comes from the source is counted by the executor
            self.ctx.progress.advance(advance)

    def _tell(self, report: Report, transports: Mapping[str, str]) -> None:
        plan = self.plan
        report.fetched = self.source_bytes + sum(self.peer_bytes.values())
        report.needed = sum(run.needed for run in plan.runs)
        report.bytes = plan.needed_bytes
        report.paths += [
            PathReport(f"peer {peer}", "", transports[peer], count) for peer, count in sorted(self.peer_bytes.items())
        ]
        report.notes += [f"peer {peer} was left: {why}" for peer, why in sorted(self._lost.items())]
        report.extra["fanout"] = {
            "me": self.assignment.me,
            "source_bytes": self.source_bytes,
            "peer_bytes": dict(sorted(self.peer_bytes.items())),
            "lost_peers": sorted(self._lost),
        }
        if self.request.verify == "none":
            report.verified = Verification("none", "--verify none")
        elif self.verified_bytes == self.source_bytes and self.verified_bytes:
            report.verified = Verification(
                "leaves", "what came from peers has the checksums that they published", report.fetched
            )
        else:
            report.verified = Verification("none", plan.unverified_because)
