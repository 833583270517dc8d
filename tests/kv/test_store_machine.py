"""Random pushes, pulls, pins, evictions, copies, collections and deaths, on memory and file stores, against a model:
nothing committed is lost, nothing evicted is served, shared bytes go after their last owner and never before.
"""

from __future__ import annotations

import tempfile
from array import array
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import NotFoundError
from kvctl.kv.copying import CopySession, copy_session
from kvctl.kv.evict import EvictRequest, evict_sessions, pin_sessions, unpin_sessions
from kvctl.kv.inspecting import list_sessions
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.repacking import repack_sessions
from kvctl.kv.seams import MemorySink
from kvctl.repo.check import check
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import CHUNKS, INTENTS
from kvctl.repo.repo import Repo
from kvctl.transports.retry import RetryStore
from tests.kv.world import check_sink, descriptor, file_stores, make_repo, mem_stores, push, some_tokens

Stores = tuple[StoreConfig, ...]
SESSIONS = ("alice/one", "alice/two", "bob/one")
CTX = Context(retry=RetryPolicy(base=0.0, cap=0.0, attempts=2))


class Died(BaseException):
    """The process is gone: nothing may catch it and go on."""


class Machine(RuleBasedStateMachine):
    """`live`: (repo, session, generation) -> tokens. `gone`: those that were evicted."""

    def make(self) -> tuple[Stores, Stores]:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.repos = self.make()
        self.live: dict[tuple[int, str, int], array[int]] = {}
        self.gone: set[tuple[int, str, int]] = set()
        self.pins: set[tuple[int, str]] = set()
        self.texts: list[array[int]] = [some_tokens(1_100, seed=1)]

    def text(self, base: int, keep: int, more: int) -> array[int]:
        known = self.texts[base % len(self.texts)]
        made = known[: keep % (len(known) + 1)] + some_tokens(more, seed=len(self.texts) + 10)
        self.texts.append(made)
        return made

    @rule(name=st.sampled_from(SESSIONS), base=st.integers(0, 9), keep=st.integers(0, 1_300), more=st.integers(1, 250))
    def push(self, name: str, base: int, keep: int, more: int) -> None:
        tokens = self.text(base, keep, more)
        report = push(self.repos[0], name, tokens, CTX)
        place = (0, name, report.extra["generation"])
        assert place not in self.gone
        assert self.live.get(place, tokens) == tokens
        self.live[place] = tokens

    @rule(name=st.sampled_from(SESSIONS), base=st.integers(0, 9), more=st.integers(1, 100), at=st.integers(0, 12))
    def push_and_die(self, name: str, base: int, more: int, at: int) -> None:
        tokens = self.text(base, 1_300, more)
        left = at
        put, delete = RetryStore.put, RetryStore.delete

        def count() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Died

        def mortal_put(store: RetryStore, *args: Any, **more: Any) -> Any:  # Any: passed on
            count()
            return put(store, *args, **more)

        def mortal_delete(store: RetryStore, *args: Any, **more: Any) -> Any:  # Any: passed on
            count()
            return delete(store, *args, **more)

        with mock.patch.object(RetryStore, "put", mortal_put), mock.patch.object(RetryStore, "delete", mortal_delete):
            try:
                report = push(self.repos[0], name, tokens, CTX)
            except Died:
                report = None
        before = {place for place in self.live if place[:2] == (0, name)}
        for entry in list_sessions(self.repos[0], CTX, [name], allow_empty=True).entries:
            place = (0, name, entry.found.generation)
            if place not in before:  # it died after its commit
                self.live[place] = tokens
        assert report is None or (0, name, report.extra["generation"]) in self.live

    @rule(pick=st.integers(0, 50), shorter=st.integers(0, 300))
    def pull(self, pick: int, shorter: int) -> None:
        if self.live:
            place = sorted(self.live)[pick % len(self.live)]
            self.check(place, shorter)

    def check(self, place: tuple[int, str, int], shorter: int = 0) -> None:
        number, name, generation = place
        tokens = self.live[place]
        wanted = tokens[: max(1, len(tokens) - shorter)]
        sink = MemorySink()
        pull_session(PullSession(self.repos[number], f"{name}@{generation}", sink, tokens=wanted), CTX)
        check_sink(sink, descriptor(), tokens, len(tokens) if not shorter else len(wanted) // 16 * 16) if (
            sink.usable
        ) else None
        assert sink.usable == (len(tokens) if len(wanted) == len(tokens) else len(wanted) // 16 * 16)
        sink.close()

    @rule(pick=st.integers(0, 50))
    def pull_what_is_gone(self, pick: int) -> None:
        if self.gone:
            number, name, generation = sorted(self.gone)[pick % len(self.gone)]
            with pytest.raises(NotFoundError):
                pull_session(PullSession(self.repos[number], f"{name}@{generation}", MemorySink()), CTX)

    @rule(pick=st.integers(0, 50), on=st.booleans())
    def pin(self, pick: int, *, on: bool) -> None:
        if self.live:
            number, name, _ = sorted(self.live)[pick % len(self.live)]
            (pin_sessions if on else unpin_sessions)(self.repos[number], [name], CTX)
            (self.pins.add if on else self.pins.discard)((number, name))

    @rule(pick=st.integers(0, 50), whole=st.booleans())
    def evict(self, pick: int, *, whole: bool) -> None:
        if self.live:
            number, name, generation = sorted(self.live)[pick % len(self.live)]
            pattern = name if whole else f"{name}@{generation}"
            evict_sessions(EvictRequest(self.repos[number], (pattern,)), CTX)
            self.forget({p for p in self.live if p[:2] == (number, name) and (whole or p[2] == generation)})

    def forget(self, places: set[tuple[int, str, int]]) -> None:
        for place in places:
            if place[:2] not in self.pins:
                del self.live[place]
                self.gone.add(place)
        left = {place[:2] for place in self.live}
        self.pins &= left

    @rule(pick=st.integers(0, 50), name=st.sampled_from(SESSIONS))
    def copy(self, pick: int, name: str) -> None:
        if self.live:
            place = sorted(self.live)[pick % len(self.live)]
            number, old, generation = place
            other = 1 - number
            request = CopySession(self.repos[number], f"{old}@{generation}", self.repos[other], name)
            made = (other, name, copy_session(request, CTX).extra["generation"])
            assert made not in self.gone
            self.live[made] = self.live[place]

    @rule(number=st.integers(0, 1))
    def collect(self, number: int) -> None:
        with Repo.open(self.repos[number], CTX) as repo:
            run_gc(repo, GcOptions(grace=0, repacker=repack_sessions, live_ratio=0.9))

    @invariant()
    def listed_and_whole(self) -> None:
        for number, repo in enumerate(getattr(self, "repos", ())):
            found = {
                (number, str(entry.found.session), entry.found.generation) for entry in list_sessions(repo, CTX).entries
            }
            assert found == {place for place in self.live if place[0] == number}
            with Repo.open(repo, CTX) as opened:
                assert not check(opened).damaged

    def teardown(self) -> None:
        if not hasattr(self, "repos"):
            return
        for place in sorted(self.live):
            self.check(place)
        for number, repo in enumerate(self.repos):
            with Repo.open(repo, CTX) as opened:
                for member in opened.members:  # of pushes that died: their process is this one, so nobody sees it
                    member.store.delete([item.key for item in member.store.list(INTENTS)])
            names = sorted({place[1] for place in self.live if place[0] == number})
            for name in names:
                unpin_sessions(repo, [name], CTX)
                evict_sessions(EvictRequest(repo, (name,)), CTX)
                self.collect(number)
            for _ in range(3):
                self.collect(number)
            with Repo.open(repo, CTX) as opened:
                for member in opened.members:
                    assert not list(member.store.list(CHUNKS))
                    assert not list(member.store.list("index/"))


class OnMemory(Machine):
    def make(self) -> tuple[Stores, Stores]:
        return make_repo(mem_stores(2), CTX, replicas=2), make_repo(mem_stores(1), CTX)


class OnFiles(Machine):
    def make(self) -> tuple[Stores, Stores]:
        self.folder = tempfile.TemporaryDirectory()
        return make_repo(file_stores(Path(self.folder.name), 2), CTX), make_repo(
            file_stores(Path(self.folder.name)), CTX
        )

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            self.folder.cleanup()


@pytest.mark.parametrize(("machine", "examples"), [(OnMemory, 10), (OnFiles, 2)], ids=["mem", "file"])
def test_random_histories(machine: type[Machine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            phases=(Phase.generate,),  # shrinking would take minutes; a soak run with shrinking finds the least case
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("machine", [OnMemory, OnFiles], ids=["mem", "file"])
def test_many_random_histories(machine: type[Machine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=100, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )
