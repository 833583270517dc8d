"""The test vectors are what their script makes, and kvctl reads them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.identity import Descriptor, describe_model
from kvctl.kv.index import Node
from kvctl.kv.manifest import SessionManifest
from kvctl.kv.packs import parse_pack_header
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.seams import MemorySink
from kvctl.kv.tokens import domain_secret, parse_key
from kvctl.weights.manifest import parse_manifest

ROOT = Path(__file__).resolve().parent.parent.parent
REPO = ROOT / "tests" / "kv" / "vectors" / "repo"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_kv_vectors", ROOT / "scripts" / "make_kv_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_disk() -> dict[str, bytes]:
    return {path.relative_to(REPO).as_posix(): path.read_bytes() for path in REPO.rglob("*") if path.is_file()}


def test_the_vectors_are_current(script: ModuleType) -> None:
    zstandard = pytest.importorskip("zstandard", reason="pip install zstandard")
    made = script.objects()
    assert script.places() == (REPO.parent / "places.json").read_text(encoding="ascii")
    if zstandard.ZSTD_VERSION == (1, 5, 7):
        assert made == on_disk(), "run scripts/make_kv_vectors.py"
        assert script.readme(made) == (REPO.parent / "README.md").read_text(encoding="utf-8")
    else:  # another libzstd may pack otherwise, and then digests of that pack differ
        assert len(made) == len(on_disk())
        assert made["repo.json"] == on_disk()["repo.json"]


def test_kvctl_parses_them() -> None:
    seen = on_disk()
    (key,) = (key for key in seen if key.startswith("sessions/"))
    manifest = SessionManifest.parse(seen[key], key)
    assert (manifest.tenant, manifest.session, manifest.tokens) == ("alice", "notes/first chat", 1061)
    ns = f"ns/{manifest.ns}.json"
    descriptor = Descriptor.parse(seen[ns], ns)
    assert descriptor.digest == manifest.ns
    refs = manifest.refs
    for row in manifest.packs:
        header = parse_pack_header(seen[refs[row.chunk].key], "pack")
        assert (header.ns, header.header_size, header.first, header.tokens) == (
            *(manifest.ns, row.header_size, row.first, row.tokens),
        )
        assert header.geometry.group == descriptor.groups[row.group]
    for node in (key for key in seen if key.startswith("index/")):
        assert Node.parse(seen[node], node).to_bytes() == seen[node]
    model = parse_manifest(seen["models/tiny/1.json"], "model")
    assert model.digest == descriptor.weights


def test_the_descriptor_follows_from_the_model_but_for_its_window() -> None:
    seen = on_disk()
    model = parse_manifest(seen["models/tiny/1.json"], "model")
    files = {}
    for sidecar in model.sidecars:
        assert sidecar.chunk is not None
        name = model.chunks[sidecar.chunk][0]
        files[sidecar.name] = seen[f"chunks/{name[:2]}/{name}"]
    (ns,) = (key for key in seen if key.startswith("ns/"))
    stored = Descriptor.parse(seen[ns], ns)
    master = parse_key((REPO.parent / "kv.key").read_bytes(), "kv.key")
    computed = describe_model(
        files, model.digest, dtype="BF16", lora=stored.lora, salt=b"a salt that no object holds",
        secret=domain_secret(master, "alice"),
    )  # fmt: skip
    fields = ("weights", "tokenizer", "rope", "lora", "dtype", "salt")
    assert [getattr(computed, name) for name in fields] == [getattr(stored, name) for name in fields]


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_kvctl_pulls_the_session(rank: int | None, script: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(REPO, tmp_path / "repo")  # a pull takes a lease
    stores = (StoreConfig(f"file://{tmp_path}/repo"),)
    sink = MemorySink()
    request = PullSession(
        stores, "alice/notes/first chat@1", sink, key=script.MASTER, tp_rank=rank, tp_size=1 if rank is None else 2,
        strict=True,
    )  # fmt: skip
    pull_session(request, Context())
    assert sink.usable == 1061
    assert sink.layout is not None
    assert [(slot.layer, slot.start) for slot in sink.layout.slots] == [(0, 0), (1, 1030), (2, 0)]
    for slot in sink.layout.slots:
        held = sink.layers[slot.group, slot.layer]
        heads = range(slot.first_head, slot.first_head + slot.heads)
        assert len(heads) == (2 if rank is None else 1)
        for part, view in (("k", held.k), ("v", held.v)):
            rows = (script.kv_row(slot.layer, part, head, token) for head in heads for token in range(slot.start, 1061))
            assert bytes(view) == b"".join(rows)
    sink.close()
