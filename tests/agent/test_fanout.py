"""Fan-out: many agents load one model together, and each byte leaves the source once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.agent.fanning import load_with_peers
from kvctl.agent.fanout import Assignment, order
from kvctl.agent.target import SlotOptions, SlotTarget
from kvctl.core.addresses import parse_store
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import UsageError
from kvctl.repo.repo import Repo
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.testing.nodes import NodeProcess
from kvctl.transfer.report import Report
from kvctl.transports.node_auth import MasterKey
from kvctl.weights.load import plan_load, run_load
from kvctl.weights.push import PushRequest, push_weights
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, eventually, read_slot, same_files
from tests.agent.conftest import Start

SHAPE = LlamaShape(layers=6, hidden=1024, inner=2048, vocab=8192)  # 86 MB: a dozen runs

AGENTS = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)


@given(AGENTS, st.integers(1, 60), st.data())
def test_every_run_has_one_reader_and_only_a_dead_agents_runs_move(
    agents: list[str], runs: int, data: st.DataObject
) -> None:
    dead = set(data.draw(st.lists(st.sampled_from(agents), max_size=len(agents) - 1)))
    alive = [agent for agent in agents if agent not in dead]
    views = {agent: Assignment(runs, data.draw(st.permutations(agents)), agent) for agent in agents}
    for run in range(runs):
        before = [agent for agent in agents if views[agent].mine(run, set())]
        after = [agent for agent in alive if views[agent].mine(run, dead)] if alive else []
        assert len(before) == 1
        if alive:
            assert len(after) == 1
            if before[0] not in dead:
                assert after == before


@given(st.integers(3, 8), st.data())
def test_shares_are_equal_and_a_dead_agents_share_is_spread(agents: int, data: st.DataObject) -> None:
    names = [f"host{number}:7781" for number in range(agents)]
    orders = [order(run, names) for run in range(400 * agents)]
    first = [found[0] for found in orders]
    assert {first.count(name) for name in names} == {400}
    dead = data.draw(st.sampled_from(names))
    heirs = [found[1] for found in orders if found[0] == dead]
    assert min(heirs.count(name) for name in names if name != dead) > 400 / agents / 3


UNHURRIED = Context(retry=RetryPolicy(stall_timeout=240.0))
PATIENT = {"timeout": "60", "connect_timeout": "60"}  # a slow machine is no dead peer


def fan(
    agent: AgentProcess, source: str, peers: Sequence[str], *, patience: float = 60.0, patient: bool = True
) -> Report:
    target = SlotTarget("m", SlotOptions(source=source), socket=agent.socket)
    return load_with_peers(
        LoadRequest(source, into="slot:m"), target, peers, UNHURRIED, patience=patience,
        options=PATIENT if patient else None,
    )  # fmt: skip


def test_eight_agents_read_the_source_once_together(start: Start, tmp_path: Path) -> None:
    (tmp_path / "node" / "data").mkdir(parents=True)
    files = write_llama(str(tmp_path / "node" / "data" / "m"), SHAPE, shards=2)
    data = sum(len(blob) for name, blob in files.items() if name.endswith(".safetensors"))
    agents = [start(peers=True) for _ in range(8)]
    peers = [agent.place for agent in agents]
    with NodeProcess.start(str(tmp_path / "node"), keys=False) as node:
        with ThreadPoolExecutor(8) as pool:
            reports = list(pool.map(lambda agent: fan(agent, f"node://{node.address}/m", peers), agents))
        sent = next(value for name, value in node.metrics().items() if "sent" in name)
    shares = [report.extra["fanout"] for report in reports]
    headers = sum(report.metadata_bytes for report in reports)
    side = 8 * sum(len(blob) for name, blob in files.items() if name.endswith(".json"))
    weights = sum(share["source_bytes"] for share in shares)
    assert weights == sum(report.needed for report in reports) / 8
    assert weights <= data
    # the node's own count: the weights once, and each agent's headers and small files
    assert sent <= weights + headers + side + 64 * 1024
    for report, share in zip(reports, shares, strict=True):
        assert share["source_bytes"] + sum(share["peer_bytes"].values()) == report.needed
        assert share["lost_peers"] == []
    for agent in agents:
        assert same_files(read_slot(agent, "m"), files)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_repos_model_is_fanned_out_verified_also_as_slices(start: Start, tmp_path: Path, ranks: int) -> None:
    write_llama(str(tmp_path / "m"), LlamaShape(layers=3, hidden=512, inner=1024), shards=2)
    stores = tuple(parse_store(str(tmp_path / f"store{number}")) for number in range(2))
    Repo.init(list(stores), ctx=Context()).close()
    push_weights(PushRequest(str(tmp_path / "m"), "m", stores), Context())
    agents = [start(peers=True) for _ in range(3)]
    peers = [agent.place for agent in agents]
    request = LoadRequest("m", repo=stores, into="slot:m", tp_size=ranks)

    def load(agent: AgentProcess) -> Report:
        target = SlotTarget("m", SlotOptions(source="m"), socket=agent.socket)
        return load_with_peers(request, target, peers, Context(), patience=60.0, options=PATIENT)

    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(load, agents))
    run_load(replace(request, into=f"dir:{tmp_path}/copy"), Context())
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "copy").glob("*.safetensors")}
    assert len(wanted) == 2
    for agent in agents:
        assert same_files(read_slot(agent, "m"), wanted)
    shares = [report.extra["fanout"] for report in reports]
    alone = run_load(replace(request, into="none"), Context()).fetched
    assert sum(share["source_bytes"] for share in shares) == alone
    assert all(report.verified.state == "leaves" for report in reports)


def loader(agent: AgentProcess, source: str, peers: Sequence[str], state: Path, rate: str) -> subprocess.Popen[bytes]:
    arguments = [part for peer in peers for part in ("--peer", peer)]
    return subprocess.Popen(
        [sys.executable, "-m", "kvctl", "-q", "load-weights", source, "--into", "slot:m", *arguments,
         "--max-rate", rate],
        env={**os.environ, "KVCTL_AGENT_SOCKET": agent.socket, "KVCTL_STATE_DIR": str(state)},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_agent_that_fails_half_way_is_replaced_and_only_what_is_missing_is_read_again(
    start: Start, tmp_path: Path, how: signal.Signals
) -> None:
    files = write_llama(str(tmp_path / "m"), SHAPE, shards=2)
    agents = [start(peers=True) for _ in range(3)]
    peers = [agent.place for agent in agents]
    victim, others = agents[2], agents[:2]
    # slow, so that it dies with part of its share read
    dying = loader(victim, str(tmp_path / "m"), peers, tmp_path, "4MB")
    try:
        with ThreadPoolExecutor(2) as pool:
            running = [
                pool.submit(fan, agent, str(tmp_path / "m"), peers, patience=15.0, patient=how == signal.SIGKILL)
                for agent in others
            ]
            eventually(lambda: any(item["landed_runs"] for item in victim.ls()), "the victim has landed something")
            victim.process.send_signal(how)
            dying.send_signal(how)
            reports = [future.result() for future in running]
    finally:
        dying.kill()
        dying.wait()
        victim.kill()
    for agent in others:
        assert same_files(read_slot(agent, "m"), files)
    model = reports[0].needed
    for report in reports:
        share = report.extra["fanout"]
        assert share["source_bytes"] + sum(share["peer_bytes"].values()) == model
        assert how != signal.SIGKILL or set(share["lost_peers"]) <= {victim.place}
    # the first who notices takes its share, and the other may have it from him before noticing
    assert any(report.extra["fanout"]["lost_peers"] for report in reports)
    if how == signal.SIGKILL:  # one that says nothing may also be a slow one
        assert sum(report.extra["fanout"]["source_bytes"] for report in reports) <= model


def test_a_peer_that_never_comes_is_done_without(start: Start, tmp_path: Path) -> None:
    files = write_llama(str(tmp_path / "m"), shards=2)
    agent = start(peers=True)
    report = fan(agent, str(tmp_path / "m"), [agent.place, "127.0.0.1:1"], patience=0.5)
    assert report.extra["fanout"]["source_bytes"] == report.needed
    assert same_files(read_slot(agent, "m"), files)


def test_a_peer_that_gives_wrong_bytes_is_left_and_told(start: Start, tmp_path: Path) -> None:
    files = write_llama(str(tmp_path / "m"), shards=2)
    good, bad = start(peers=True), start(peers=True)
    plan = plan_load(LoadRequest(str(tmp_path / "m"), into="slot:m"), Context())
    lying = SlotTarget("m", SlotOptions(runs=len(plan.runs)), socket=bad.socket)
    assert not lying.open(plan.outputs, plan.side_files, plan.fingerprint)
    try:
        for run in range(len(plan.runs)):
            lying.share(run, 12345)  # its memory holds zeros
        report = fan(good, str(tmp_path / "m"), [good.place, bad.place], patience=5.0)
    finally:
        lying.close(None)
    share = report.extra["fanout"]
    assert share["lost_peers"] == [bad.place]
    assert share["peer_bytes"] == {}
    assert share["source_bytes"] == report.needed
    assert any("wrong bytes" in note for note in report.notes)
    assert same_files(read_slot(good, "m"), files)


def test_this_hosts_agent_is_recognised_under_another_name_with_a_key_for_its_slot_only(
    start: Start, tmp_path: Path
) -> None:
    files = write_llama(str(tmp_path / "m"))
    master = MasterKey.make()
    (tmp_path / "master.key").write_text(f"{master.text()}\n")
    (tmp_path / "slot.key").write_text(f"{master.scoped('ro', 'm').text()}\n")
    for name in ("master.key", "slot.key"):
        (tmp_path / name).chmod(0o600)
    agent = start("--peers", "127.0.0.1:0", "--key-file", str(tmp_path / "master.key"))
    alias = agent.place.replace("127.0.0.1", "localhost")
    target = SlotTarget("m", SlotOptions(), socket=agent.socket)
    options = {**PATIENT, "key_file": str(tmp_path / "slot.key")}
    report = load_with_peers(
        LoadRequest(str(tmp_path / "m"), into="slot:m"), target, [alias], Context(), options=options
    )
    assert report.extra["fanout"]["me"] == alias
    assert same_files(read_slot(agent, "m"), files)


def test_an_agent_that_is_not_among_the_peers_is_told(start: Start, tmp_path: Path) -> None:
    write_llama(str(tmp_path / "m"))
    agent = start(peers=True)
    with pytest.raises(UsageError, match="not among the peers"):
        fan(agent, str(tmp_path / "m"), ["127.0.0.1:1"])
    assert agent.ls() == []
