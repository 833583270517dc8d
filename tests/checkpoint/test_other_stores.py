"""Checkpoints on stores that are no file system: an S3 server, a storage node. What did not change is not sent, what an
earlier run sent is not sent again, one is written at a time, old ones go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.agent.load import swap_slot
from kvctl.checkpoint import catalog, names
from kvctl.checkpoint.lock import Lock
from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import ConflictError, TransientError
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.models import write_llama
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.registry import open_store
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess
from tests.checkpoint.making import SHAPE, checkpoint

WEIGHTS = "*.safetensors"
CHANGED = "model-00002-of-00012.safetensors"
# so patient that something was stored before it gives up, on a busy machine too
IMPATIENT = Context(retry=RetryPolicy(base=0.01, cap=0.02, attempts=3, stall_timeout=3.0))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    with FaultyS3() as running:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", running.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", running.secret_key)
        yield running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    (tmp_path / "node").mkdir()
    with NodeProcess.start(str(tmp_path / "node")) as running:
        yield running


@pytest.fixture(params=["s3", "node"])
def to(request: pytest.FixtureRequest) -> StoreConfig:
    if request.param == "s3":
        server: FaultyS3 = request.getfixturevalue("server")
        return server.store("ck/llama")
    running: NodeProcess = request.getfixturevalue("node")
    return running.store("ck/llama", scope="ck/llama")


def change_one_shard(agent: AgentProcess, tmp_path: Path) -> bytes:
    """The slot's next generation differs in one file of twelve; its bytes."""
    data = write_llama(str(tmp_path / "n"), SHAPE, shards=12, seed=9)[CHANGED]
    (tmp_path / "m" / CHANGED).write_bytes(data)
    swap_slot("m", LoadRequest(str(tmp_path / "m")), Context(), socket=agent.socket)
    return data


def read(to: StoreConfig, ident: str) -> dict[str, bytes]:
    with contextlib.closing(open_store(to)) as store:
        return {info.key.partition("/")[2]: store.get(info.key) for info in store.list(f"{ident}/")}


def holds(to: StoreConfig, ident: str, files: dict[str, bytes]) -> bool:
    found = read(to, ident)
    return all(found[name] == data for name, data in files.items())


def sent(server: FaultyS3) -> list[str]:
    """The weights files whose bytes came in."""
    return [item.key.rpartition("/")[2] for item in server.requests("PUT", WEIGHTS) if item.received]


def test_the_store_itself_makes_what_has_not_changed(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig, tmp_path: Path
) -> None:
    first = checkpoint(loaded, to)
    total = sum(len(data) for name, data in model.items() if name.endswith(".safetensors"))
    assert first.written == first.bytes == total
    data = change_one_shard(loaded, tmp_path)
    second = checkpoint(loaded, to)
    reused = {"s3": "copied_bytes", "node": "shared_bytes"}[to.scheme]
    counts = {key: second.extra[key] for key in ("copied_bytes", "shared_bytes", "resumed_bytes")}
    assert counts == {"copied_bytes": 0, "shared_bytes": 0, "resumed_bytes": 0, reused: total - len(data)}
    assert second.written == len(data)
    third = checkpoint(loaded, to)  # of what was made of others
    assert (third.written, third.extra[reused]) == (0, total)
    for report, files in ((first, model), (second, {**model, CHANGED: data}), (third, {**model, CHANGED: data})):
        assert holds(to, report.extra["id"], files)
        assert catalog.verify(to, report.extra["id"], Context()).verified.state == "full"
    catalog.remove(to, second.extra["id"], Context())
    assert holds(to, third.extra["id"], {**model, CHANGED: data})


def test_an_s3_server_gets_the_changed_bytes_only(loaded: AgentProcess, server: FaultyS3, tmp_path: Path) -> None:
    to = server.store("ck/llama")
    checkpoint(loaded, to)
    assert len(sent(server)) == 12
    server.clear()
    change_one_shard(loaded, tmp_path)
    checkpoint(loaded, to)
    assert sent(server) == [CHANGED]
    assert len(server.requests("PUT", WEIGHTS)) == 12


def test_on_a_node_it_is_another_name_of_the_file(
    loaded: AgentProcess, node: NodeProcess, model: dict[str, bytes]
) -> None:
    to = node.store("ck/llama")
    ids = [checkpoint(loaded, to).extra["id"] for _ in range(2)]
    root = Path(node.data) / "ck" / "llama"
    for name in model:
        if name.endswith(".safetensors"):
            first, second = (os.stat(root / ident / name) for ident in ids)
            assert (first.st_ino, first.st_nlink) == (second.st_ino, 2)


def test_a_server_that_copies_nothing_is_sent_everything_and_that_is_said(
    loaded: AgentProcess, server: FaultyS3
) -> None:
    server.copies = False
    to = server.store("ck/llama")
    first = checkpoint(loaded, to)
    second = checkpoint(loaded, to)
    assert second.written == first.written
    assert sum("could not be reused, it is sent again" in note for note in second.notes) == 12


def test_what_was_changed_behind_our_back_is_not_reused(
    loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig
) -> None:
    first = checkpoint(loaded, to)
    damaged = bytearray(model[CHANGED])
    damaged[-5] ^= 1
    with contextlib.closing(open_store(to)) as store:
        store.put(f"{first.extra['id']}/{CHANGED}", bytes(damaged))
    second = checkpoint(loaded, to)
    assert second.written == len(damaged)
    assert [note for note in second.notes if "it is sent again" in note and CHANGED in note]
    assert holds(to, second.extra["id"], model)


def test_a_file_that_was_edited_in_place_is_not_shared(
    loaded: AgentProcess, model: dict[str, bytes], tmp_path: Path
) -> None:
    to = parse_store(str(tmp_path / "ck" / "llama"))
    path = tmp_path / "ck" / "llama" / checkpoint(loaded, to).extra["id"] / CHANGED
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"!")
    second = checkpoint(loaded, to)
    assert second.written == len(model[CHANGED])
    assert holds(to, second.extra["id"], model)


def test_a_bucket_that_fails_half_way_ends_with_6_and_the_next_run_sends_what_is_missing(
    loaded: AgentProcess, model: dict[str, bytes], server: FaultyS3
) -> None:
    to = server.store("ck/llama")
    server.add(Fault("status", key=WEIGHTS, methods=("PUT",), skip=5))
    with pytest.raises(TransientError) as stopped:
        checkpoint(loaded, to, ctx=IMPATIENT)
    assert stopped.value.exit_code == 6
    assert ("bucket", f"ck/llama/{names.LATEST}") not in server.objects
    (partial,) = [item.data for (_, key), item in server.objects.items() if key.endswith(names.PARTIAL)]
    noted = names.parse_partial(partial)[2]
    assert 1 <= len(noted) <= 5
    server.clear()
    report = checkpoint(loaded, to)
    assert sorted(sent(server)) == sorted(name for name in model if name.endswith(".safetensors") and name not in noted)
    assert report.extra["resumed_bytes"] == sum(entry.size for entry in noted.values())
    assert report.extra["resumed_bytes"] + report.written == report.bytes
    assert holds(to, report.extra["id"], model)


def test_what_a_failed_run_sent_and_somebody_replaced_is_sent_again(
    loaded: AgentProcess, model: dict[str, bytes], server: FaultyS3
) -> None:
    to = server.store("ck/llama")
    server.add(Fault("status", key=WEIGHTS, methods=("PUT",), skip=5))
    with pytest.raises(TransientError):
        checkpoint(loaded, to, ctx=IMPATIENT)
    key, stored = next((key, item) for (_, key), item in server.objects.items() if key.endswith(".safetensors"))
    server.put(key, bytes(len(stored.data)))
    server.clear()
    report = checkpoint(loaded, to)
    assert key.rpartition("/")[2] in sent(server)
    assert holds(to, report.extra["id"], model)


def test_one_at_a_time(loaded: AgentProcess, to: StoreConfig) -> None:
    with contextlib.closing(open_store(to)) as store:
        with Lock.take(store), pytest.raises(ConflictError, match="another checkpoint") as refused:
            checkpoint(loaded, to)
        assert refused.value.exit_code == 6
        assert not [info.key for info in store.list("")]
    checkpoint(loaded, to)


def test_retention_removes_only_what_kvctl_made(loaded: AgentProcess, model: dict[str, bytes], to: StoreConfig) -> None:
    foreign = {"20200101T000000Z-abcdef/model.safetensors": b"mine", "notes.txt": b"keep", "other/x": b"y"}
    with contextlib.closing(open_store(to)) as store:
        for key, data in foreign.items():
            store.put(key, data)
        ids = [checkpoint(loaded, to).extra["id"] for _ in range(3)]
        report = checkpoint(loaded, to, keep_last=2)
        assert report.extra["removed"] == ids[:2]
        assert [item["id"] for item in catalog.ls(to, Context())["checkpoints"]] == [ids[2], report.extra["id"]]
        left = {info.key for info in store.list("")}
        assert {key.partition("/")[0] for key in left} == {
            ids[2], report.extra["id"], names.LATEST, *(key.partition("/")[0] for key in foreign)
        }  # fmt: skip
        assert all(store.get(key) == data for key, data in foreign.items())
    assert holds(to, ids[2], model)  # what the removed ones shared with it stays
    assert catalog.verify(to, None, Context()).verified.state == "full"
