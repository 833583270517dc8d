"""Checkpoints into a repo: the same pace as into a folder, and only chunks that are new."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvctl.agent.load import swap_slot
from kvctl.checkpoint import pacing as pacing_module
from kvctl.checkpoint.into_repo import IntoRepo, create_in_repo
from kvctl.checkpoint.latency import Latencies
from kvctl.checkpoint.pace import Limits
from kvctl.checkpoint.pacing import missed
from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.cancel import CancelToken
from kvctl.core.context import Context
from kvctl.core.errors import InterruptedRunError
from kvctl.repo.repo import Repo
from kvctl.testing.models import write_llama
from kvctl.transfer.report import Report
from kvctl.transports.keys import TEMP_SUFFIX
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, kvctl
from tests.checkpoint.making import SHAPE, Told

Stores = tuple[StoreConfig, ...]


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    found = tuple(parse_store(str(tmp_path / f"store{number}")) for number in range(2))
    Repo.init(list(found), replicas=2, ctx=Context()).close()
    return found


@pytest.fixture(autouse=True)
def default_agent(loaded: AgentProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_AGENT_SOCKET", loaded.socket)


def into_repo(stores: Stores, limits: Limits, latencies: Latencies | None = None, ctx: Context | None = None) -> Report:
    request = IntoRepo("m", "llama", stores, limits=limits, baseline_seconds=0.5)
    return create_in_repo(request, ctx or Context(), latencies=latencies)


def is_copy(stores: Stores, model: dict[str, bytes], folder: Path) -> bool:
    run_load(LoadRequest("llama", repo=stores, into=f"dir:{folder}"), Context())
    return all((folder / name).read_bytes() == data for name, data in model.items())


def test_a_rate_holds_for_all_members_together(stores: Stores, model: dict[str, bytes], tmp_path: Path) -> None:
    report = into_repo(stores, Limits(max_rate=20e6))
    pacing = report.extra["pacing"]
    assert (pacing["by"], pacing["max_rate"]) == ("rate alone", 20e6)
    assert pacing["mean_rate"] < 20e6
    assert missed(report) == ""
    assert is_copy(stores, model, tmp_path / "back")


def test_a_missed_budget_and_deadline_are_told_and_the_model_is_whole(
    stores: Stores, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing_module, "WINDOW_SECONDS", 0.1)
    # 26 MB on two members: 3 s at least, and many windows
    limits = Limits(max_rate=8e6, min_rate=6e6, budget=0.001, deadline=1.0)
    report = into_repo(stores, limits, Told(0.01, 0.05))
    pacing = report.extra["pacing"]
    assert (pacing["by"], pacing["baseline_p99_s"]) == ("latency", 0.01)
    assert pacing["backoffs"] > 0
    assert pacing["lowest_rate"] >= 6e6
    assert pacing["highest_rate"] <= 8e6
    assert missed(report) == "p99 was 40.0 ms over the baseline, the budget was 1 ms; the deadline had passed"
    assert is_copy(stores, model, tmp_path / "back")


def test_an_engine_that_feels_nothing_lets_the_rate_rise(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing_module, "WINDOW_SECONDS", 0.1)
    report = into_repo(stores, Limits(max_rate=40e6, min_rate=1e6, budget=0.001), Told(0.01, 0.01))
    pacing = report.extra["pacing"]
    assert pacing["lowest_rate"] == 10e6
    assert pacing["highest_rate"] > 10e6
    assert missed(report) == ""


def test_what_the_repo_has_counts_as_done(
    loaded: AgentProcess, stores: Stores, model: dict[str, bytes], tmp_path: Path
) -> None:
    first = into_repo(stores, Limits())
    assert first.extra["pacing"]["waited_s"] == 0
    name = "model-00002-of-00012.safetensors"
    data = write_llama(str(tmp_path / "n"), SHAPE, shards=12, seed=9)[name]
    (tmp_path / "m" / name).write_bytes(data)
    swap_slot("m", LoadRequest(str(tmp_path / "m")), Context(), socket=loaded.socket)
    second = into_repo(stores, Limits(max_rate=1e9, deadline=600.0))
    assert 0 < second.written < 2 * len(data) + (1 << 16)
    assert missed(second) == ""
    assert is_copy(stores, {**model, name: data}, tmp_path / "back")


def in_all(stores: Stores) -> set[str]:
    """The chunks that every member has whole."""
    folders = [Path(store.url.removeprefix("file://")) for store in stores]
    names = [{path.name for path in folder.glob("chunks/*/*")} for folder in folders]
    return {name for name in set.intersection(*names) if not name.endswith(TEMP_SUFFIX)}


def test_stopped_in_the_middle_it_goes_on_where_it_was(
    stores: Stores, model: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing_module, "WINDOW_SECONDS", 0.1)
    whole = sum(len(data) for data in model.values())
    cancel = CancelToken()

    class Stopping(Told):
        def take(self) -> Sequence[float]:
            if not self.baseline and in_all(stores):
                cancel.request(2)
            return super().take()

    with pytest.raises(InterruptedRunError):
        into_repo(
            stores, Limits(max_rate=8e6, min_rate=8e6, budget=0.001), Stopping(0.01, 0.01), Context(cancel=cancel)
        )
    report = into_repo(stores, Limits())
    assert report.extra["shared_chunks"] > 0
    assert report.written < 2 * whole
    assert is_copy(stores, model, tmp_path / "back")


def test_on_the_command_line_a_missed_deadline_is_3(loaded: AgentProcess, stores: Stores, tmp_path: Path) -> None:
    repo = ",".join(store.url.removeprefix("file://") for store in stores)
    arguments = ("--format", "repo", "-r", repo, "--max-rate", "8MB", "--deadline", "1s")
    code, error, _ = kvctl(
        "checkpoint", "create", "--from", "slot:m", "--to", "llama", *arguments, socket=loaded.socket, state=tmp_path
    )
    assert (code, error["cause"]) == (3, "the deadline had passed")
