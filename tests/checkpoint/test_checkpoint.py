"""Checkpoints of slots: one generation, committed last, resumable, incremental, one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.agent.load import swap_slot
from kvctl.checkpoint import catalog, names
from kvctl.checkpoint import lock as lock_module
from kvctl.checkpoint.create import CreateRequest, create
from kvctl.checkpoint.lock import Lock
from kvctl.checkpoint.pace import Limits
from kvctl.checkpoint.shards import SlotShards
from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import ConflictError, IntegrityError, NotFoundError, TransientError, UsageError
from kvctl.testing.models import write_llama
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.registry import open_store
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, eventually, kvctl, read_slot, same_files
from tests.checkpoint.making import SHAPE, checkpoint

SLOW = "1500KB"  # a model of 13 MB takes 9 s: time to kill it in the middle, on a busy machine too


@pytest.fixture
def to(tmp_path: Path) -> StoreConfig:
    return parse_store(str(tmp_path / "ck" / "llama"))


def folder(to: StoreConfig, ident: str | None = None) -> Path:
    root = Path(to.url.removeprefix("file://"))
    return root / (ident or (root / "LATEST").read_text().strip())


def is_copy(place: Path, files: dict[str, bytes]) -> bool:
    return all((place / name).read_bytes() == data for name, data in files.items())


def slow(agent: AgentProcess, to: str, state: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvctl", "-o", "json", "checkpoint", "create", "--from", "slot:m", "--to", to,
         "--max-rate", SLOW],
        env={**os.environ, "KVCTL_AGENT_SOCKET": agent.socket, "KVCTL_STATE_DIR": str(state)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """What a test starts and may not live to end itself."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextlib.contextmanager
def frozen(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """What is done meanwhile is done in the middle of it, however long that takes."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def begun(root: Path) -> bool:
    """Whether a checkpoint under this name has noted at least one shard, and none is complete."""
    if any(root.glob(f"*/{names.MANIFEST}")):
        return False
    for path in root.glob(f"*/{names.PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):  # it is replaced by a rename
            if names.parse_partial(path.read_bytes())[2]:
                return True
    return False


def test_a_checkpoint_is_the_folder_bit_for_bit_and_can_be_verified_and_restored(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig, tmp_path: Path
) -> None:
    report = checkpoint(loaded, to)
    assert is_copy(folder(to), model)
    assert report.written == sum(len(data) for name, data in model.items() if name.endswith(".safetensors"))
    found = catalog.ls(to, Context())
    assert [(item["id"], item["latest"]) for item in found["checkpoints"]] == [(report.extra["id"], True)]
    assert found["unfinished"] == []
    assert catalog.verify(to, None, Context()).verified.state == "full"
    catalog.restore(LoadRequest("", into=f"dir:{tmp_path}/back"), to, report.extra["id"], Context())
    assert is_copy(tmp_path / "back", model)
    assert loaded.ls("m")[0]["leases"] == 0


def test_w22_a_swap_in_the_middle_does_not_touch_it_and_latest_moves_last(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig, tmp_path: Path, ended: list[subprocess.Popen[bytes]]
) -> None:
    new = write_llama(str(tmp_path / "n"), SHAPE, shards=12, seed=9)
    running = slow(loaded, to.url, tmp_path)
    ended.append(running)
    eventually(lambda: begun(folder(to, ".")), "the checkpoint has begun")
    with frozen(running):
        swap_slot("m", LoadRequest(str(tmp_path / "n")), Context(), socket=loaded.socket)
        assert same_files(read_slot(loaded, "m"), new)
        assert not (folder(to, "LATEST")).exists()
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert is_copy(folder(to), model)
    assert json.loads(out)["extra"]["generation"].startswith("g1-")
    eventually(lambda: [item["generation"] for item in loaded.ls("m")] == [2], "the old generation is freed")
    checkpoint(loaded, to)
    assert is_copy(folder(to), new)


def test_what_has_not_changed_is_shared_with_the_last_one(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig, tmp_path: Path
) -> None:
    first = checkpoint(loaded, to)
    again = checkpoint(loaded, to)
    assert (again.written, again.extra["shared_bytes"]) == (0, first.written)
    # one shard of twelve changes
    name = "model-00002-of-00012.safetensors"
    other = write_llama(str(tmp_path / "n"), SHAPE, shards=12, seed=9)
    (tmp_path / "m" / name).write_bytes(other[name])
    swap_slot("m", LoadRequest(str(tmp_path / "m")), Context(), socket=loaded.socket)
    third = checkpoint(loaded, to)
    assert third.written == len(model[name])
    assert third.extra["shared_bytes"] == first.written - len(model[name])
    assert is_copy(folder(to), {**model, name: other[name]})
    assert is_copy(folder(to, first.extra["id"]), model)


def test_a_killed_one_is_resumed_and_only_what_is_missing_is_written(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig, tmp_path: Path, ended: list[subprocess.Popen[bytes]]
) -> None:
    running = slow(loaded, to.url, tmp_path)
    ended.append(running)
    eventually(lambda: begun(folder(to, ".")), "the checkpoint has begun")
    running.kill()
    running.wait()
    with pytest.raises(NotFoundError):
        catalog.verify(to, None, Context())
    unfinished = catalog.ls(to, Context())["unfinished"]
    assert len(unfinished) == 1
    report = checkpoint(loaded, to)
    assert report.extra["id"] == unfinished[0]
    assert report.extra["resumed_bytes"] > 0
    assert report.extra["resumed_bytes"] + report.written == report.bytes
    assert is_copy(folder(to), model)
    assert not list(folder(to).glob(".kvctl*"))


def test_ctrl_c_keeps_what_is_written_and_says_how_to_go_on(
    loaded: AgentProcess, to: StoreConfig, tmp_path: Path, ended: list[subprocess.Popen[bytes]]
) -> None:
    for attempt in range(5):
        place = parse_store(f"{to.url}-{attempt}")
        running = slow(loaded, place.url, tmp_path)
        ended.append(running)
        eventually(lambda: begun(folder(place, ".")), "the checkpoint has begun")  # noqa: B023 - used at once
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=120)
        if running.returncode:  # its shards may all have come to their ends at the same time, and so it to its own
            break
    assert running.returncode == 130
    assert "checkpoint create" in json.loads(err.splitlines()[-1])["error"]["hint"]
    assert checkpoint(loaded, place).extra["resumed_bytes"] > 0


def test_the_agents_death_in_the_middle_does_not_harm_it(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig, tmp_path: Path, ended: list[subprocess.Popen[bytes]]
) -> None:
    running = slow(loaded, to.url, tmp_path)
    ended.append(running)
    eventually(lambda: begun(folder(to, ".")), "the checkpoint has begun")
    loaded.kill()
    _, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert is_copy(folder(to), model)


def test_a_second_one_at_the_same_time_is_refused(
    loaded: AgentProcess, to: StoreConfig, tmp_path: Path, ended: list[subprocess.Popen[bytes]]
) -> None:
    running = slow(loaded, to.url, tmp_path)
    ended.append(running)
    eventually(lambda: begun(folder(to, ".")), "the checkpoint has begun")
    with frozen(running):
        with pytest.raises(ConflictError, match="another checkpoint"):
            checkpoint(loaded, to)
        code, error, _ = kvctl(
            "checkpoint", "create", "--from", "slot:m", "--to", to.url, socket=loaded.socket, state=tmp_path
        )
    assert (code, error["code"]) == (6, "conflict")


def test_a_full_disk_is_told_and_leaves_the_last_one_as_it_was(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig, tmp_path: Path
) -> None:
    before = checkpoint(loaded, to)
    write_llama(str(tmp_path / "n"), SHAPE, shards=12, seed=9)
    swap_slot("m", LoadRequest(str(tmp_path / "n")), Context(), socket=loaded.socket)
    # no file may grow beyond two MiB: what a full disk or a quota looks like from inside a write
    code = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))\n"
        "from kvctl.cli.main import run\nsys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "-o", "json", "checkpoint", "create", "--from", "slot:m", "--to", to.url],
        env={**os.environ, "KVCTL_AGENT_SOCKET": loaded.socket, "KVCTL_STATE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 9, done.stderr
    assert folder(to).name == before.extra["id"]
    assert is_copy(folder(to), model)
    assert checkpoint(loaded, to).written > 0


def test_a_store_that_fails_half_way_ends_with_6_and_the_next_run_goes_on(
    loaded: AgentProcess, model: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "node").mkdir()
    impatient = Context(retry=RetryPolicy(base=0.05, cap=0.2, attempts=3, stall_timeout=1.0))
    with NodeProcess.start(str(tmp_path / "node"), keys=False) as node:
        to = node.store("ck/llama")
        data = tmp_path / "node" / "data" / "ck" / "llama"
        failed: list[BaseException] = []

        def run() -> None:
            shards = SlotShards("m", socket=loaded.socket)
            try:
                create(shards, CreateRequest(to, Limits(max_rate=3e6)), impatient)
            except BaseException as error:
                failed.append(error)
            finally:
                shards.close()

        thread = threading.Thread(target=run)
        thread.start()
        eventually(lambda: begun(data), "the checkpoint has begun")
        node.kill()
        thread.join(120)
        assert isinstance(failed[0], TransientError)
        port = node.port
    assert not (data / "LATEST").exists()
    with NodeProcess.start(str(tmp_path / "node"), keys=False, port=port) as node:
        # the lock of the run that failed could not be taken back: it expires, or its process is gone
        with contextlib.closing(open_store(node.store("ck/llama"))) as store:
            store.delete([names.LOCK])
        report = checkpoint(loaded, node.store("ck/llama"))
        assert report.extra["resumed_bytes"] > 0
        assert catalog.verify(node.store("ck/llama"), None, Context()).verified.state == "full"
    assert is_copy(data / report.extra["id"], model)


@pytest.mark.s3
def test_on_s3_it_is_paced_within_objects_and_one_at_a_time(
    loaded: AgentProcess, model: dict[str, bytes], seaweed_store: Callable[[], StoreConfig], tmp_path: Path
) -> None:
    to = seaweed_store()
    shards = SlotShards("m", socket=loaded.socket)
    try:
        report = create(shards, CreateRequest(to, Limits(max_rate=20e6)), Context())
    finally:
        shards.close()
    pacing = report.extra["pacing"]
    assert pacing["mean_rate"] < 25e6
    refused = pytest.raises(ConflictError, match="another checkpoint")
    with contextlib.closing(open_store(to)) as store, Lock.take(store), refused:
        checkpoint(loaded, to)
    again = checkpoint(loaded, to, keep_last=1)
    assert again.extra["removed"] == [report.extra["id"]]
    assert (again.written, again.extra["shared_bytes"], again.extra["copied_bytes"]) == (0, 0, report.written)
    catalog.restore(LoadRequest("", into=f"dir:{tmp_path}/back"), to, None, Context())
    assert is_copy(tmp_path / "back", model)
    assert [item["id"] for item in catalog.ls(to, Context())["checkpoints"]] == [again.extra["id"]]


def test_retention_removes_only_what_kvctl_made(loaded: AgentProcess, to: StoreConfig) -> None:
    first = checkpoint(loaded, to)
    root = folder(to).parent
    foreign = root / "20200101T000000Z-abcdef"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"mine")
    (root / "notes.txt").write_text("keep")
    kept = [checkpoint(loaded, to).extra["id"]]
    report = checkpoint(loaded, to, keep_last=2)
    kept.append(report.extra["id"])
    assert report.extra["removed"] == [first.extra["id"]]
    assert [item["id"] for item in catalog.ls(to, Context())["checkpoints"]] == kept
    assert (foreign / "model.safetensors").read_bytes() == b"mine"
    assert (root / "notes.txt").exists()
    for ident in kept:
        assert catalog.verify(to, ident, Context()).verified.state == "full"


def test_damage_is_found_by_verify_and_refused_by_restore(
    loaded: AgentProcess, to: StoreConfig, tmp_path: Path
) -> None:
    checkpoint(loaded, to)
    place = folder(to)
    weights = place / "model-00003-of-00012.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(IntegrityError, match="tensor"):
        catalog.verify(to, None, Context())
    with pytest.raises(IntegrityError, match="tensor"):
        catalog.restore(LoadRequest("", into=f"dir:{tmp_path}/back"), to, None, Context())
    assert not (tmp_path / "back").exists()
    (place / "config.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"config\.json"):
        catalog.verify(to, None, Context())


def test_the_latest_one_is_removed_by_force_only_and_latest_follows(loaded: AgentProcess, to: StoreConfig) -> None:
    first, second = checkpoint(loaded, to).extra["id"], checkpoint(loaded, to).extra["id"]
    with pytest.raises(UsageError, match="latest"):
        catalog.remove(to, second, Context())
    assert catalog.remove(to, second, Context(), force=True)["latest"] == first
    assert catalog.verify(to, None, Context()).extra["checkpoint"] == first
    catalog.remove(to, first, Context(), force=True)
    assert catalog.ls(to, Context())["checkpoints"] == []
    with pytest.raises(NotFoundError):
        catalog.remove(to, first, Context())


def test_a_lock_is_renewed_while_it_is_held_and_one_that_was_taken_over_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "RENEWALS", 1000)
    with contextlib.closing(open_store(parse_store(str(tmp_path / "x")))) as store:
        with Lock.take(store) as lock:
            first = store.stat(names.LOCK).version
            with pytest.raises(ConflictError, match="another checkpoint"):
                Lock.take(store)
            eventually(lambda: store.stat(names.LOCK).version != first, "it is renewed")
            lock.check()
            store.put(names.LOCK, b"somebody else's")
            eventually(lambda: lock._lost is not None, "the loss is noticed")
            with pytest.raises(ConflictError, match="was lost"):
                lock.check()
        assert store.get(names.LOCK) == b"somebody else's"


def test_a_slots_generation_becomes_the_next_version_of_a_repos_model(loaded: AgentProcess, tmp_path: Path) -> None:
    repo = str(tmp_path / "repo")
    assert kvctl("repo", "init", "-r", repo, socket=loaded.socket, state=tmp_path)[0] == 0
    create_ = ("checkpoint", "create", "--from", "slot:m", "--to", "m", "--format", "repo", "-r", repo)
    code, report, _ = kvctl(*create_, socket=loaded.socket, state=tmp_path)
    assert (code, report["extra"]["new_version"]) == (0, True)
    code, report, _ = kvctl(*create_, socket=loaded.socket, state=tmp_path)
    assert (code, report["extra"]["new_bytes"]) == (0, 0)


def test_a_damaged_checkpoint_hides_no_other_stops_no_new_one_and_can_be_removed(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig
) -> None:
    first, second = checkpoint(loaded, to).extra["id"], checkpoint(loaded, to).extra["id"]
    (folder(to, second) / names.MANIFEST).write_bytes(b"")
    rows = catalog.ls(to, Context())["checkpoints"]
    assert [(row["id"], bool(row["problem"])) for row in rows] == [(first, False), (second, True)]
    third = checkpoint(loaded, to)
    assert any("nothing of" in note for note in third.notes)
    assert is_copy(folder(to), model)
    assert third.extra["id"] > second
    catalog.remove(to, second, Context())
    assert [row["id"] for row in catalog.ls(to, Context())["checkpoints"]] == [first, third.extra["id"]]


def test_names_whose_time_is_none_are_not_ours(loaded: AgentProcess, to: StoreConfig) -> None:
    root = Path(to.url.removeprefix("file://"))
    strange = ["99999999T999999Z-abcdef", "20261301T000000Z-abcdef", "20260230T000000Z-abcdef"]
    for name in strange:
        (root / name).mkdir(parents=True)
        (root / name / names.MANIFEST).write_text("mine")
    checkpoint(loaded, to)
    report = checkpoint(loaded, to, keep_last=1)
    assert [row["id"] for row in catalog.ls(to, Context())["checkpoints"]] == [report.extra["id"]]
    assert all((root / name / names.MANIFEST).exists() for name in strange)


def test_a_place_with_a_question_mark_in_its_name(loaded: AgentProcess, tmp_path: Path) -> None:
    to = parse_store(str(tmp_path / "what?now=1" / "llama"))
    checkpoint(loaded, to)
    assert catalog.verify(to, None, Context()).verified.state == "full"


def test_a_latest_that_is_somebody_elses_is_not_replaced(loaded: AgentProcess, to: StoreConfig) -> None:
    root = Path(to.url.removeprefix("file://"))
    root.mkdir(parents=True)
    (root / names.LATEST).write_text("step_1000")
    with pytest.raises(UsageError, match="names no checkpoint"):
        checkpoint(loaded, to)
    assert [(item.name, item.read_text()) for item in root.iterdir()] == [(names.LATEST, "step_1000")]
    (root / names.LATEST).write_text("")
    checkpoint(loaded, to)
