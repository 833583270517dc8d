"""Edges: long names, credentials, unfinished changes of members, stores without conditional put, real kills."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import AuthError, KvctlError, MemberDownError, NotFoundError, StalledError, TransientError
from kvctl.repo import admin, locking, maintain
from kvctl.repo.check import Share, check
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import INTENTS, LOCKS, MODELS, REPO, model_key
from kvctl.repo.leases import lease_manifest
from kvctl.repo.locking import LockingStore
from kvctl.repo.members import AbsentStore
from kvctl.repo.metadata import home_of
from kvctl.repo.repo import Repo
from kvctl.transports.api import Store
from kvctl.transports.mem import MemStore
from kvctl.transports.registry import open_store
from tests.repo.steps import HookedStore
from tests.repo.world import blob, file_stores, mem_stores, push_blobs, read_blobs, skip_time

BLOBS = [blob(f"e{number}", 100) for number in range(5)]


def test_the_longest_names_work_on_file_stores_with_a_member_away(ctx: Context, tmp_path: Path) -> None:
    name, version = "n" * 200, "é" * 33
    key = model_key(name, version)
    configs = file_stores(2, tmp_path)
    with Repo.init(configs, ctx=ctx, replicas=1) as repo:
        push_blobs(repo, name, BLOBS, version=version)
        home = home_of(repo, key).config
    with Repo.open([home], ctx) as repo:
        repo.delete_meta(key)
    with Repo.open(configs, ctx) as repo:
        assert repo.list_meta(MODELS) == []
        run_gc(repo)
        assert check(repo).problems == []


def test_wrong_credentials_say_so(ctx: Context) -> None:
    def opener(config: StoreConfig) -> Store:
        return AbsentStore(config.url, AuthError(f"{config.url}: access denied"))

    configs = mem_stores(2)
    Repo.init(configs, ctx=ctx).close()
    with pytest.raises(AuthError) as caught:
        Repo.open(configs, ctx, opener=opener)
    assert caught.value.exit_code == 5


def test_readers_without_write_permission_read_but_get_no_lease(ctx: Context) -> None:
    def deny(call: str, key: str) -> None:
        if call in {"put", "delete"}:
            raise AuthError(f"{key}: access denied")

    configs = mem_stores(2)
    with Repo.init(configs, ctx=ctx) as repo:
        push_blobs(repo, "m", BLOBS)
    with Repo.open(configs, ctx, opener=lambda config: HookedStore(open_store(config), deny)) as repo:
        assert read_blobs(repo, "m") == BLOBS
        with pytest.raises(AuthError):
            lease_manifest(repo, model_key("m", "1"))


def test_commits_wait_while_a_change_of_members_is_not_everywhere(ctx: Context) -> None:
    configs = mem_stores(3)
    with Repo.init(configs, ctx=ctx, replicas=2) as repo:
        push_blobs(repo, "m", BLOBS)
        newer = repo.format.next()
    open_store(configs[1]).put(REPO, newer.to_bytes())
    with Repo.open(configs, ctx) as repo:
        assert repo.uneven
        assert read_blobs(repo, "m") == BLOBS
        with pytest.raises(TransientError, match="is changing its members"):
            repo.commit_meta("models/n/1.json", b"{}", if_absent=True)
        assert {problem.kind for problem in check(repo).problems} == {"members"}
        maintain.rebalance(repo)
    with Repo.open(configs, ctx) as repo:
        assert not repo.uneven
        repo.commit_meta("models/n/1.json", b"{}", if_absent=True)


def test_a_dry_run_of_a_replacement_tells_what_it_copies_and_what_is_lost(ctx: Context) -> None:
    for replicas, lost in ((2, False), (1, True)):
        configs = mem_stores(3)
        with Repo.init(configs, ctx=ctx, replicas=replicas) as repo:
            push_blobs(repo, "m", [blob(str(number)) for number in range(30)])
        options = admin.RepairOptions(replace=((configs[0].url, mem_stores(1)[0]),), dry_run=True)
        plan = admin.repair_repo(configs[1:], ctx, options).moves[0]
        assert bool(plan.copied.lost) is lost
        assert (plan.copied.objects > 10) is not lost


def test_everything_works_on_stores_without_conditional_put(ctx: Context) -> None:
    configs = [dataclasses.replace(config, options={"conditional_put": "false"}) for config in mem_stores(2)]
    with Repo.init(configs, ctx=ctx, replicas=2, settle=0.001) as repo:
        push_blobs(repo, "m", BLOBS)
        push_blobs(repo, "n", BLOBS[:2])
        repo.delete_meta(model_key("m", "1"))
        assert run_gc(repo, GcOptions(grace=0)).deleted_objects == 6
        assert read_blobs(repo, "n") == BLOBS[:2]
        assert check(repo, read_data=Share()).ok
        assert list(repo.members[0].store.list(LOCKS)) == []


class Hurried:
    """Stands in for `time`: who sleeps is awake at once, and so much later."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def test_the_lock_of_a_dead_writer_expires(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "time", Hurried())
    config = mem_stores(1)[0]
    store = MemStore(config.url.removeprefix("mem://"), conditional_put=False)
    store.put(f"{LOCKS}key/dead", b"")
    with pytest.raises(StalledError, match="no turn to write key"):
        LockingStore(store).put("key", b"x", if_absent=True)
    with pytest.raises(NotFoundError):
        store.stat("key")
    skip_time([config], 61)
    LockingStore(store).put("key", b"x", if_absent=True)
    assert store.get("key") == b"x"
    assert list(store.list(LOCKS)) == []


def test_a_home_that_fails_in_the_middle_names_itself(ctx: Context) -> None:
    configs = mem_stores(2)
    Repo.init(configs, ctx=ctx).close()
    broken: list[str] = []

    def fail(call: str, key: str) -> None:
        if call == "put" and broken:
            raise TransientError("connection reset")

    with Repo.open(configs, ctx, opener=lambda config: HookedStore(open_store(config), fail)) as repo:
        broken.append("now")
        with pytest.raises(MemberDownError, match="which decides on it, does not answer"):
            repo.commit_meta("models/m/1.json", b"{}", if_absent=True)


def test_a_commit_stands_when_the_member_with_its_intent_leaves_right_after_it(ctx: Context) -> None:
    configs = mem_stores(2)
    Repo.init(configs, ctx=ctx).close()
    gone: list[str] = []

    def leave(call: str, key: str) -> None:
        if call == "put" and key.startswith(MODELS):
            gone.append(key)
        if gone and key.startswith(INTENTS):
            raise TransientError("connection refused")

    with Repo.open(configs, ctx, opener=lambda config: HookedStore(open_store(config), leave)) as repo:
        push_blobs(repo, "m", BLOBS)
    with Repo.open(configs, ctx) as repo:
        assert read_blobs(repo, "m") == BLOBS


KILLED = """
import sys
from kvctl.core.addresses import parse_store
from kvctl.core.context import Context
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import model_key
from kvctl.repo.repo import Repo
from tests.repo.world import blob, push_blobs
with Repo.open([parse_store(text) for text in sys.argv[2:]], Context()) as repo:
    print("up", flush=True)
    for number in range(1000):
        push_blobs(repo, "gone", [blob(f"{sys.argv[1]}-{number}-{part}", 3000) for part in range(5)])
        repo.delete_meta(model_key("gone", "1"))
        run_gc(repo, GcOptions(grace=0))
"""


def killed_rounds(ctx: Context, folder: Path, seeds: Sequence[int]) -> None:
    configs = file_stores(2, folder)
    with Repo.init(configs, ctx=ctx, replicas=2) as repo:
        push_blobs(repo, "m", BLOBS)
    for seed in seeds:
        command = [sys.executable, "-c", KILLED, str(seed), *(config.url for config in configs)]
        root = str(Path(__file__).parents[2])
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": root}
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"
            time.sleep(random.Random(seed).uniform(0.0, 0.3))
            child.send_signal(signal.SIGKILL)
        with Repo.open(configs, ctx) as repo:
            assert read_blobs(repo, "m") == BLOBS
            found = check(repo, read_data=Share())
            assert [problem for problem in found.problems if problem.kind != "metadata"] == []
            maintain.repair(repo)  # the lock of the killed run is taken over: its process is gone
            try:
                repo.delete_meta(model_key("gone", "1"))
            except KvctlError as error:
                pytest.fail(str(error))
            run_gc(repo, GcOptions(grace=0))
            left = check(repo)
            assert left.problems == []
            assert {kind: count for kind, count in left.garbage.items() if count} == {}
            assert left.chunks == len(BLOBS)


def test_kill_minus_nine_leaves_nothing_that_gc_does_not_remove(ctx: Context, tmp_path: Path) -> None:
    killed_rounds(ctx, tmp_path, range(4))


@pytest.mark.slow
def test_kill_minus_nine_many_times(ctx: Context, tmp_path: Path) -> None:
    killed_rounds(ctx, tmp_path, range(100, 150))
