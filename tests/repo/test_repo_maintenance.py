"""check, status, stats, gc, repair, replace, rebalance, drain: what they do, and that a run which dies at any store
call leaves the old or the new state, and running it again finishes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    ConfigError,
    ConflictError,
    IntegrityError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    PartialError,
)
from kvctl.repo import admin, maintain
from kvctl.repo.check import Share, check
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import INTENTS, MEMBER, MODELS, REPO, model_key
from kvctl.repo.leases import lease_manifest
from kvctl.repo.marking import list_chunks
from kvctl.repo.metadata import home_of
from kvctl.repo.owner import Owner
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.repo.status import stats, status
from kvctl.transports.mem import space
from kvctl.transports.registry import open_store
from tests.repo.crashes import Died, Life, lives
from tests.repo.world import Stores, blob, manifest_of, mem_stores, push_blobs, read_blobs, skip_time

HOUR = 3600.0
BLOBS = [blob(f"m{number}", 50 + number) for number in range(6)]
OTHER = [*BLOBS[:3], *(blob(f"o{number}", 60) for number in range(2))]


def filled(configs: list[StoreConfig], ctx: Context, *, replicas: int = 2) -> None:
    with Repo.init(configs, ctx=ctx, replicas=replicas) as repo:
        push_blobs(repo, "m", BLOBS)
        push_blobs(repo, "other", OTHER)


def assert_good(configs: list[StoreConfig], ctx: Context, *, members: int, replicas: int = 2) -> None:
    """Everything is readable, complete, where it belongs and nowhere else."""
    with Repo.open(configs, ctx) as repo:
        assert read_blobs(repo, "m") == BLOBS
        assert read_blobs(repo, "other") == OTHER
        result = check(repo, read_data=Share())
        assert result.problems == []
        assert result.garbage["misplaced"] == 0
        assert len(repo.members) == members
        assert repo.format.settled
        assert all(len(c.sizes) >= min(replicas, members) for c in list_chunks(repo).values())


def assert_readable(configs: list[StoreConfig], ctx: Context) -> None:
    with Repo.open(configs, ctx, allow_extras=True) as repo:
        assert read_blobs(repo, "m") == BLOBS
        assert read_blobs(repo, "other") == OTHER


def wipe(config: StoreConfig) -> None:
    space(config.url.removeprefix("mem://")).objects.clear()


# what each command does


def test_a_second_push_writes_nothing_and_a_changed_one_only_its_difference(stores: Stores, ctx: Context) -> None:
    with Repo.init(stores(3), ctx=ctx, replicas=2) as repo:
        assert push_blobs(repo, "m", BLOBS) == 12
        assert push_blobs(repo, "again", BLOBS) == 0
        assert push_blobs(repo, "other", OTHER) == 4
        found = stats(repo)
        assert (found.models, found.versions, found.manifests, found.chunks, found.objects) == (3, 3, 3, 8, 16)
        assert found.logical == 2 * sum(map(len, BLOBS)) + sum(map(len, OTHER))
        assert found.unique == sum(map(len, {*BLOBS, *OTHER}))
        assert found.physical == 2 * found.unique
        assert found.garbage == 0


def test_many_digests_are_found_by_one_list_per_member(ctx: Context) -> None:
    configs = mem_stores(3)
    blobs = [blob(str(number), 10) for number in range(100)]
    with Repo.init(configs, ctx=ctx, replicas=2) as repo:
        assert push_blobs(repo, "m", blobs) == 200
    life = Life(10**9, after=False)
    with Repo.open(configs, ctx, opener=life.opener, workers=1) as repo:
        before = life.calls
        with Push.begin(repo, "n") as push:
            assert len(push.find({digest_of(data): len(data) for data in blobs})) == 100
            listed = life.calls
            assert listed - before <= 3 + 5
            assert len(push.find({digest_of(data): len(data) for data in blobs[:40]})) == 40
            assert life.calls - listed == 1
            fresh = push.new("0" * 64, 4)
            assert push.new("0" * 64, 4) == fresh
            assert push.find({"0" * 64: 4}) == {}
            for member in push.targets(fresh):
                push.placed(fresh, member)
            assert push.find({"0" * 64: 4}) == {"0" * 64: fresh}


def test_a_half_written_replica_is_completed_not_written_anew(ctx: Context) -> None:
    configs = mem_stores(2)
    data = blob("x")
    with Repo.init(configs, ctx=ctx, replicas=2) as repo:
        push = Push.begin(repo, "dies")
        ref = push.new(digest_of(data), len(data))
        push.targets(ref)[0].store.put(ref.key, data)
        with Push.begin(repo, "again") as second:
            assert second.find({ref.digest: ref.size}) == {}
            assert second.new(ref.digest, ref.size) == ref
            assert [member.id for member in second.targets(ref)] == [repo.places(ref.digest)[1].id]


def test_a_chunk_of_the_wrong_size_does_not_count(ctx: Context) -> None:
    with Repo.init(mem_stores(1), ctx=ctx) as repo:
        ref = ChunkRef.fresh(digest_of(b"abcd"), 4)
        repo.members[0].store.put(ref.key, b"abc")
        with Push.begin(repo, "m") as push:
            assert push.find({ref.digest: 4}) == {}
            assert push.new(ref.digest, 4) != ref


def test_a_manifest_is_refused_when_its_chunks_are_not_there_or_not_declared(ctx: Context) -> None:
    with Repo.init(mem_stores(2), ctx=ctx, replicas=2) as repo, Push.begin(repo, "m") as push:
        ref = push.new(digest_of(b"abcd"), 4)
        with pytest.raises(IntegrityError, match="is not whole on member") as caught:
            push.commit(model_key("m", "1"), manifest_of([ref]))
        assert caught.value.cause == "it is missing"
        for member in push.targets(ref):
            member.store.put(ref.key, b"abc")
        with pytest.raises(IntegrityError, match="is not whole") as caught:
            push.commit(model_key("m", "1"), manifest_of([ref]))
        assert caught.value.cause == "3 bytes, expected 4"
        with pytest.raises(IntegrityError, match="neither found nor wrote"):
            push.commit(model_key("m", "1"), manifest_of([ChunkRef.fresh("0" * 64, 1)]))
        assert repo.list_meta(MODELS) == []


def test_pushing_needs_all_places_unless_it_may_be_degraded(ctx: Context) -> None:
    configs = mem_stores(2)
    Repo.init(configs, ctx=ctx, replicas=2).close()
    saved = dict(space(configs[1].url[6:]).objects)
    wipe(configs[1])
    with Repo.open(configs, ctx) as repo:
        with pytest.raises(MemberDownError, match="cannot write all replicas"):
            push_blobs(repo, "m", BLOBS)
        versions = [str(n) for n in range(50) if _home_up(repo, model_key("m", str(n)))]
        assert push_blobs(repo, "m", BLOBS, version=versions[0], degraded=True) == 6
    space(configs[1].url[6:]).objects.update(saved)
    with Repo.open(configs, ctx) as repo:
        assert status(repo).degraded == [f"m@{versions[0]}"]
        result = maintain.repair(repo)
        assert (result.copied.objects, result.metadata.copies) == (6, 1)
        assert check(repo, read_data=Share()).ok


def _home_up(repo: Repo, key: str) -> bool:
    return home_of(repo, key).down is None


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


def test_status_names_what_is_at_risk_and_what_cannot_be_read(ctx: Context) -> None:
    configs = mem_stores(3)
    filled(configs, ctx)
    # ids are random, and so is which chunks lose a copy
    with Repo.open(configs, ctx) as repo:
        homes = {name: [{place.index for place in repo.places(digest_of(data))} for data in blobs]
                 for name, blobs in (("m@1", BLOBS), ("other@1", OTHER))}  # fmt: skip
    assert admin.repo_status(configs, ctx).healthy
    two = admin.repo_status(configs[:2], ctx)
    assert not two.healthy
    assert two.unreadable == []
    assert two.degraded == [name for name, homed in homes.items() if any(2 in places for places in homed)]
    chunks = homes["m@1"] + homes["other@1"][3:]
    assert two.at_risk_chunks == sum(2 in places for places in chunks)
    assert [member.up for member in two.members] == [True, True, False]
    one = admin.repo_status(configs[:1], ctx)
    assert one.unreadable == [name for name, homed in homes.items() if any(0 not in places for places in homed)]
    assert one.lost_chunks == sum(0 not in places for places in chunks)
    assert one.to_json()["schema"] == "kvctl.repo-status/1"


def test_check_and_repair_mend_everything_that_has_a_good_copy(stores: Stores, ctx: Context) -> None:
    configs = stores(3)
    filled(configs, ctx)
    with Repo.open(configs, ctx) as repo:
        chunks = sorted(list_chunks(repo).values(), key=lambda chunk: chunk.name)
        holders = [[repo.member(item) for item in sorted(chunk.sizes)] for chunk in chunks]
        keys = [f"chunks/{chunk.name[:2]}/{chunk.name}" for chunk in chunks]
        holders[0][0].store.delete([keys[0]])
        holders[1][0].store.put(keys[1], b"short")
        good = holders[2][0].store.get(keys[2])
        holders[2][0].store.put(keys[2], bytes(len(good)))
        repo.members[0].store.delete([model_key("m", "1")])
        quick = check(repo)
        kinds = sorted(problem.kind for problem in quick.problems)
        assert kinds == ["metadata", "replicas", "size"]
        full = check(repo, read_data=Share())
        assert sorted(problem.kind for problem in full.problems) == [
            "corrupt",
            "corrupt",
            "metadata",
            "replicas",
            "size",
        ]
        assert full.read_objects == 15
        with pytest.raises(IntegrityError, match="the check found"):
            admin.require_ok(full)
        plan = maintain.repair(repo, read_data=Share(), dry_run=True)
        assert (plan.copied.objects, plan.metadata.copies + len(plan.metadata.restored) >= 1) == (3, True)
        result = maintain.repair(repo, read_data=Share())
        assert (result.copied.objects, len(result.corrupt), result.copied.lost) == (3, 2, [])
    assert_good(configs, ctx, members=3)


def test_repair_says_what_is_lost(ctx: Context) -> None:
    with Repo.init(mem_stores(2), ctx=ctx) as repo:
        push_blobs(repo, "m", BLOBS)
        chunk = next(iter(list_chunks(repo).values()))
        repo.member(next(iter(chunk.sizes))).store.delete([f"chunks/{chunk.name[:2]}/{chunk.name}"])
        result = maintain.repair(repo)
        assert result.copied.lost == [chunk.name]
        found = check(repo)
        assert [(p.kind, p.hurts) for p in found.problems] == [("missing", (model_key("m", "1"),))]
        assert found.damaged


def test_check_ok_and_partial(ctx: Context) -> None:
    configs = mem_stores(2)
    filled(configs, ctx)
    admin.require_ok(admin.check_repo(configs, ctx))
    with Repo.open(configs, ctx) as repo:
        repo.members[0].store.delete([model_key("m", "1")])
    with pytest.raises(PartialError):
        admin.require_ok(admin.check_repo(configs, ctx))


def test_a_store_is_added_and_gets_its_share_and_can_be_drained_again(stores: Stores, ctx: Context) -> None:
    configs = stores(4)
    filled(configs[:3], ctx)
    moved = admin.rebalance_repo(configs, ctx).move
    assert moved.epoch == 2
    with Repo.open(configs, ctx) as repo:  # ids are random, and so is what goes to the fourth
        chunks = {digest_of(data) for data in (*BLOBS, *OTHER)}
        share = sum(any(place.index == 3 for place in repo.places(digest)) for digest in chunks)
    assert moved.copied.objects == moved.removed.objects == share
    assert_good(configs, ctx, members=4)
    again = admin.rebalance_repo(configs, ctx).move
    assert (again.epoch, again.copied.objects, again.removed.objects) == (2, 0, 0)
    admin.drain_member(configs, ctx, configs[3].url)
    assert_good(configs[:3], ctx, members=3)
    assert list(open_store(configs[3]).list("")) == []
    with pytest.raises(ConfigError, match="is not a member"):
        Repo.open(configs, ctx)


def test_drain_refuses_when_too_few_are_left_or_readers_hold_on_to_it(ctx: Context) -> None:
    configs = mem_stores(3)
    filled(configs, ctx)
    with Repo.open(configs, ctx) as repo:
        held, _ = lease_manifest(repo, model_key("m", "1"))
        with pytest.raises(ConflictError, match="readers or writers have their leases on it"):
            maintain.drain(repo, held.member.name)
        held.release()
        with pytest.raises(NotFoundError, match="has no member 'nobody'"):
            maintain.drain(repo, "nobody")
        maintain.drain(repo, held.member.name)
        with pytest.raises(ConfigError, match="too few for 2 replicas"):
            maintain.drain(repo, repo.members[0].name)


def test_a_dead_member_is_replaced_and_cannot_come_back(ctx: Context) -> None:
    configs = mem_stores(3)
    filled(configs, ctx)
    new = mem_stores(1)[0]
    for dead in range(3):
        saved = dict(space(configs[dead].url[6:]).objects)
        wipe(configs[dead])
        report = admin.repair_repo(configs, ctx, admin.RepairOptions(replace=((configs[dead].url, new),)))
        assert report.moves[0].copied.lost == []
        after = [new if number == dead else config for number, config in enumerate(configs)]
        assert_good(after, ctx, members=3)
        space(configs[dead].url[6:]).objects.update(saved)
        with pytest.raises(ConfigError, match="replaced or drained"):
            Repo.open([*after, configs[dead]], ctx)
        with pytest.raises(ConfigError, match="replaced or drained"):
            Repo.open(configs, ctx)
        configs, new = after, mem_stores(1)[0]


def test_an_emptied_store_can_take_its_own_place_again(stores: Stores, ctx: Context) -> None:
    configs = stores(3)
    filled(configs, ctx)
    emptied = open_store(configs[1])
    emptied.delete([item.key for item in emptied.list("")])
    admin.repair_repo(configs, ctx, admin.RepairOptions(replace=((configs[1].url, configs[1]),)))
    assert_good(configs, ctx, members=3)


def test_a_client_with_the_view_from_before_a_replacement_cannot_commit_at_the_dead_member(ctx: Context) -> None:
    configs = mem_stores(3)
    filled(configs, ctx)
    keys = [f"state/test/{number}.json" for number in range(40)]
    with Repo.open(configs, ctx) as old:
        new = mem_stores(1)[0]
        with Repo.open([c for c in configs if c != configs[0]], ctx) as repo:
            maintain.replace_member(repo, configs[0].url, new)
        with Repo.open([new, *configs[1:]], ctx) as repo:
            for key in keys:
                repo.commit_meta(key, b'{"who": "new"}', if_absent=True)
        for key in keys:
            with pytest.raises(KvctlError) as caught:
                old.commit_meta(key, b'{"who": "old"}', if_absent=True)
            assert caught.value.exit_code == 6
    with Repo.open([new, *configs[1:]], ctx) as repo:
        assert {repo.read_meta(key) for key in keys} == {b'{"who": "new"}'}


def test_replacing_needs_the_others(ctx: Context) -> None:
    configs = mem_stores(3)
    filled(configs, ctx)
    with Repo.open(configs[:1], ctx) as repo, pytest.raises(MemberDownError, match="is down as well"):
        maintain.replace_member(repo, configs[1].url, mem_stores(1)[0])


# dying at every store call (every 9th in the quick form)

STRIDES = pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])


def die_everywhere(
    ctx: Context,
    make: Callable[[], list[StoreConfig]],
    act: Callable[[list[StoreConfig], Life], None],
    look: Callable[[list[StoreConfig]], None],
    done: Callable[[list[StoreConfig]], None],
    stride: int,
) -> None:
    """For each call: a fresh world, a run that dies there, a look, the run again, and the end state."""
    count = 0
    for life in lives(stride=stride):
        configs = make()
        with contextlib.suppress(Died):
            act(configs, life)
        if life.dead:
            look(configs)
            skip_time(configs, 7 * HOUR)  # the dead run's lock and claims expire
            act(configs, Life(10**9, after=False))
        done(configs)
        count += 1
    assert count > 20 // stride


@STRIDES
def test_init_dies_anywhere(ctx: Context, stride: int) -> None:
    def act(configs: list[StoreConfig], life: Life) -> None:
        with contextlib.suppress(KvctlError):  # it was complete already
            Repo.init(configs, ctx=ctx, replicas=2, opener=life.opener).close()

    def done(configs: list[StoreConfig]) -> None:
        with Repo.open(configs, ctx) as repo:
            assert len(repo.up) == 3
            assert not repo.uneven
            push_blobs(repo, "m", BLOBS)
            assert check(repo).ok

    # every store is looked at on its own thread: the calls before the first write come in any order
    die_everywhere(ctx, lambda: mem_stores(3), act, lambda _: None, done, stride)


@STRIDES
def test_a_push_dies_anywhere(ctx: Context, stride: int) -> None:
    def make() -> list[StoreConfig]:
        configs = mem_stores(2)
        with Repo.init(configs, ctx=ctx, replicas=2) as repo:
            push_blobs(repo, "other", OTHER)
        return configs

    def act(configs: list[StoreConfig], life: Life) -> None:
        with Repo.open(configs, ctx, opener=life.opener, workers=1) as repo:
            try:
                push_blobs(repo, "m", BLOBS)
            except ConflictError:
                assert read_blobs(repo, "m") == BLOBS  # the run that died had committed

    def look(configs: list[StoreConfig]) -> None:
        with Repo.open(configs, ctx) as repo:
            assert read_blobs(repo, "other") == OTHER
            assert [p for p in check(repo).problems if p.kind != "metadata"] == []
            with contextlib.suppress(NotFoundError):
                assert read_blobs(repo, "m") == BLOBS

    def done(configs: list[StoreConfig]) -> None:
        skip_time(configs, 7 * HOUR)
        with Repo.open(configs, ctx) as repo:
            run_gc(repo, GcOptions(grace=0))
            maintain.repair(repo)
            assert len(list_chunks(repo)) == 8
        assert_good(configs, ctx, members=2)

    die_everywhere(ctx, make, act, look, done, stride)


@STRIDES
def test_gc_dies_anywhere(ctx: Context, stride: int) -> None:
    def make() -> list[StoreConfig]:
        configs = mem_stores(2)
        filled(configs, ctx)
        with Repo.open(configs, ctx) as repo:
            push_blobs(repo, "gone", [blob("gone1"), blob("gone2"), BLOBS[0]])
            repo.delete_meta(model_key("gone", "1"))
        return configs

    def act(configs: list[StoreConfig], life: Life) -> None:
        with Repo.open(configs, ctx, opener=life.opener, workers=1) as repo:
            run_gc(repo, GcOptions(grace=0))

    def done(configs: list[StoreConfig]) -> None:
        assert_good(configs, ctx, members=2)
        with Repo.open(configs, ctx) as repo:
            assert len(list_chunks(repo)) == 8
            assert check(repo).garbage["condemned"] == 0

    die_everywhere(ctx, make, act, lambda c: assert_readable(c, ctx), done, stride)


@STRIDES
def test_repair_dies_anywhere(ctx: Context, stride: int) -> None:
    def make() -> list[StoreConfig]:
        configs = mem_stores(3)
        filled(configs, ctx)
        space(configs[1].url[6:]).objects = {
            key: item for key, item in space(configs[1].url[6:]).objects.items() if key in {MEMBER, REPO}
        }
        return configs

    def act(configs: list[StoreConfig], life: Life) -> None:
        with Repo.open(configs, ctx, opener=life.opener, workers=1) as repo:
            maintain.repair(repo)

    def done(configs: list[StoreConfig]) -> None:
        assert_good(configs, ctx, members=3)

    die_everywhere(ctx, make, act, lambda _: None, done, stride)


@STRIDES
def test_adding_a_member_dies_anywhere(ctx: Context, stride: int) -> None:
    def make() -> list[StoreConfig]:
        configs = mem_stores(3)
        filled(configs[:2], ctx)
        return configs

    def act(configs: list[StoreConfig], life: Life) -> None:
        with Repo.open(configs, ctx, opener=life.opener, workers=1, allow_extras=True) as repo:
            maintain.rebalance(repo)

    done = lambda configs: assert_good(configs, ctx, members=3)  # noqa: E731
    die_everywhere(ctx, make, act, lambda c: assert_readable(c, ctx), done, stride)


@STRIDES
def test_a_drain_dies_anywhere(ctx: Context, stride: int) -> None:
    def make() -> list[StoreConfig]:
        configs = mem_stores(3)
        filled(configs, ctx)
        return configs

    def act(configs: list[StoreConfig], life: Life) -> None:
        opened = Repo.open(configs, ctx, opener=life.opener, workers=1, allow_extras=True)
        with opened as repo, contextlib.suppress(NotFoundError):  # it was drained and emptied already
            maintain.drain(repo, configs[0].url)

    def done(configs: list[StoreConfig]) -> None:
        assert_good(configs[1:], ctx, members=2)
        assert list(open_store(configs[0]).list("")) == []

    die_everywhere(ctx, make, act, lambda c: assert_readable(c, ctx), done, stride)


@STRIDES
@pytest.mark.parametrize("again", ["before", "after"])
def test_a_replacement_dies_anywhere(ctx: Context, again: str, stride: int) -> None:
    def make() -> list[StoreConfig]:
        configs = mem_stores(4)
        filled(configs[:3], ctx)
        wipe(configs[0])
        return configs

    def act(configs: list[StoreConfig], life: Life) -> None:
        # whoever runs it again names the stores as they were before, or as they are to be
        stores = configs[1:] if life.at == 10**9 and again == "after" else configs[:3]
        with Repo.open(stores, ctx, opener=life.opener, workers=1, allow_extras=True) as repo:
            maintain.replace_member(repo, configs[0].url, configs[3])

    done = lambda configs: assert_good(configs[1:], ctx, members=3)  # noqa: E731
    look = lambda configs: assert_readable(configs[1:3], ctx)  # noqa: E731
    die_everywhere(ctx, make, act, look, done, stride)
