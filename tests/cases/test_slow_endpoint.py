"""An endpoint that crawls costs little: it holds few ranges, and those are fetched elsewhere. It is so slow that it
ends nothing while there is anything else to do, whatever the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.models import header_document, raw_header
from kvctl.transfer.lanes import FIRST_WINDOW
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest
from tests.cases.test_w18_ranks import pattern
from tests.cases.world import files_of, make_repo, push, quick

MIB = 1 << 20
TENSORS = [(f"model.layers.{number}.mlp.up_proj.weight", "BF16", (1024, 1024)) for number in range(48)]  # 96 MiB
MODEL = raw_header(header_document(TENSORS)) + b"".join(pattern(tensor) for tensor in TENSORS)
FAST = 100e6  # bytes per second of each body
CRAWL = 100.0  # a range takes an hour
CHUNKS = "repo/chunks/*"


@dataclass
class Last(FaultyS3):
    """It answers once both endpoints together were asked for so many ranges of chunks."""

    other: FaultyS3 = field(default_factory=FaultyS3)
    ranges: int = 0
    held: int = 0

    def hit(self, method: str, key: str) -> dict[str, Fault]:
        if self.ranges and fnmatchcase(key, CHUNKS):
            with self.lock:
                self.held += 1
            while self.held + len(self.other.requests("GET", CHUNKS)) < self.ranges:
                if self.closing.wait(0.01):
                    break
        return super().hit(method, key)


@dataclass
class Pair:
    """Two servers over the same objects."""

    good: FaultyS3
    slow: Last

    @property
    def store(self) -> StoreConfig:
        return StoreConfig("s3://bucket/repo", (self.good.endpoint, self.slow.endpoint))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        good = stack.enter_context(FaultyS3())
        slow = stack.enter_context(Last(objects=good.objects, lock=good.lock, other=good))
        yield Pair(good, slow)


def test_two_endpoints_of_one_store_and_one_of_them_crawls(pair: Pair, tmp_path: Path) -> None:
    make_repo([pair.store], stripe=MIB)
    source = tmp_path / "model.safetensors"
    source.write_bytes(MODEL)
    push(source, [pair.store])
    pair.good.clear()
    pair.slow.clear()
    pair.good.add(Fault("slow", key=CHUNKS, rate=FAST))
    pair.slow.add(Fault("slow", key=CHUNKS, rate=CRAWL))
    report = run_load(LoadRequest("m", repo=(pair.store,), into="dir:out"), quick()).to_json()
    assert files_of(tmp_path / "out") == {"model.safetensors": MODEL}
    used = {path["endpoint"]: path["bytes"] for path in report["paths"]}
    assert sum(used.values()) == report["fetched"] + report["hedged_bytes"]
    assert used[pair.slow.endpoint] == 0
    # what it held was asked for at the other, too, and came from there
    assert report["hedges"] >= 1
    assert report["hedge_wins"] >= 1
    assert report["hedged_bytes"] <= 0.1 * report["bytes"]
    assert report["retries"] == 0
    bulk = [item for item in pair.slow.requests("GET", CHUNKS) if item.range]
    assert 1 <= len(bulk) <= 12
    assert report["verified"]["state"] == "leaves"


def test_without_hedging_the_slow_endpoint_still_holds_few_ranges(pair: Pair, tmp_path: Path) -> None:
    make_repo([pair.store], stripe=MIB)
    source = tmp_path / "model.safetensors"
    source.write_bytes(MODEL)
    push(source, [pair.store])
    pair.good.clear()
    pair.slow.clear()
    request = LoadRequest("m", repo=(pair.store,), hedge=False)
    run_load(request, quick())
    pair.slow.ranges = sum(len(server.requests("GET", CHUNKS)) for server in (pair.good, pair.slow))
    pair.good.clear()
    report = run_load(request, quick()).to_json()
    used = {path["endpoint"]: path["bytes"] for path in report["paths"]}
    assert report["hedges"] == 0
    assert pair.slow.held <= FIRST_WINDOW
    assert used[pair.slow.endpoint] <= FIRST_WINDOW * MIB
    assert sum(used.values()) == report["bytes"]


def test_a_plain_file_behind_two_endpoints(pair: Pair, tmp_path: Path) -> None:
    pair.good.put("m/model.safetensors", MODEL)
    pair.good.add(Fault("slow", key="m/*", skip=1, rate=FAST))
    pair.slow.add(Fault("slow", key="m/*", rate=CRAWL))
    address = f"s3://bucket/m?endpoint={pair.good.endpoint}&endpoint={pair.slow.endpoint}"
    report = run_load(LoadRequest(address, into="dir:out"), quick()).to_json()
    assert files_of(tmp_path / "out") == {"model.safetensors": MODEL}
    used = {path["endpoint"]: path["bytes"] for path in report["paths"]}
    assert used[pair.slow.endpoint] == 0
    assert report["hedge_wins"] >= 1
