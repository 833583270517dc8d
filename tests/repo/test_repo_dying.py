"""Maintenance that dies at any store call leaves the old or the new state, and running it again finishes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import ConflictError, KvctlError, NotFoundError
from kvctl.repo import maintain
from kvctl.repo.check import check
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import MEMBER, REPO, model_key
from kvctl.repo.marking import list_chunks
from kvctl.repo.repo import Repo
from kvctl.transports.mem import space
from kvctl.transports.registry import open_store
from tests.repo.crashes import Died, Life, lives
from tests.repo.world import (
    BLOBS,
    HOUR,
    OTHER,
    assert_good,
    assert_readable,
    blob,
    filled,
    mem_stores,
    push_blobs,
    read_blobs,
    skip_time,
    wipe,
)

# every 9th call in the quick form
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
