"""The repo's members change while a load runs: what moved is looked up again, and the load ends right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvctl.core.events import NullProgress
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest
from tests.cases.world import files_of, folders, kvctl, make_repo, push, quick

SHAPE = LlamaShape(layers=2, hidden=256, heads=4, kv_heads=4, head_dim=64, inner=704, vocab=1024)


class DrainsOnce(NullProgress):
    """When the load begins to move bytes (its plan is made), somebody drains a member."""

    def __init__(self, stores: str, member: str) -> None:
        self.stores = stores
        self.member: str | None = member

    def begin(self, label: str, total_bytes: int | None) -> None:
        member, self.member = self.member, None
        if member is not None:
            done = kvctl("repo", "drain", member, "-r", self.stores, "-y")
            assert done.code == 0, done.err


def test_chunks_that_a_drain_took_elsewhere_are_found_there(tmp_path: Path) -> None:
    files = write_llama("model", SHAPE, shards=2)
    stores = folders(tmp_path, "a", "b", "c")
    make_repo(stores, stripe=256 * 1024)
    push("model", stores)
    # a path names a member, as it names a store
    progress = DrainsOnce(",".join(str(tmp_path / name) for name in "abc"), str(tmp_path / "b"))
    request = LoadRequest("m", repo=tuple(stores), into="dir:out")
    report = run_load(request, dataclasses.replace(quick(), progress=progress))
    assert files_of(tmp_path / "out") == files
    assert any("changed while loading" in note for note in report.notes), report.notes
    assert report.verified.state == "leaves"


def test_a_chunk_that_is_gone_for_good_is_not_looked_for_twice(tmp_path: Path) -> None:
    write_llama("model", SHAPE, shards=1)
    stores = folders(tmp_path, "a")
    make_repo(stores, stripe=256 * 1024)
    push("model", stores)
    victim = max(
        (item for item in (tmp_path / "a" / "chunks").rglob("*") if item.is_file()), key=lambda it: it.stat().st_size
    )
    victim.unlink()
    done = kvctl("load-weights", "m", "-r", tmp_path / "a", "--into", "dir:out", "-o", "json")
    assert done.code in {4, 7}, done.err
    assert victim.name in done.error["what"]
    assert not (tmp_path / "out").exists()
