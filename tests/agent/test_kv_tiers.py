"""The agent's KV tiers ahead of a repo, used as an engine's connector uses them, without an engine: real agents, real
bytes. Who is asked, what moves when, what goes, and what is left when something dies.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvctl.agent.kv_folders import memory_roots
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.identity import Group
from kvctl.kv.inspecting import list_sessions
from kvctl.kv.names import parse_session
from kvctl.kv.prefix import Want
from kvctl.kv.push import PushSession
from kvctl.kv.reading import StoredSession
from kvctl.kv.seams import KvSink, MemorySink
from kvctl.repo.repo import Repo
from kvctl_vllm.depot import Depot
from kvctl_vllm.filling import Filled, Wanted, fill
from kvctl_vllm.places import url_of
from kvctl_vllm.tiers import Pushed, Tiers
from tests.agent.agents import AgentProcess, eventually, kvctl
from tests.agent.conftest import Start
from tests.kv.world import check_sink, descriptor, file_stores, some_tokens, source

CTX = Context()
TOKEN_BYTES = 2 * 2 * 8 * 2 * 2  # layers, K and V, dim, heads, width
MIB = 1 << 20
CLIENTS: list[Client] = []


@dataclass
class Client:
    """What the connector of an engine does."""

    stores: tuple[StoreConfig, ...]
    socket: str
    key: bytes | None = None
    tiers: Tiers = field(init=False)

    def __post_init__(self) -> None:
        CLIENTS.append(self)
        self.tiers = Tiers(Depot(self.stores, 0.1), self.socket or None, 0.1)

    def push(self, session: str, tokens: array[int]) -> Pushed:
        request = PushSession(self.stores, session, source(descriptor(), tokens), key=self.key)
        return self.tiers.push(request, len(tokens) * TOKEN_BYTES)

    def load(self, tokens: array[int], between: Callable[[], None] = lambda: None) -> Filled:
        """Load what is stored of the tokens; every byte is compared."""
        want = Want(descriptor(), tokens, "alice", self.key)
        found = self.tiers.find(want, CTX, session=None, above=0, least=1)
        if found.prefix is None or not found.prefix.tokens:
            return Filled(0)
        between()
        sinks: list[MemorySink] = []

        def sink() -> KvSink:
            sinks.append(MemorySink())
            return sinks[-1]

        done = fill(self.tiers, Wanted(want, found.prefix, found.tier, 0, found.prefix.tokens), sink, CTX)
        if len(done.parts) == 1 and done.usable:
            check_sink(sinks[-1], descriptor(), tokens, done.usable)
        for one in sinks:
            one.close()
        return done


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().tiers.close()


@pytest.fixture
def stores(tmp_path: Path) -> tuple[StoreConfig, ...]:
    made = file_stores(tmp_path, 1)
    Repo.init(made, ctx=CTX).close()
    return made


def serving(start: Start, stores: tuple[StoreConfig, ...], *more: str, memory: str = "8MiB") -> AgentProcess:
    return start("--kv-repo", ",".join(store.url for store in stores), "--kv-memory", memory, *more)


def idle(agent: AgentProcess) -> dict[str, Any]:
    """The tiers, once no copy waits."""

    def waits() -> bool:
        with agent.client() as client:
            return bool(client.call("kv_tiers")["waiting"])

    eventually(lambda: not waits(), "the agent has copied what it had to")
    return agent.tiers()


def names(stores: tuple[StoreConfig, ...]) -> list[str]:
    return [str(entry.found) for entry in list_sessions(stores, CTX).entries]


def place_of(agent: AgentProcess, tier: str = "memory") -> Path:
    return Path(agent.tiers()[tier]["place"].removeprefix("file://"))


def served(done: Filled) -> list[tuple[str, int]]:
    return [(tier, tokens) for tier, tokens, _ in done.parts]


def test_a_push_is_in_memory_and_in_the_repo_and_loads_from_memory(
    start: Start, stores: tuple[StoreConfig, ...], tmp_path: Path
) -> None:
    agent = serving(start, stores)
    client = Client(stores, agent.socket)
    tokens = some_tokens(608)
    pushed = client.push("alice/chat", tokens)
    assert pushed.report is not None
    assert pushed.held == "alice/chat@1"
    assert names(stores) == ["alice/chat@1"]
    done = client.load(tokens)
    assert served(done) == [("memory", 608)]
    assert done.parts[0][2].fetched == 608 * TOKEN_BYTES
    assert client.load(some_tokens(608, 7)).usable == 0
    code, document, err = kvctl("kv", "tiers", socket=agent.socket, state=tmp_path)
    assert code == 0, err
    schema = Path(__file__).parents[2] / "kvctl" / "cli" / "schemas" / "kv-tiers.schema.json"
    jsonschema.validate(document, json.loads(schema.read_text()))
    memory, shared = document["tiers"]
    assert (memory["requests"], memory["hits"], memory["hit_rate"]) == (2, 1, 0.5)
    assert (memory["tokens"], memory["bytes"], memory["written"]) == (608, 608 * TOKEN_BYTES, 1)
    assert (shared["requests"], shared["hits"], shared["tokens"], shared["copied"]) == (1, 0, 0, 0)
    code, listed, err = kvctl("agent", "ls", socket=agent.socket, state=tmp_path)
    assert code == 0, err
    assert listed["kv"] == document
    assert listed["budget_bytes"] == (256 - 8) * MIB  # KV in memory is taken out of what slots may take


def test_what_others_pushed_is_found_behind_and_brought_up(start: Start, stores: tuple[StoreConfig, ...]) -> None:
    tokens = some_tokens(2_500)
    Client(stores, "").push("alice/chat", tokens)  # from another host
    agent = serving(start, stores)
    client = Client(stores, agent.socket)
    wanted = tokens[:2_048] + some_tokens(100, 3)
    assert served(client.load(wanted)) == [("shared", 2_048)]
    memory = idle(agent)["memory"]
    assert memory["promoted"] == 1
    assert memory["promoted_bytes"] >= 2_048 * TOKEN_BYTES
    assert served(client.load(wanted)) == [("memory", 2_048)]
    assert served(client.load(tokens)) == [("shared", 2_500)]  # the longest wins, wherever it is
    assert idle(agent)["memory"]["promoted"] == 2
    assert served(client.load(tokens)) == [("memory", 2_500)]
    assert names(stores) == ["alice/chat@1"]  # what was brought up is not written down again
    tiers = agent.tiers()
    assert (tiers["memory"]["requests"], tiers["memory"]["hits"]) == (4, 2)
    assert (tiers["shared"]["requests"], tiers["shared"]["hits"]) == (3, 2)


def test_the_budget_holds_and_the_longest_unused_goes(start: Start, stores: tuple[StoreConfig, ...]) -> None:
    agent = serving(start, stores, memory="2MiB")
    client = Client(stores, agent.socket)
    for number in range(12):
        assert client.push(f"alice/chat{number}", some_tokens(2_048, number)).report is not None
        assert client.load(some_tokens(2_048, 0)).usable == 2_048  # the first one stays in use
        tier = agent.tiers()["memory"]
        assert tier["used_bytes"] <= tier["budget_bytes"] == 2 * MIB
        assert tier["reserved_bytes"] == 0
    tier = idle(agent)["memory"]
    held = names((StoreConfig(tier["place"]),))
    assert "alice/chat0@1" in held
    assert "alice/chat11@1" in held
    assert "alice/chat1@1" not in held
    assert tier["evicted"] == 12 - len(held) > 0
    assert len(names(stores)) == 12
    assert served(client.load(some_tokens(2_048, 1))) == [("shared", 2_048)]


def test_a_session_larger_than_the_tier_goes_to_the_repo_alone(start: Start, stores: tuple[StoreConfig, ...]) -> None:
    agent = serving(start, stores, memory="1MiB")
    pushed = Client(stores, agent.socket).push("alice/large", some_tokens(9_000))
    assert pushed.report is not None
    assert pushed.held is None
    tier = agent.tiers()["memory"]
    assert (tier["refused"], tier["written"], tier["evicted"]) == (1, 0, 0)


def hidden(stores: tuple[StoreConfig, ...]) -> tuple[Path, Path]:
    """The shared repo's folder, and where it is while it cannot be reached."""
    folder = Path(stores[0].url.removeprefix("file://"))
    return folder, folder.with_name("away")


def test_what_the_repo_could_not_take_is_kept_and_written_back(start: Start, stores: tuple[StoreConfig, ...]) -> None:
    agent = serving(start, stores, memory="2MiB")
    client = Client(stores, agent.socket)
    folder, away = hidden(stores)
    folder.rename(away)
    held = 0
    for number in range(9):  # more than fit: nothing of it may go, so the last ones are refused
        pushed = client.push(f"alice/chat{number}", some_tokens(2_048, number))
        assert pushed.report is None  # nobody is told that it is stored
        held += pushed.held is not None
    tier = agent.tiers()["memory"]
    assert 2 <= held < 9
    assert (tier["written"], tier["refused"], tier["evicted"]) == (held, 9 - held, 0)
    assert tier["used_bytes"] <= tier["budget_bytes"]
    assert served(client.load(some_tokens(2_048, 0))) == [("memory", 2_048)]
    away.rename(folder)
    tiers = idle(agent)
    assert tiers["shared"]["copied"] == held
    assert names(stores) == [f"alice/chat{number}@1" for number in range(held)]
    eventually(lambda: client.push("alice/last", some_tokens(2_048, 50)).report is not None, "the repo is used again")
    assert agent.tiers()["memory"]["evicted"] > 0  # now they may go


def test_what_others_pushed_meanwhile_stays_the_latest(start: Start, stores: tuple[StoreConfig, ...]) -> None:
    """A write-back that comes late is found by its tokens, under a name of its own."""
    agent = serving(start, stores)
    client = Client(stores, agent.socket)
    folder, away = hidden(stores)
    folder.rename(away)
    old, new = some_tokens(512), some_tokens(512, 1)
    assert client.push("alice/chat", old).held == "alice/chat@1"
    time.sleep(1.1)  # manifests tell their time in whole seconds
    assert Client((StoreConfig(f"file://{away}"),), "").push("alice/chat", new).report is not None
    away.rename(folder)
    idle(agent)
    auto, chat = list_sessions(stores, CTX).entries
    assert str(chat.found) == "alice/chat@1"
    assert chat.manifest is not None
    assert auto.manifest is not None
    assert chat.manifest.created > auto.manifest.created
    assert auto.found.session.name.startswith("auto-")
    for tokens in (old, new):
        assert served(Client(stores, "").load(tokens)) == [("shared", 512)]


def test_a_local_tier_outlives_the_agent(start: Start, stores: tuple[StoreConfig, ...], tmp_path: Path) -> None:
    local = ("--kv-local", str(tmp_path / "nvme"), "--kv-local-bytes", "64MiB")
    first = serving(start, stores, *local)
    client = Client(stores, first.socket)
    tokens = some_tokens(1_500)
    client.push("alice/chat", tokens)
    assert idle(first)["local"]["copied"] == 1
    assert served(client.load(tokens)) == [("memory", 1_500)]
    assert first.close() == 0
    second = serving(start, stores, *local)
    client = Client(stores, second.socket)
    assert served(client.load(tokens)) == [("local", 1_500)]
    assert idle(second)["memory"]["promoted"] == 1
    assert served(client.load(tokens)) == [("memory", 1_500)]
    assert names(stores) == ["alice/chat@1"]


def test_the_end_of_the_agent_writes_down_what_only_memory_has(
    start: Start, stores: tuple[StoreConfig, ...], tmp_path: Path
) -> None:
    """To disk where the repo is out of reach; the next agent brings it there."""
    local = ("--kv-local", str(tmp_path / "nvme"), "--kv-local-bytes", "64MiB")
    agent = serving(start, stores, *local)
    folder, away = hidden(stores)
    folder.rename(away)
    assert Client(stores, agent.socket).push("alice/chat", some_tokens(900)).held == "alice/chat@1"
    assert agent.close() == 0
    away.rename(folder)
    assert names(stores) == []
    idle(serving(start, stores, *local))
    assert names(stores) == ["alice/chat@1"]


def test_a_killed_agents_memory_is_found_and_removed_by_the_next(
    start: Start, stores: tuple[StoreConfig, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Clients go on with the repo meanwhile; both sides of a connector together say it once."""
    first = serving(start, stores)
    client, side = Client(stores, first.socket), Client(stores, first.socket)
    tokens = some_tokens(700)
    client.push("alice/chat", tokens)
    place = place_of(first).parent
    assert os.stat(place).st_mode & 0o777 == 0o700
    assert str(place.parent) in memory_roots()
    other = serving(start, stores)  # one that lives is left alone
    assert place.exists()
    first.kill()
    assert place.exists()
    for one in (client, side, client, side):
        assert served(one.load(tokens)) == [("shared", 700)]
    assert caplog.text.count("tiers are gone") == 1
    second = AgentProcess.start(first.folder, "--kv-repo", stores[0].url, "--kv-memory", "8MiB")
    with second:
        assert not place.exists()
        assert place_of(other).exists()

        def loads_from_memory() -> bool:
            return served(client.load(tokens)) == [("memory", 700)]

        eventually(loads_from_memory, "the new agent's memory is used")
        assert served(side.load(tokens)) == [("memory", 700)]
        assert caplog.text.count("tiers are back") == 1
        assert caplog.text.count("tiers are gone") == 1
        assert second.tiers()["memory"]["promoted"] == 1
        mine = place_of(second).parent
        assert second.close() == 0
        assert not mine.exists()


def test_a_block_that_goes_under_way_comes_from_the_next_tier(start: Start, stores: tuple[StoreConfig, ...]) -> None:
    agent = serving(start, stores)
    client = Client(stores, agent.socket)
    tokens = some_tokens(2_500)
    client.push("alice/chat", tokens)
    chunks = sorted((place_of(agent) / "chunks").glob("*/*"), key=lambda path: path.stat().st_size)

    def evicted() -> None:
        chunks[-1].unlink()

    done = client.load(tokens, evicted)
    assert done.usable == 2_500
    assert [tier for tier, _ in served(done)] == ["memory", "shared"]
    assert sum(tokens for _, tokens in served(done)) == 2_500


@pytest.mark.parametrize(("early", "layer", "usable"), [(False, 1, 1_504), (True, 0, 1_504), (True, 1, 0)])
def test_windows_come_whole_from_one_tier_and_layers_from_the_first_that_gives_one(
    start: Start, stores: tuple[StoreConfig, ...], early: bool, layer: int, usable: int
) -> None:
    """Where a model has windows the next tier gives all of it; where a layer was handed over already, the rest is
    computed.
    """
    agent = serving(start, stores)
    client = Client(stores, agent.socket)
    tokens, meaning = some_tokens(1_504), descriptor(Group("full", (0,), 2, 8, 8), Group("sliding", (1,), 2, 8, 8, 100))
    request = PushSession(stores, "alice/chat", source(meaning, tokens))
    assert client.tiers.push(request, len(tokens) * TOKEN_BYTES).held is not None
    want = Want(meaning, tokens, "alice")
    found = client.tiers.find(want, CTX, session=None, above=0, least=1)
    assert found.prefix is not None
    assert found.tier == "memory"
    tear(agent, layer)
    sinks: list[MemorySink] = []

    def sink() -> KvSink:
        sinks.append(MemorySink())
        return sinks[-1]

    wanted = Wanted(want, found.prefix, found.tier, 0, 1_504, whole=True, early=early)
    done = fill(client.tiers, wanted, sink, CTX, handed=lambda: any(one.ready for one in sinks), batch=1)
    assert done.usable == usable
    assert served(done) == [("memory", 0), ("shared", 1_504)][: 2 if usable else 1]
    for one in sinks:
        one.close()


def tear(agent: AgentProcess, group: int) -> None:
    """A bit of the group's last pack becomes another one, in memory."""
    with (
        Repo.open((StoreConfig(agent.tiers()["memory"]["place"]),), CTX) as repo,
        StoredSession.open(repo, parse_session("alice/chat"), CTX) as stored,
    ):
        ref = stored.ref(stored.manifest.packs_of(group)[-1])
        (member,) = repo.locate(ref.digest)
        data = bytearray(member.store.get(ref.key))
        data[-1] ^= 1
        member.store.put(ref.key, bytes(data))


def test_a_torn_block_in_memory_is_never_handed_over(start: Start, stores: tuple[StoreConfig, ...]) -> None:
    agent = serving(start, stores)
    client = Client(stores, agent.socket)
    tokens = some_tokens(2_500)
    client.push("alice/chat", tokens)
    path = max((place_of(agent) / "chunks").glob("*/*"), key=lambda found: found.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    done = client.load(tokens)
    assert done.usable == 2_500
    assert served(done)[-1][0] == "shared"


def test_tiers_ahead_of_another_repo_are_not_used(
    start: Start, stores: tuple[StoreConfig, ...], tmp_path: Path
) -> None:
    other = file_stores(tmp_path, 1)
    Repo.init(other, ctx=CTX).close()
    agent = serving(start, other)
    idle(agent)
    client = Client(stores, agent.socket)
    pushed = client.push("alice/chat", some_tokens(300))
    assert pushed.report is not None
    assert pushed.held is None
    assert agent.tiers()["memory"]["written"] == 0


def test_a_client_that_dies_gives_its_room_back(start: Start, stores: tuple[StoreConfig, ...]) -> None:
    agent = serving(start, stores, memory="2MiB")
    with agent.client() as client:
        assert client.call("kv_room", tier="memory", bytes=MIB, tokens=100)["granted"]
        assert agent.tiers()["memory"]["reserved_bytes"] > MIB
        with agent.client() as second:
            assert not second.call("kv_room", tier="memory", bytes=MIB, tokens=100)["granted"]
    eventually(lambda: agent.tiers()["memory"]["reserved_bytes"] == 0, "the room is free")


def test_what_cannot_be_is_refused_with_its_reason(
    place: Path, stores: tuple[StoreConfig, ...], tmp_path: Path
) -> None:
    socket = str(place / "a.sock")

    def refused(*arguments: str) -> tuple[int, str]:
        code, error, _ = kvctl("agent", "serve", "--memory", "8MiB", *arguments, socket=socket, state=tmp_path)
        return code, error["message"] if "message" in error else error["what"]

    repo = ("--kv-repo", stores[0].url)
    assert refused("--kv-memory", "9MiB", *repo)[0] == 2
    assert refused(*repo)[0] == 2
    assert refused("--kv-memory", "1MiB")[0] == 2  # no repo behind it
    assert refused("--kv-local", str(tmp_path / "x"), *repo)[0] == 2
    huge = f"{os.statvfs(memory_roots()[0]).f_blocks * os.statvfs(memory_roots()[0]).f_frsize * 2}"
    code, _ = refused("--memory", huge, "--kv-memory", huge, *repo)
    assert code == 9


def test_an_agent_without_kv_says_so(agent: AgentProcess, tmp_path: Path) -> None:
    code, error, _ = kvctl("kv", "tiers", socket=agent.socket, state=tmp_path)
    assert code == 4
    assert "holds no KV" in str(error)


@pytest.mark.s3
def test_a_repo_on_s3_behind_a_keyed_cache(
    start: Start, seaweed_store: Callable[[], StoreConfig], tmp_path: Path
) -> None:
    """The same over SeaweedFS, with block keys under a secret."""
    stores = (seaweed_store(),)
    Repo.init(stores, ctx=CTX).close()
    key = tmp_path / "kv.key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    text = url_of(stores[0])
    agent = start("--kv-repo", text, "--kv-memory", "8MiB", "--kv-key-file", str(key))
    tokens = some_tokens(1_024)
    client = Client(stores, "", bytes.fromhex("ab" * 32))
    assert client.push("alice/chat", tokens).report is not None
    client = Client(stores, agent.socket, bytes.fromhex("ab" * 32))
    assert served(client.load(tokens)) == [("shared", 1_024)]
    assert idle(agent)["memory"]["promoted"] == 1
    assert served(client.load(tokens)) == [("memory", 1_024)]
    other = some_tokens(1_024, 2)
    assert client.push("alice/other", other).held == "alice/other@1"
    assert served(client.load(other)) == [("memory", 1_024)]
    assert agent.tiers()["memory"]["hits"] == 2
