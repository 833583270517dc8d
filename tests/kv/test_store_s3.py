"""KV on a real S3 server, with conditional puts and with the lock that stands in where a server has none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.copying import CopySession, copy_session
from kvctl.kv.evict import EvictRequest, evict_sessions
from kvctl.kv.inspecting import list_sessions
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.repacking import repack_sessions
from kvctl.kv.seams import MemorySink
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.repo import Repo
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, push, some_tokens


@pytest.mark.s3
def test_sessions_on_s3(seaweed_store: Callable[[], StoreConfig], ctx: Context) -> None:
    ctx = replace(ctx, retry=replace(ctx.retry, attempts=5, base=0.05, cap=1.0))
    repo = make_repo([seaweed_store(), seaweed_store()], ctx, replicas=2)
    tokens = some_tokens(1_300)
    with ThreadPoolExecutor(3) as pool:  # writers at once
        ends = (1_024, 1_200, 1_300)
        reports = list(pool.map(lambda end: push(repo, "alice/chat", tokens[:end], ctx), ends))
    assert sorted(report.extra["generation"] for report in reports) == [1, 2, 3]
    for end, report in zip(ends, reports, strict=True):
        sink = MemorySink()
        pull_session(PullSession(repo, f"alice/chat@{report.extra['generation']}", sink, tokens=tokens), ctx)
        check_sink(sink, descriptor(), tokens, end if end == 1_300 else end // 16 * 16)
        sink.close()
    other = make_repo(mem_stores(1), ctx)
    copy_session(CopySession(repo, "alice/chat", other), ctx)
    evict_sessions(EvictRequest(repo, ("alice/chat@1", "alice/chat@2")), ctx)
    with Repo.open(repo, ctx) as opened:
        run_gc(opened, GcOptions(grace=0, repacker=repack_sessions, live_ratio=0.9))
    assert [entry.found.generation for entry in list_sessions(repo, ctx).entries] == [3]
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat", sink), ctx)
    sink.close()
