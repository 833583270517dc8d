"""Making and opening repos: who is a member, who is refused, what is tolerated when one is away."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    ConfigError,
    ConflictError,
    FormatError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    TransientError,
    UsageError,
)
from kvctl.repo import admin
from kvctl.repo.format import parse_repo
from kvctl.repo.layout import MEMBER, REPO, model_key
from kvctl.repo.members import AbsentStore
from kvctl.repo.metadata import home_of
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.repo.state import list_state, read_state, update_state
from kvctl.transports.api import Store
from kvctl.transports.mem import MemStore
from kvctl.transports.registry import open_store
from tests.repo.world import Stores, blob, mem_stores, push_blobs, read_blobs


def without(*away: StoreConfig) -> object:
    """An opener for which these stores do not answer."""

    def opener(config: StoreConfig) -> Store:
        if config in away:
            return AbsentStore(config.url, MemberDownError(f"{config.url} refused the connection"))
        return open_store(config)

    return opener


def open_without(stores: list[StoreConfig], ctx: Context, *away: StoreConfig) -> Repo:
    return Repo.open(stores, ctx, opener=without(*away))  # type: ignore[arg-type]  # an Opener


def test_init_writes_ids_everywhere_and_open_finds_them_in_any_order(stores: Stores, ctx: Context) -> None:
    configs = stores(3)
    with Repo.init(configs, ctx=ctx, replicas=2, stripe_size=1 << 20) as made:
        ids = [member.id for member in made.members]
    assert len(set(ids)) == 3
    with Repo.open(list(reversed(configs)), ctx) as repo:
        assert [member.id for member in repo.members] == ids
        assert (repo.format.replicas, repo.format.stripe_size, repo.format.epoch.number) == (2, 1 << 20, 1)
        assert {member.config.url for member in repo.members} == {config.url for config in configs}


def test_a_second_init_is_refused(stores: Stores, ctx: Context) -> None:
    configs = stores(2)
    Repo.init(configs, ctx=ctx).close()
    with pytest.raises(UsageError, match="holds a repo already"):
        Repo.init(configs, ctx=ctx)
    with pytest.raises(UsageError, match="exists already and is not what is asked for"):
        Repo.init([*configs, *stores(3)[2:]], ctx=ctx)


def test_two_members_at_one_place_are_refused_and_nothing_stays(ctx: Context, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    configs = [StoreConfig(f"file://{tmp_path}/real"), StoreConfig(f"file://{tmp_path}/alias")]
    with pytest.raises(ConfigError, match="two of the stores are at one place"):
        Repo.init(configs, ctx=ctx)
    assert list((tmp_path / "real").iterdir()) == []


def test_endpoints_that_show_different_stores_are_refused(ctx: Context) -> None:
    def opener(config: StoreConfig) -> Store:
        return MemStore(f"endpoint-{config.url[6:]}-{config.endpoints[0]}")

    stores = [dataclasses.replace(mem_stores(1)[0], endpoints=("a", "b"))]
    with pytest.raises(ConfigError, match="lead to different stores"):
        Repo.init(stores, ctx=ctx, opener=opener)


def test_a_member_of_another_repo_is_refused(ctx: Context) -> None:
    first, second = mem_stores(2), mem_stores(2)
    Repo.init(first, ctx=ctx).close()
    Repo.init(second, ctx=ctx).close()
    with pytest.raises(KvctlError, match=r"exists already|another repo"):
        Repo.init([first[0], *mem_stores(1)], ctx=ctx)
    with pytest.raises(IncompatibleError, match="different repos") as caught:
        Repo.open([first[0], second[0]], ctx)
    assert caught.value.exit_code == 8


def test_a_store_that_is_no_member_and_one_listed_twice_are_refused(ctx: Context) -> None:
    configs = mem_stores(2)
    Repo.init(configs, ctx=ctx).close()
    with pytest.raises(ConfigError, match="is not a member of repo"):
        Repo.open([*configs, *mem_stores(1)], ctx)
    with pytest.raises(ConfigError, match="one and the same member"):
        Repo.open([configs[0], configs[0]], ctx)


def test_nothing_there_says_how_to_make_a_repo(stores: Stores, ctx: Context) -> None:
    with pytest.raises(NotFoundError, match="no repo at") as caught:
        Repo.open(stores(1), ctx)
    assert caught.value.hint == "make one with `kvctl repo init`"


def test_no_store_answers(ctx: Context) -> None:
    configs = mem_stores(2)
    Repo.init(configs, ctx=ctx).close()
    with pytest.raises(MemberDownError, match="no repo is reachable"):
        open_without(configs, ctx, *configs)


def test_fewer_stores_than_members_and_an_empty_one_count_as_down(ctx: Context) -> None:
    configs = mem_stores(3)
    Repo.init(configs, ctx=ctx, replicas=2).close()
    with Repo.open(configs[:2], ctx) as repo:
        assert [type(member.down) for member in repo.members] == [type(None), type(None), MemberDownError]
        assert "not among the stores given" in str(repo.members[2].down)
    store = open_store(configs[1])
    store.delete([MEMBER, REPO])
    with Repo.open(configs, ctx) as repo:
        assert [member.name for member in repo.down] == [configs[1].url]
        assert "empty or not mounted" in str(repo.down[0].down)


def test_an_unknown_read_feature_is_refused_and_a_write_feature_stops_writes_only(ctx: Context) -> None:
    configs = mem_stores(1)
    Repo.init(configs, ctx=ctx).close()
    store = open_store(configs[0])
    text = store.get(REPO).replace(b'"write": []', b'"write": ["erasure-codes"]')
    store.put(REPO, text)
    with Repo.open(configs, ctx) as repo, pytest.raises(IncompatibleError, match="cannot write repo"):
        Push.begin(repo, "x")
    store.put(REPO, text.replace(b'"read": []', b'"read": ["erasure-codes"]'))
    with pytest.raises(IncompatibleError, match="cannot read repo") as caught:
        Repo.open(configs, ctx)
    assert caught.value.cause == "it uses erasure-codes"


@pytest.mark.parametrize(("stripe", "replicas"), [(1 << 20, 3), (1 << 20, 0), (1000, 1), (0, 1)])
def test_impossible_numbers_are_refused(ctx: Context, stripe: int, replicas: int) -> None:
    with pytest.raises(ConfigError):
        Repo.init(mem_stores(2), ctx=ctx, stripe_size=stripe, replicas=replicas)


def test_one_member_away_reads_go_on_and_only_its_keys_refuse_commits(ctx: Context) -> None:
    configs = mem_stores(3)
    blobs = [blob(str(number)) for number in range(12)]
    with Repo.init(configs, ctx=ctx, replicas=2) as repo:
        push_blobs(repo, "m", blobs)
    for away in configs:
        with open_without(configs, ctx, away) as repo:
            assert read_blobs(repo, "m") == blobs
            assert [item.key for item in repo.list_meta("models/")] == [model_key("m", "1")]
            refused = committed = 0
            for number in range(30):
                key = f"state/test/{away.url[-1]}-{number}.json"
                if home_of(repo, key).down is None:
                    repo.commit_meta(key, b"{}", if_absent=True)
                    committed += 1
                    continue
                with pytest.raises(MemberDownError, match="which decides on it, is down") as caught:
                    repo.commit_meta(key, b"{}", if_absent=True)
                assert caught.value.exit_code == 6
                with pytest.raises(MemberDownError):
                    repo.delete_meta(key)
                refused += 1
            assert refused >= 3
            assert committed >= 10


def test_two_clients_that_see_different_members_cannot_both_commit_a_key(ctx: Context) -> None:
    configs = mem_stores(3)
    Repo.init(configs, ctx=ctx, replicas=2).close()
    for number in range(20):
        key = model_key("m", str(number))
        wins = []
        for who, away in enumerate(configs):
            with open_without(configs, ctx, away) as repo:
                try:
                    repo.commit_meta(key, f'{{"who": {who}}}'.encode(), if_absent=True)
                    wins.append(who)
                except (ConflictError, MemberDownError):
                    continue
        assert len(wins) == 1
        with Repo.open(configs, ctx) as repo:
            assert repo.read_meta(key) == f'{{"who": {wins[0]}}}'.encode()


def test_sixteen_writers_race_for_one_key(stores: Stores, ctx: Context) -> None:
    configs = stores(3)
    Repo.init(configs, ctx=ctx).close()
    race(configs, ctx, settle=0.0)


def test_sixteen_writers_race_on_stores_without_conditional_put(ctx: Context) -> None:
    configs = [dataclasses.replace(config, options={"conditional_put": "false"}) for config in mem_stores(2)]
    Repo.init(configs, ctx=ctx, settle=0.01).close()
    race(configs, ctx, settle=0.01)
    for config in configs:
        assert list(open_store(config).list("locks/")) == []


def race(configs: list[StoreConfig], ctx: Context, *, settle: float) -> None:
    for number in range(3):
        key = model_key("raced", str(number))
        start = threading.Barrier(16)
        ends: list[str] = []

        def write(who: int, key: str = key, start: threading.Barrier = start, ends: list[str] = ends) -> None:
            with Repo.open(configs, ctx, settle=settle) as repo:
                start.wait()
                try:
                    repo.commit_meta(key, str(who).encode(), if_absent=True)
                    ends.append(str(who))
                except ConflictError:
                    ends.append("lost")

        threads = [threading.Thread(target=write, args=(who,)) for who in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ends) == 16
        winners = [end for end in ends if end != "lost"]
        assert len(winners) == 1
        for config in configs:
            assert open_store(config).get(key) == winners[0].encode()


def test_a_deleted_key_does_not_come_back_with_a_member_that_was_away(ctx: Context) -> None:
    configs = mem_stores(3)
    with Repo.init(configs, ctx=ctx, replicas=2) as repo:
        push_blobs(repo, "m", [blob("a")])
        home = home_of(repo, model_key("m", "1"))
    away = next(config for config in configs if config != home.config)
    with open_without(configs, ctx, away) as repo:
        repo.delete_meta(model_key("m", "1"))
    with Repo.open(configs, ctx) as repo:
        assert repo.list_meta("models/") == []
        with pytest.raises(NotFoundError):
            repo.read_meta(model_key("m", "1"))


def test_committing_again_is_a_success_and_another_value_a_conflict(stores: Stores, ctx: Context) -> None:
    with Repo.init(stores(2), ctx=ctx) as repo:
        repo.commit_meta("models/m/1.json", b"{}", if_absent=True)
        repo.commit_meta("models/m/1.json", b"{}", if_absent=True)
        with pytest.raises(ConflictError):
            repo.commit_meta("models/m/1.json", b"[]", if_absent=True)


def test_a_client_with_an_old_view_finds_out_after_its_put(ctx: Context) -> None:
    configs = mem_stores(2)
    with Repo.init(configs, ctx=ctx) as repo:
        newer = dataclasses.replace(repo.format, generation=2)
        for config in configs:
            open_store(config).put(REPO, newer.to_bytes())
        with pytest.raises(TransientError, match="changed meanwhile"):
            repo.commit_meta("models/m/1.json", b"{}", if_absent=True)
        repo.commit_meta("models/m/1.json", b"{}", if_absent=True)
        assert parse_repo(open_store(configs[0]).get(REPO), "here").generation == 2


def test_nothing_is_committed_while_homes_are_about_to_move(ctx: Context) -> None:
    configs = mem_stores(2)
    with Repo.init(configs, ctx=ctx) as repo:
        push_blobs(repo, "m", [blob("a")])
        moving = repo.format.next(phase="moving", earlier=(repo.format.epoch,))
    for phase, refused in (("moving", False), ("switching", True)):
        for config in configs:
            open_store(config).put(REPO, dataclasses.replace(moving, phase=phase).to_bytes())
        with Repo.open(configs, ctx) as repo:
            assert read_blobs(repo, "m") == [blob("a")]
            if refused:
                with pytest.raises(TransientError, match="is changing its members"):
                    repo.commit_meta("models/n/1.json", b"{}", if_absent=True)
                with pytest.raises(TransientError, match="is changing its members"):
                    repo.delete_meta(model_key("m", "1"))
            else:
                repo.commit_meta("models/n/0.json", b"{}", if_absent=True)
    for config in configs:
        open_store(config).put(REPO, moving.to_bytes())
    with open_without(configs, ctx, configs[0]) as repo, pytest.raises(TransientError):
        repo.commit_meta("models/n/2.json", b"{}", if_absent=True)


def test_state_counts_every_update_of_many_threads(stores: Stores, ctx: Context) -> None:
    with Repo.init(stores(2), ctx=ctx) as repo:

        def count() -> None:
            for _ in range(5):
                update_state(repo, "counters", "a b", lambda old: {"n": (old or {"n": 0})["n"] + 1})

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list_state(repo, "counters") == {"a b": {"n": 20}}
        update_state(repo, "counters", "a b", lambda _: None)
        assert read_state(repo, "counters", "a b") is None
        assert list_state(repo, "counters") == {}


@pytest.mark.parametrize(
    "key",
    ["models/llama/config.json", "chunks/a", "state/b", "sessions/c", "index/d", "ns/e", "gc/f", "leases/g", "locks/h"],
)
def test_a_store_that_holds_something_where_a_repo_keeps_its_own_does_not_become_a_member(
    stores: Stores, ctx: Context, key: str
) -> None:
    first, second, third = stores(3)
    open_store(second).put(key, b"precious")
    with pytest.raises(UsageError, match="is not empty") as caught:
        Repo.init([first, second], ctx=ctx)
    assert key in (caught.value.cause or "")
    Repo.init([first, third], ctx=ctx).close()  # nothing is left of the attempt
    with pytest.raises(UsageError, match="is not empty"):
        admin.rebalance_repo([first, third, second], ctx)
    with pytest.raises(UsageError, match="is not empty"):
        admin.repair_repo([first, third], ctx, admin.RepairOptions(replace=((third.url, second),)))
    assert [item.key for item in open_store(second).list()] == [key]


def test_a_repo_leaves_alone_what_lies_beside_it(stores: Stores, ctx: Context) -> None:
    first, second = stores(2)
    open_store(first).put("README", b"mine")
    open_store(first).put("weights/a.safetensors", b"mine too")
    with Repo.init([first, second], ctx=ctx) as repo:
        push_blobs(repo, "m", [blob("a")])
    admin.drain_member([first, second], ctx, first.url)
    assert [item.key for item in open_store(first).list()] == ["README", "weights/a.safetensors"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\x00"], ids=lambda text: text[:4])
def test_a_damaged_repo_json_stops_no_reader_and_is_repaired(stores: Stores, ctx: Context, text: bytes) -> None:
    configs = stores(3)
    with Repo.init(configs, ctx=ctx, replicas=2) as repo:
        push_blobs(repo, "m", [blob("a")])
    good = open_store(configs[1]).get(REPO)
    open_store(configs[1]).put(REPO, text)
    with Repo.open(configs, ctx) as repo:
        assert read_blobs(repo, "m") == [blob("a")]
    assert {problem.kind for problem in admin.check_repo(configs, ctx).problems} == {"members"}
    admin.repair_repo(configs, ctx)
    assert open_store(configs[1]).get(REPO) == good
    assert admin.check_repo(configs, ctx).ok
    for config in configs:
        open_store(config).put(REPO, text)
    with pytest.raises((FormatError, IncompatibleError)):
        Repo.open(configs, ctx)
    with pytest.raises((FormatError, IncompatibleError)):
        Repo.init(configs, ctx=ctx)
    assert all(open_store(config).get(REPO) == text for config in configs)


def test_a_member_whose_member_json_is_damaged_is_down_and_can_be_replaced(stores: Stores, ctx: Context) -> None:
    configs = stores(4)
    with Repo.init(configs[:3], ctx=ctx, replicas=2) as repo:
        push_blobs(repo, "m", [blob("a")])
    open_store(configs[0]).put(MEMBER, b"")
    with Repo.open(configs[:3], ctx) as repo:
        assert [member.config.url for member in repo.down] == [configs[0].url]
        assert read_blobs(repo, "m") == [blob("a")]
    admin.repair_repo(configs[:3], ctx, admin.RepairOptions(replace=((configs[0].url, configs[3]),)))
    assert admin.check_repo(configs[1:], ctx).ok


def test_a_member_that_lost_its_member_json_only_takes_its_own_place(stores: Stores, ctx: Context) -> None:
    configs = stores(3)
    with Repo.init(configs, ctx=ctx, replicas=2) as repo:
        push_blobs(repo, "m", [blob("a"), blob("b")])
    open_store(configs[0]).delete([MEMBER])
    admin.repair_repo(configs, ctx, admin.RepairOptions(replace=((configs[0].url, configs[0]),)))
    with Repo.open(configs, ctx) as repo:
        assert read_blobs(repo, "m") == [blob("a"), blob("b")]
    assert admin.check_repo(configs, ctx).ok
