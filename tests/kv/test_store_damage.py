"""Packs that are missing, short or damaged: the usable prefix shrinks, says so, and nothing wrong is handed over."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import IntegrityError, KvctlError, PartialError
from kvctl.kv import sessions
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.index import node_key
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.names import parse_session
from kvctl.kv.pull import PullSession, pull_session, resolve_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import MemorySink
from kvctl.repo.check import check
from kvctl.repo.repo import Repo
from kvctl.transports.mem import space
from tests.kv.counting import Calls
from tests.kv.world import check_sink, descriptor, make_repo, mem_stores, push, some_tokens, source

TOKENS = 3_000  # packs at 0, 1,024 and 2,048


@dataclass
class Stored:
    """A session of three packs a group, whose objects tests may harm."""

    repo: tuple[StoreConfig, ...]
    tokens: array[int]
    manifest: SessionManifest
    meaning: Descriptor = field(default_factory=descriptor)

    def pack(self, first: int, group: int = 0) -> str:
        row = next(row for row in self.manifest.packs if row.first <= first < row.end and row.group == group)
        return self.manifest.refs[row.chunk].key

    def harm(self, key: str, change: Callable[[bytes], bytes | None]) -> None:
        for config in self.repo:
            found = space(config.url.removeprefix("mem://"))
            if key in found.objects:
                data = change(bytes(found.objects[key].data))
                if data is None:
                    del found.objects[key]
                else:
                    found.objects[key] = replace(found.objects[key], data=data)


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.fixture
def stored(ctx: Context) -> Stored:
    return store(ctx, descriptor())


def store(ctx: Context, meaning: Descriptor, *, replicas: int = 1, **options: object) -> Stored:
    repo = make_repo(mem_stores(2), ctx, replicas=replicas)
    tokens = some_tokens(TOKENS)
    push_session(PushSession(repo, "alice/chat", source(meaning, tokens), **options), ctx)  # type: ignore[arg-type]
    with Repo.open(repo, ctx) as opened:
        manifest = sessions.read_session(opened, parse_session("alice/chat").session.key(1))
    return Stored(repo, tokens, manifest, meaning)


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "truncated": lambda data: data[:-100],
    "cut in its header": lambda data: data[:100],
    "empty": lambda _: b"",
    "header flipped": flip(300),
    "payload flipped": flip(-200),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=list(HARMS))
@pytest.mark.parametrize(("first", "usable"), [(0, 0), (1_024, 1_024), (2_048, 2_048)])
def test_what_is_before_the_damage_is_delivered(
    ctx: Context, stored: Stored, harm: Callable[[bytes], bytes | None], first: int, usable: int
) -> None:  # K9, K10
    stored.harm(stored.pack(first), harm)
    sink = MemorySink()
    with pytest.raises(PartialError) as caught:
        pull_session(PullSession(stored.repo, "alice/chat", sink, tokens=stored.tokens), ctx)
    assert caught.value.exit_code == 3
    assert caught.value.details["usable_tokens"] == usable
    assert f"at token {first:,}" in str(caught.value)
    assert sink.usable == usable
    if usable:
        check_sink(sink, stored.meaning, stored.tokens, usable)
    sink.close()
    strict = MemorySink()
    with pytest.raises(IntegrityError) as refused:
        pull_session(PullSession(stored.repo, "alice/chat", strict, tokens=stored.tokens, strict=True), ctx)
    assert refused.value.exit_code == 7
    assert (strict.usable, strict.invalid_from) == (0, 0)
    strict.close()


def test_check_finds_the_hole_and_the_damage(ctx: Context, stored: Stored) -> None:  # K9, K10
    stored.harm(stored.pack(0), lambda _: None)
    stored.harm(stored.pack(1_024), flip(-200))
    from kvctl.repo.check import Share

    with Repo.open(stored.repo, ctx) as repo:
        found = check(repo, read_data=Share())
    assert {(problem.kind, problem.key) for problem in found.problems} == {
        ("missing", stored.pack(0).rpartition("/")[2]),
        ("corrupt", stored.pack(1_024).rpartition("/")[2]),
    }


def test_a_damaged_pack_is_read_a_bounded_number_of_times(ctx: Context, stored: Stored, calls: Calls) -> None:
    stored.harm(stored.pack(1_024), flip(-200))
    sink = MemorySink()
    with pytest.raises(PartialError):
        pull_session(PullSession(stored.repo, "alice/chat", sink), ctx)
    sink.close()
    assert len(calls.reads(stored.pack(1_024))) == 2  # once more, and no other replica to ask


def test_another_replica_stands_in(ctx: Context) -> None:
    stored = store(ctx, descriptor(), replicas=2)
    name = stored.repo[0].url.removeprefix("mem://")
    objects = space(name).objects
    for key in [key for key in objects if key.startswith("chunks/")]:
        objects[key] = replace(objects[key], data=flip(-200)(bytes(objects[key].data)))
    sink = MemorySink()
    report = pull_session(PullSession(stored.repo, "alice/chat", sink, tokens=stored.tokens), ctx)
    check_sink(sink, stored.meaning, stored.tokens, TOKENS)
    assert report.extra["usable_tokens"] == TOKENS
    sink.close()


def test_min_tokens_delivers_nothing(ctx: Context, stored: Stored) -> None:
    longer = stored.tokens + some_tokens(100, seed=3)
    sink = MemorySink()
    with pytest.raises(PartialError) as caught:
        pull_session(PullSession(stored.repo, "alice/chat", sink, tokens=longer, min_tokens=3_001), ctx)
    assert (caught.value.details["usable_tokens"], caught.value.details["delivered"]) == (2_992, False)
    assert (sink.usable, sink.invalid_from, sink.layout) == (0, 0, None)


MANY = Group("full", tuple(range(24)), 2, 8, 8)


class Engine(MemorySink):
    """Notes the order of what it is told, and what layer 20 held when it was said to be ready."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int]] = []

    def layer_ready(self, layer: int) -> None:
        self.told.append(("ready", layer))

    def invalid(self, from_token: int) -> None:
        super().invalid(from_token)
        self.told.append(("invalid", from_token))

    def done(self, tokens: int) -> None:
        super().done(tokens)
        self.told.append(("done", tokens))


def test_layers_are_handed_over_in_order(ctx: Context) -> None:
    stored = store(ctx, descriptor(MANY), pack_bytes=4 << 20)
    engine = Engine()
    pull_session(PullSession(stored.repo, "alice/chat", engine, tokens=stored.tokens, mode="layers"), ctx)
    assert engine.told == [*(("ready", layer) for layer in range(24)), ("done", TOKENS)]
    check_sink(engine, stored.meaning, stored.tokens, TOKENS)
    engine.close()


def _harm_layer(stored: Stored, ctx: Context, layer: int, first: int) -> None:
    from kvctl.kv.packs import parse_pack_header

    key = stored.pack(first)
    for config in stored.repo:
        found = space(config.url.removeprefix("mem://")).objects
        if key in found:
            header = parse_pack_header(found[key].data, key)
            fragment = next(item for item in header.fragments if item.place.layer == layer)
            stored.harm(key, flip(fragment.offset))


def test_a_fault_in_layer_20_invalidates_what_follows_it(ctx: Context) -> None:
    stored = store(ctx, descriptor(MANY), pack_bytes=4 << 20)
    _harm_layer(stored, ctx, 20, 1_024)
    engine = Engine()
    with pytest.raises(PartialError) as caught:
        pull_session(PullSession(stored.repo, "alice/chat", engine, tokens=stored.tokens, mode="layers"), ctx)
    ready = [layer for what, layer in engine.told if what == "ready"]
    assert ready == list(range(24))  # each once; 20 only when its good part was there
    at = engine.told.index(("invalid", 1_024))
    assert ("ready", 20) not in engine.told[:at]
    assert engine.told[-1] == ("done", 1_024)
    check_sink(engine, stored.meaning, stored.tokens, 1_024)
    assert caught.value.details["usable_tokens"] == 1_024
    engine.close()


def test_a_fault_in_a_window_lets_a_whole_prefix_begin_anew(ctx: Context) -> None:
    """The damaged pack is in the sliding group's window: an earlier prefix has another window."""
    meaning = descriptor(Group("full", (0,), 2, 8, 8), Group("sliding", (1,), 2, 8, 8, 513))
    repo = make_repo(mem_stores(1), ctx)
    tokens = some_tokens(TOKENS)
    push_session(PushSession(repo, "alice/chat", source(meaning, tokens, whole_windows=True)), ctx)
    with Repo.open(repo, ctx) as opened:
        manifest = sessions.read_session(opened, parse_session("alice/chat").session.key(1))
    stored = Stored(repo, tokens, manifest, meaning)
    stored.harm(stored.pack(2_048, group=1), flip(-200))
    sink = MemorySink()
    with pytest.raises(PartialError):
        pull_session(PullSession(repo, "alice/chat", sink, tokens=tokens), ctx)
    check_sink(sink, meaning, tokens, 2_048)
    assert sink.layout is not None
    assert [slot.start for slot in sink.layout.slots] == [0, 2_048 - 512]
    sink.close()
    engine = Engine()
    with pytest.raises(PartialError):
        pull_session(PullSession(repo, "alice/chat", engine, tokens=tokens, mode="layers"), ctx)
    assert engine.told[-1] == ("invalid", 0)
    assert engine.usable == 0
    engine.close()


def test_a_member_that_is_down_is_no_damage(ctx: Context) -> None:
    stored = store(ctx, descriptor())
    first = stored.pack(0)  # where it lies is by chance
    up = tuple(config for config in stored.repo if first not in space(config.url.removeprefix("mem://")).objects)
    assert len(up) == 1
    with pytest.raises(KvctlError) as caught:
        pull_session(PullSession(up, "alice/chat", MemorySink(), tokens=stored.tokens), ctx)
    assert caught.value.exit_code in {4, 6}


def test_a_hole_in_the_index_is_a_miss(ctx: Context, stored: Stored) -> None:  # K13
    """The prefix's node is gone, the suffix's is there: nothing behind the hole is taken for stored."""
    stored.harm(node_key(stored.manifest.ns, bytes.fromhex(stored.manifest.index[0])), lambda _: None)
    report = push(stored.repo, "bob/chat", stored.tokens, ctx)
    assert report.extra["tokens_shared"] == 0
    assert push(stored.repo, "carol/chat", stored.tokens, ctx).extra["tokens_shared"] == TOKENS  # mended
    assert resolve_session(PullSession(stored.repo, "bob/chat", tokens=stored.tokens), ctx).usable == TOKENS


def test_a_push_does_not_link_to_packs_that_are_gone(ctx: Context, stored: Stored) -> None:  # K10
    stored.harm(stored.pack(1_024), lambda _: None)
    report = push(stored.repo, "bob/chat", stored.tokens, ctx)
    assert report.extra["tokens_shared"] == 1_024
    assert any("are gone" in note for note in report.notes)
    sink = MemorySink()
    pull_session(PullSession(stored.repo, "bob/chat", sink, tokens=stored.tokens), ctx)
    check_sink(sink, stored.meaning, stored.tokens, TOKENS)
    sink.close()
    again = push(stored.repo, "carol/chat", stored.tokens, ctx)  # the index was mended on the way
    assert again.extra["tokens_shared"] == TOKENS
