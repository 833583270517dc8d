"""A repo whose members are three SeaweedFS servers: races for a key, a member away, maintenance."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context, RetryPolicy
from kvctl.core.errors import ConflictError, MemberDownError, TransientError
from kvctl.repo import maintain
from kvctl.repo.check import Share, check
from kvctl.repo.gc import GcOptions, run_gc
from kvctl.repo.layout import model_key
from kvctl.repo.members import AbsentStore
from kvctl.repo.metadata import home_of
from kvctl.repo.repo import Repo
from kvctl.transports.api import Store
from kvctl.transports.registry import open_store
from tests.repo.world import blob, push_blobs, read_blobs

pytestmark = pytest.mark.s3

Make = Callable[[], tuple[StoreConfig, ...]]
BLOBS = [blob(f"s3-{number}", 3000) for number in range(6)]


@pytest.fixture
def s3_ctx() -> Context:
    return Context(retry=RetryPolicy(base=0.01, cap=0.1, attempts=4))


def test_opening_and_looking_writes_nothing(seaweed3_stores: Make, s3_ctx: Context) -> None:
    configs = seaweed3_stores()
    with Repo.init(configs, ctx=s3_ctx, replicas=2) as repo:
        push_blobs(repo, "m", BLOBS)

    class ReadOnly:
        """Passes reads on; any other call is a bug."""

        def __init__(self, inner: Store) -> None:
            self.url = inner.url
            self.stat, self.list, self.get, self.now = inner.stat, inner.list, inner.get, inner.now
            self.uploads, self.close = inner.uploads, inner.close

    def opener(config: StoreConfig) -> Store:
        return ReadOnly(open_store(config))  # type: ignore[return-value]  # what it lacks must not be called

    with Repo.open(configs, s3_ctx, opener=opener) as repo:
        assert read_blobs(repo, "m") == BLOBS
        assert check(repo, read_data=Share()).problems == []


def test_sixteen_writers_race_for_each_of_five_keys(seaweed3_stores: Make, s3_ctx: Context) -> None:
    configs = seaweed3_stores()
    Repo.init(configs, ctx=s3_ctx).close()
    with Repo.open(configs, s3_ctx) as repo:
        for number in range(5):
            key = model_key("raced", str(number))
            start = threading.Barrier(16)
            ends: list[bytes | None] = []

            def write(
                who: int, key: str = key, start: threading.Barrier = start, ends: list[bytes | None] = ends
            ) -> None:
                start.wait()
                try:
                    repo.commit_meta(key, f"writer {who}".encode(), if_absent=True)
                    ends.append(f"writer {who}".encode())
                except ConflictError:
                    ends.append(None)

            threads = [threading.Thread(target=write, args=(who,)) for who in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            winners = [end for end in ends if end is not None]
            assert (len(ends), len(winners)) == (16, 1)
            assert [member.store.get(key) for member in repo.members] == winners * 3


def test_one_member_away_and_back(seaweed3_stores: Make, s3_ctx: Context) -> None:
    configs = seaweed3_stores()
    with Repo.init(configs, ctx=s3_ctx, replicas=2) as repo:
        push_blobs(repo, "m", BLOBS)

    def opener(config: StoreConfig) -> Store:
        if config == configs[1]:
            return AbsentStore(config.url, TransientError(f"{config.url}: connection refused"))
        return open_store(config)

    with Repo.open(configs, s3_ctx, opener=opener) as repo:
        assert [member.config for member in repo.down] == [configs[1]]
        assert read_blobs(repo, "m") == BLOBS
        ends = set()
        for number in range(12):
            key = model_key("n", str(number))
            if home_of(repo, key).down is None:
                repo.commit_meta(key, b'{"schema": "test/1", "chunks": []}', if_absent=True)
                ends.add("committed")
            else:
                with pytest.raises(MemberDownError):
                    repo.commit_meta(key, b"{}", if_absent=True)
                ends.add("refused")
        assert ends == {"committed", "refused"}
    with Repo.open(configs, s3_ctx) as repo:
        assert maintain.repair(repo).metadata.copies > 0
        assert check(repo, read_data=Share()).problems == []


def test_garbage_goes_and_a_member_can_be_drained(seaweed3_stores: Make, s3_ctx: Context) -> None:
    configs = seaweed3_stores()
    with Repo.init(configs, ctx=s3_ctx, replicas=2) as repo:
        push_blobs(repo, "m", BLOBS)
        push_blobs(repo, "n", BLOBS[:2])
        repo.delete_meta(model_key("m", "1"))
        assert run_gc(repo, GcOptions(grace=0)).deleted_objects == 8
        maintain.drain(repo, repo.members[0].id)
        gone = next(config for config in configs if config not in [member.config for member in repo.members])
        assert read_blobs(repo, "n") == BLOBS[:2]
        assert check(repo, read_data=Share()).problems == []
    with contextlib.closing(open_store(gone)) as store:
        assert list(store.list("")) == []
