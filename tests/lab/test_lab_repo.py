"""Three storage nodes in one guest, the client in another: weights and KV by native-rdma, and the proof of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvctl.testing.models import LlamaShape, write_llama
from scripts.rdma_lab.guests import Guests
from scripts.rdma_lab.places import Lab
from tests.lab.fixtures import ROOT, Figure
from tests.lab.fleet import NODES, PATIENCE, SESSION_BYTES, STORAGE, Fleet, write_session

SHAPE = LlamaShape(layers=2, hidden=1024, heads=8, kv_heads=8, head_dim=128, inner=2816, vocab=4096)
PACKET = 4096


@pytest.fixture(scope="module")
def fleet(lab: Lab, inside: dict[str, str]) -> Iterator[Fleet]:
    """A repo with two copies of each chunk. /lab/model and /lab/chat.safetensors are what to push; the model is in it
    as `m`.
    """
    with Guests(lab, (STORAGE, "client"), folder=str(ROOT), environment=inside) as guests:
        write_llama(str(guests.shared / "model"), SHAPE, shards=2, seed=7)
        write_session(guests.shared / "chat.safetensors")
        fleet = Fleet(guests, "--rdma", "require")
        fleet.kvctl("repo init -r lab --replicas 2").wait(PATIENCE).check()
        yield fleet


def test_weights_go_and_come_by_rdma_and_http_bodies_stay_empty(fleet: Fleet, figure: Figure) -> None:
    before = fleet.counted()
    pushed = fleet.report("push-weights /lab/model m -r lab")
    there = fleet.counted()
    loaded = fleet.report("load-weights lab:m --into dir:/tmp/out --verify full --no-hedge")
    push, load = there.since(before), fleet.counted().since(there)
    figure(f"push-weights, {pushed['written']} bytes", push)
    figure(f"load-weights, {loaded['fetched']} bytes", load)
    assert "native-rdma" in [item["name"] for item in pushed["transport"]]
    assert [item["name"] for item in loaded["transport"]] == ["native-rdma"]
    for report in (pushed, loaded):
        shares = [path["bytes"] for path in report["paths"] if path["transport"] == "native-rdma"]
        assert len(shares) == NODES, "every node had its share"
        assert all(shares)
    assert loaded["verified"]["state"] == "full"
    fleet.guests["client"].run(
        "cd /lab/model && sha256sum * >/tmp/sums && cd /tmp/out && sha256sum -c /tmp/sums"
    ).check()
    # every byte of a chunk, no more and no fewer, was placed by the nodes themselves
    assert push.rdma == pushed["written"]
    assert load.rdma == loaded["fetched"] == loaded["bytes"], loaded  # was it a retry?
    # what is left for HTTP is documents: manifests, headers, leases
    assert push.http < push.rdma // 100
    assert load.http < load.rdma // 100
    assert push.packets >= push.rdma // PACKET
    assert load.packets >= load.rdma // PACKET


def test_a_session_goes_and_comes_by_rdma(fleet: Fleet, figure: Figure) -> None:
    before = fleet.counted()
    pushed = fleet.report("kv push bundle:/lab/chat.safetensors alice/chat -r lab --with-tokens")
    there = fleet.counted()
    pulled = fleet.report("kv pull lab:alice/chat --into bundle:/tmp/chat.safetensors")
    push, pull = there.since(before), fleet.counted().since(there)
    figure(f"kv push, {pushed['written']} bytes", push)
    figure(f"kv pull, {pulled['fetched']} bytes", pull)
    assert "native-rdma" in [item["name"] for item in pushed["transport"]]
    assert [item["name"] for item in pulled["transport"]] == ["native-rdma"]
    assert pulled["verified"]["state"] != "none"
    assert pulled["bytes"] == SESSION_BYTES
    fleet.guests["client"].run("cmp /lab/chat.safetensors /tmp/chat.safetensors").check()
    assert push.rdma == pushed["written"]
    assert pull.rdma == pulled["fetched"]
    assert pull.packets >= pull.rdma // PACKET
    # documents, the tables of packs: small things come in bodies
    assert push.http < push.rdma // 100
    assert pull.http < pull.rdma // 100


def test_a_client_told_to_use_tcp_gets_bodies_from_the_same_nodes(fleet: Fleet) -> None:
    fleet.report("push-weights /lab/model tcp -r lab")
    before = fleet.counted()
    loaded = fleet.report("load-weights lab:tcp --transport native-tcp --no-hedge")
    load = fleet.counted().since(before)
    assert [item["name"] for item in loaded["transport"]] == ["native-tcp"]
    assert load.rdma == 0
    assert load.http >= loaded["fetched"]
