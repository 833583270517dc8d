"""Sessions on three real storage nodes, by native-tcp: shares, ranks, read-only readers, a node that dies meanwhile."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context, RetryPolicy
from kvctl.kv import reading, sessions
from kvctl.kv.evict import EvictRequest, evict_sessions
from kvctl.kv.identity import Group
from kvctl.kv.names import SessionName, parse_session
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.seams import MemorySink
from kvctl.repo import metadata
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import state_key
from kvctl.repo.members import RepoMember
from kvctl.repo.repo import Repo
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.retry import RetryStore
from tests.halting import Halt
from tests.kv.world import check_sink, descriptor, make_repo, push, some_tokens

WIDE = Group("full", (0, 1), 8, 64, 64)
TOKENS = 4_096
BYTES = TOKENS * 2 * 2 * 8 * 128
PACK = 256 << 10
SENT = "kvctl_node_sent_bytes_total"
_PREFIXES = itertools.count()

Start = Callable[[], tuple[NodeProcess, ...]]


@pytest.fixture
def ctx() -> Context:
    return Context(retry=RetryPolicy(base=0.001, cap=0.05, attempts=5, stall_timeout=60.0))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts three nodes; all are ended after the module."""
    with ExitStack() as stack:

        def three() -> tuple[NodeProcess, ...]:
            folders = [tmp_path_factory.mktemp("node") for _ in range(3)]
            return tuple(stack.enter_context(NodeProcess.start(str(folder))) for folder in folders)

        yield three


@pytest.fixture(scope="module")
def nodes(start: Start) -> tuple[NodeProcess, ...]:
    return start()


@pytest.fixture(scope="module")
def tokens() -> array[int]:
    return some_tokens(TOKENS)


def stored(nodes: Sequence[NodeProcess], tokens: array[int], ctx: Context) -> tuple[str, tuple[StoreConfig, ...]]:
    """A prefix and the repo under it, two replicas, that holds alice/chat."""
    prefix = f"r{next(_PREFIXES)}"
    repo = make_repo([node.store(prefix) for node in nodes], ctx, replicas=2)
    report = push(repo, "alice/chat", tokens, ctx, WIDE, pack_bytes=PACK)
    assert [item.name for item in report.transport] == ["native-tcp"]
    assert (report.bytes, report.extra["packs_written"]) == (BYTES, BYTES // PACK)
    assert report.written > 2 * BYTES
    return prefix, repo


def behind(nodes: Sequence[NodeProcess], member: RepoMember) -> NodeProcess:
    """The node of a member: a repo has its own order of them."""
    return next(node for node in nodes if member.config.url.startswith(f"node://{node.address}/"))


def sent(nodes: Sequence[NodeProcess]) -> float:
    return sum(node.metrics()[SENT] for node in nodes)


@pytest.mark.parametrize("mode", ["prefix", "layers"])
def test_a_session_comes_from_all_nodes(
    nodes: tuple[NodeProcess, ...], tokens: array[int], ctx: Context, mode: str
) -> None:
    _, repo = stored(nodes, tokens, ctx)
    before = sent(nodes)
    sink = MemorySink()
    report = pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens, mode=mode, hedge=False), ctx)
    check_sink(sink, descriptor(WIDE), tokens, TOKENS)
    sink.close()
    assert [item.name for item in report.transport] == ["native-tcp"]
    assert report.fetched == report.needed == report.bytes == BYTES
    assert sent(nodes) - before >= BYTES
    assert all(path.bytes > 0 for path in report.paths), "every node had its share"
    assert report.verified.state == "leaves"
    assert report.extra["leased"] is True
    assert sink.ready == ([0, 1] if mode == "layers" else [])


def test_each_rank_reads_its_heads(nodes: tuple[NodeProcess, ...], tokens: array[int], ctx: Context) -> None:
    _, repo = stored(nodes, tokens, ctx)
    for rank in range(4):
        sink = MemorySink()
        request = PullSession(repo, "alice/chat", sink, tokens=tokens, tp_rank=rank, tp_size=4)
        report = pull_session(request, ctx)
        check_sink(sink, descriptor(WIDE), tokens, TOKENS, heads=(2 * rank, 2 * rank + 2))
        assert report.fetched == BYTES // 4
        sink.close()


def test_a_reader_without_the_right_to_write_is_unleased(
    nodes: tuple[NodeProcess, ...], tokens: array[int], ctx: Context
) -> None:
    prefix, _ = stored(nodes, tokens, ctx)
    readers = tuple(node.store(prefix, rights="ro", scope=prefix) for node in nodes)
    sink = MemorySink()
    report = pull_session(PullSession(readers, "alice/chat", sink, tokens=tokens[:1_024]), ctx)
    check_sink(sink, descriptor(WIDE), tokens, 1_024)
    sink.close()
    assert report.extra["leased"] is False
    assert reading.UNLEASED in report.notes


def test_generations_share_and_are_freed(nodes: tuple[NodeProcess, ...], tokens: array[int], ctx: Context) -> None:
    _, repo = stored(nodes, tokens, ctx)
    more = tokens + some_tokens(512, seed=7)
    second = push(repo, "alice/chat", more, ctx, WIDE, pack_bytes=PACK)
    assert second.extra["tokens_shared"] == TOKENS
    assert second.bytes == 512 * 2 * 2 * 8 * 128
    evict_sessions(EvictRequest(repo, ("alice/chat@1",)), ctx)
    with Repo.open(repo, ctx) as opened:
        run_gc(opened, GcOptions(grace=0))
        run_gc(opened, GcOptions(grace=0))
    sink = MemorySink()
    pull_session(PullSession(repo, "alice/chat", sink, tokens=more), ctx)
    check_sink(sink, descriptor(WIDE), more, TOKENS + 512)
    sink.close()


def test_a_node_killed_in_the_middle_of_a_pull(start: Start, tokens: array[int], ctx: Context) -> None:
    nodes = start()
    _, repo = stored(nodes, tokens, ctx)
    sink = MemorySink()
    halt = Halt()
    with ThreadPoolExecutor(1) as pool:
        request = PullSession(repo, "alice/chat", sink, tokens=tokens)
        pulling = pool.submit(pull_session, request, replace(ctx, progress=halt))
        halt.wait()
        nodes[1].kill()
        halt.go_on()
        report = pulling.result()
    check_sink(sink, descriptor(WIDE), tokens, TOKENS)
    sink.close()
    assert report.retries >= 1


def test_the_last_use_is_not_waited_for(start: Start, tokens: array[int], ctx: Context) -> None:
    nodes = start()
    _, configs = stored(nodes, tokens, ctx)
    with Repo.open(configs, ctx) as repo:
        home = metadata.home_of(repo, state_key(sessions.STATE_KIND, "alice/chat"))
        behind(nodes, home).kill()
        sessions.note_use(repo, SessionName("alice", "chat"))
        retrying = getattr(home.store, "inner", None)
        assert isinstance(retrying, RetryStore)
        assert retrying.retries == 0


def test_a_lease_is_not_waited_for_on_a_node_that_hangs(start: Start, tokens: array[int], ctx: Context) -> None:
    """It would take the ten minutes that the store is patient for."""
    nodes = start()
    prefix, _ = stored(nodes, tokens, ctx)
    patient = tuple(node.store(prefix, options={"timeout": "600"}) for node in nodes)
    with Repo.open(patient, ctx) as repo:
        with reading.StoredSession.open(repo, parse_session("alice/chat"), ctx) as session:
            assert session.hold is not None
            holder = behind(nodes, session.hold.member)
            holder.stop()
        assert [thread for thread in threading.enumerate() if thread.name == "kvctl-let-go"], "it is still asking"
        holder.resume()
