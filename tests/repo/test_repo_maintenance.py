"""check, status, repair, replace, rebalance, drain: what they say and do."""

from __future__ import annotations

import pytest

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
from kvctl.repo.chunks import digest_of
from kvctl.repo.layout import model_key
from kvctl.repo.leases import lease_manifest
from kvctl.repo.marking import list_chunks
from kvctl.repo.repo import Repo
from kvctl.transports.mem import space
from kvctl.transports.registry import open_store
from tests.repo.world import BLOBS, OTHER, Stores, assert_good, filled, mem_stores, push_blobs, wipe


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
