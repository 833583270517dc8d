"""What a push writes: what is missing, where it is missing; and what it may not commit."""

from __future__ import annotations

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import IntegrityError, MemberDownError
from kvctl.repo import maintain
from kvctl.repo.check import Share, check
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.layout import MODELS, model_key
from kvctl.repo.metadata import home_of
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.repo.status import stats, status
from kvctl.transports.mem import space
from tests.repo.crashes import Life
from tests.repo.world import BLOBS, OTHER, Stores, blob, manifest_of, mem_stores, push_blobs, wipe


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
