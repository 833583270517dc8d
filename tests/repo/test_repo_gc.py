"""What gc frees, when, and what keeps it from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import ConflictError, IntegrityError, KvctlError, MemberDownError, NotFoundError
from kvctl.repo import maintain
from kvctl.repo.check import check
from kvctl.repo.chunks import digest_of
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import INTENTS, MODELS, model_key
from kvctl.repo.leases import lease_manifest
from kvctl.repo.marking import list_chunks
from kvctl.repo.metadata import home_of
from kvctl.repo.owner import Owner
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transports.registry import open_store
from tests.repo.world import BLOBS, HOUR, OTHER, filled, manifest_of, mem_stores, push_blobs, read_blobs, skip_time


def test_gc_waits_for_the_grace_period_and_then_frees(ctx: Context) -> None:
    configs = mem_stores(3)
    filled(configs, ctx)
    with Repo.open(configs, ctx) as repo:
        repo.delete_meta(model_key("m", "1"))
        first = run_gc(repo)
        assert (first.condemned, first.pending, first.deleted_objects, first.live) == (3, 3, 0, 5)
        skip_time(configs, 23 * HOUR)
        assert run_gc(repo).deleted_objects == 0
        skip_time(configs, 2 * HOUR)
        done = run_gc(repo)
        assert (done.deleted_objects, done.deleted_bytes, done.pending) == (6, 2 * sum(map(len, BLOBS[3:])), 0)
        assert read_blobs(repo, "other") == OTHER
        assert push_blobs(repo, "m", BLOBS, version="2") == 6


def test_a_condemned_chunk_is_written_anew(ctx: Context) -> None:
    configs = mem_stores(2)
    with Repo.init(configs, ctx=ctx) as repo:
        push_blobs(repo, "m", BLOBS)
        repo.delete_meta(model_key("m", "1"))
        run_gc(repo)
        assert push_blobs(repo, "m", BLOBS, version="2") == 6
        skip_time(configs, 25 * HOUR)
        assert run_gc(repo).deleted_objects == 6
        assert read_blobs(repo, "m", "2") == BLOBS


def test_gc_budgets_and_dry_run(ctx: Context) -> None:
    configs = mem_stores(1)
    with Repo.init(configs, ctx=ctx) as repo:
        push_blobs(repo, "m", BLOBS)
        repo.delete_meta(model_key("m", "1"))
        assert run_gc(repo, GcOptions(grace=0, dry_run=True)).condemned == 6
        assert len(list_chunks(repo)) == 6
        part = run_gc(repo, GcOptions(grace=0, max_deletes=4))
        assert (part.deleted_objects, part.complete) == (3, False)
        assert run_gc(repo, GcOptions(grace=0, max_seconds=0.0)).complete is False
        rest = run_gc(repo, GcOptions(grace=0))
        assert (rest.deleted_objects, rest.complete) == (3, True)


def test_gc_refuses_without_all_members_and_beside_other_maintenance(ctx: Context) -> None:
    configs = mem_stores(2)
    Repo.init(configs, ctx=ctx).close()
    with Repo.open(configs, ctx) as repo, Owner.take(repo, "repair"):
        with pytest.raises(ConflictError, match="repair is running on this repo"):
            run_gc(repo)
        skip_time(configs, HOUR)
        run_gc(repo)
    with Repo.open(configs[:1], ctx) as repo, pytest.raises(MemberDownError, match="needs all members"):
        run_gc(repo)


def test_gc_deletes_nothing_when_a_manifest_cannot_be_read(ctx: Context) -> None:
    with Repo.init(mem_stores(1), ctx=ctx) as repo:
        push_blobs(repo, "m", BLOBS)
        repo.members[0].store.put("models/broken/1.json", b"<html>")
        with pytest.raises(IntegrityError, match=r"models/broken/1\.json"):
            run_gc(repo, GcOptions(grace=0))
        assert len(list_chunks(repo)) == 6
        assert [problem.kind for problem in check(repo).problems] == ["manifest"]


def test_a_lease_keeps_the_chunks_of_a_deleted_model(ctx: Context) -> None:
    configs = mem_stores(2)
    filled(configs, ctx)
    with Repo.open(configs, ctx) as repo:
        held, _ = lease_manifest(repo, model_key("m", "1"))
        repo.delete_meta(model_key("m", "1"))
        assert run_gc(repo, GcOptions(grace=0)).deleted_objects == 0
        held.check_open()
        held.release()
        assert run_gc(repo, GcOptions(grace=0)).deleted_objects == 6
        with pytest.raises(NotFoundError):
            lease_manifest(repo, model_key("m", "1"))


def test_gc_finishes_a_deletion_that_a_member_missed(ctx: Context) -> None:
    configs = mem_stores(3)
    filled(configs, ctx)
    key = model_key("m", "1")
    with Repo.open(configs, ctx) as repo:
        home = home_of(repo, key)
    away = next(config for config in configs if config != home.config)
    with Repo.open([config for config in configs if config != away], ctx) as repo:
        repo.delete_meta(key)
    with Repo.open(configs, ctx) as repo:
        assert maintain.repair(repo).metadata.restored == []
        assert repo.list_meta(MODELS)[0].key == model_key("other", "1")
        result = run_gc(repo, GcOptions(grace=0))
        assert result.deleted_objects == 6
        for config in configs:
            assert [item.key for item in open_store(config).list(MODELS)] == [model_key("other", "1")]
            assert list(open_store(config).list("gc/tombstones/")) == []
        assert push_blobs(repo, "m", BLOBS) == 6


def test_an_expired_push_cannot_commit(ctx: Context) -> None:
    configs = mem_stores(1)
    with Repo.init(configs, ctx=ctx) as repo, Push.begin(repo, "slow") as push:
        ref = push.new(digest_of(b"abcd"), 4)
        repo.members[0].store.put(ref.key, b"abcd")
        skip_time(configs, 7 * HOUR)
        run_gc(repo)
        with pytest.raises(KvctlError, match="condemned 1 of the 1 chunks") as caught:
            push.commit(model_key("m", "1"), manifest_of([ref]))
        assert caught.value.exit_code == 6
        assert repo.list_meta(MODELS) == []


def test_gc_sweeps_temp_files_and_the_intents_of_dead_processes(ctx: Context, tmp_path: Path) -> None:
    config = StoreConfig(f"file://{tmp_path}")
    with Repo.init([config], ctx=ctx) as repo:
        push = Push.begin(repo, "dies")
        ref = push.new(digest_of(b"abcd"), 4)
        repo.members[0].store.put(ref.key, b"abcd")
        key = next(item.key for item in repo.members[0].store.list(INTENTS) if item.key.count("/") == 2)
        text = repo.members[0].store.get(key)
        temp = tmp_path / "chunks" / "half.1.kvctl-tmp"
        temp.write_bytes(b"ab")
        beside = tmp_path / "others" / "half.1.kvctl-tmp"  # somebody's who keeps files beside the repo
        beside.parent.mkdir()
        beside.write_bytes(b"ab")
        kept = run_gc(repo, GcOptions(grace=0))
        assert (kept.holds, kept.swept_uploads, kept.deleted_objects) == (1, 0, 0)
        place, _, pid_and_start = push_owner(text).rpartition(":")
        dead = text.replace(pid_and_start.encode(), b"1")
        repo.members[0].store.put(key, dead)
        assert place
        gone = run_gc(repo, GcOptions(grace=0))
        assert (gone.holds, gone.swept_uploads, gone.deleted_objects) == (0, 1, 1)
        assert not temp.exists()
        assert beside.exists()
        assert check(repo).garbage["uploads"] == 0


def push_owner(text: bytes) -> str:
    return str(json.loads(text)["owner"])
