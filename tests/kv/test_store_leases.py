"""A reader's lease: one object, renewed while a long pull goes on; without it a report says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import AuthError, TransientError
from kvctl.kv import reading
from kvctl.kv.copying import CopySession, copy_session
from kvctl.kv.identity import Descriptor
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.seams import LayerKv, Layout, MemorySink
from kvctl.repo.layout import LEASES
from kvctl.repo.leases import close_hold, lease_manifest, read_holds
from kvctl.repo.repo import Repo
from kvctl.transports.mem import MemStore
from tests.kv.counting import Calls
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, objects, push, some_tokens


@pytest.fixture
def short_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lease is over at once, so that each chance to renew it is taken."""

    def lease(repo: Repo, key: str, **more: Any) -> Any:  # Any: passed on
        return lease_manifest(repo, key, ttl=0.0, **more)

    monkeypatch.setattr(reading, "lease_manifest", lease)


@pytest.mark.usefixtures("short_terms")
def test_a_pull_longer_than_its_term_renews_its_lease(ctx: Context, calls: Calls) -> None:
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(3_000)
    push(repo, "alice/chat", tokens, ctx)
    calls.reset()
    sink = MemorySink()
    report = pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens), ctx)
    assert len(calls.reads("chunks/")) == 3
    assert calls.count("put", LEASES) == 1 + 3
    assert calls.count("delete", LEASES) == 1
    assert report.extra["leased"] is True
    assert not objects(repo, LEASES)
    check_sink(sink, descriptor(), tokens, 3_000)
    sink.close()


class Closing(MemorySink):
    """While memory is made ready, gc takes the lease for over."""

    def __init__(self, repo: Repo) -> None:
        super().__init__()
        self._repo = repo

    def prepare(self, descriptor: Descriptor, layout: Layout) -> Sequence[LayerKv]:
        (hold,) = read_holds(self._repo, LEASES)
        assert close_hold(hold)
        return super().prepare(descriptor, layout)


@pytest.mark.usefixtures("short_terms")
def test_a_pull_whose_lease_was_closed_fails_and_hands_nothing_over(ctx: Context) -> None:
    stores = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(3_000)
    push(stores, "alice/chat", tokens, ctx)
    with Repo.open(stores, ctx) as repo:
        sink = Closing(repo)
        with pytest.raises(TransientError, match="the claim on the chunks of kv pull alice/chat@1 ran out"):
            pull_session(PullSession(stores, "alice/chat", sink), ctx)
    assert (sink.usable, sink.invalid_from) == (0, 0)
    sink.close()


def test_read_only_credentials_read_unleased_and_reports_say_so(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    stores, other = make_repo(mem_stores(1), ctx), make_repo(mem_stores(1), ctx)
    tokens = some_tokens(1_500)
    push(stores, "alice/chat", tokens, ctx)
    put, url = MemStore.put, stores[0].url

    def refused(self: MemStore, key: str, *args: Any, **more: Any) -> Any:  # Any: passed on
        if self.url == url:
            raise AuthError("read only")
        return put(self, key, *args, **more)

    monkeypatch.setattr(MemStore, "put", refused)
    sink = MemorySink()
    report = pull_session(PullSession(stores, "alice/chat", sink, tokens=tokens), ctx)
    assert report.extra["leased"] is False
    assert report.notes == [reading.UNLEASED]
    check_sink(sink, descriptor(), tokens, 1_500)
    sink.close()
    copied = copy_session(CopySession(stores, "alice/chat", other), ctx)
    assert copied.extra["leased"] is False
    assert reading.UNLEASED in copied.notes
