"""The model manifest: to JSON and back, strict, compact."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.errors import FormatError, IncompatibleError, KvctlError
from kvctl.testing.models import LlamaShape, file_bytes
from kvctl.weights.cut import cut_file
from kvctl.weights.manifest import DataChunk, ModelFile, ModelManifest, Sidecar, parse_manifest
from kvctl.weights.safetensors import parse_header

STRIPE, LEAF = 64 * 1024, 4096


def name(number: int) -> str:
    return f"{number:064x}.{number:08x}"


def manifest() -> ModelManifest:
    """Two equal files' worth of a small Llama."""
    data = file_bytes(LlamaShape(layers=1).tensors())
    header = parse_header(data, len(data), "m")
    cuts = cut_file(header, STRIPE)
    table = sum(8 * -(-cut.size // LEAF) for cut in cuts)
    chunks = [(name(0), header.header_size), (name(1), table), (name(2), 7)]
    chunks += [(name(3 + number), cut.size) for number, cut in enumerate(cuts)]
    parts = tuple(DataChunk(3 + number, cut) for number, cut in enumerate(cuts))
    file = ModelFile("model.safetensors", len(data), 0, header.header_size, 1, parts)
    empty = ModelFile("none.safetensors", header.header_size, 0, header.header_size, None, ())
    return ModelManifest(
        name="llama 70b ü",
        version="3",
        created="2026-01-02T03:04:05Z",
        digest="a" * 64,
        stripe=STRIPE,
        leaf=LEAF,
        chunks=tuple(chunks),
        files=(file, empty),
        tensors={tensor.name: "b" * 64 for tensor in header.tensors},
        sidecars=(Sidecar("config.json", 7, 2), Sidecar("empty.txt", 0, None)),
        revision="main",
    )


def test_a_manifest_goes_to_json_and_back() -> None:
    before = manifest()
    after = parse_manifest(before.to_bytes(), "m")
    assert after == before
    assert after.data_bytes == before.files[0].data_size
    assert any(part.rows > 1 for item in after.files[0].data for part in item.cut.parts)


def test_leaf_tables_are_told_apart() -> None:
    file = manifest().files[0]
    entries = sum(-(-item.cut.size // LEAF) for item in file.data)
    table = memoryview(bytes(8 * entries))
    parts = list(file.tables(table, LEAF))
    assert [len(part) // 8 for _, part in parts] == [-(-item.cut.size // LEAF) for item in file.data]
    with pytest.raises(FormatError, match="leaf table"):
        list(file.tables(memoryview(bytes(8 * entries + 8)), LEAF))


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:  # Any: JSON
    document = manifest().to_json()
    document = json.loads(json.dumps(document))
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("digest"), "lacks"),
        (lambda d: d.update(more=1), "unknown fields"),
        (lambda d: d.update(stripe="16MiB"), "stripe"),
        (lambda d: d.update(digest="abc"), "digest"),
        (lambda d: d["chunks"][0].__setitem__(0, "../../etc/passwd"), r"chunks\[0\]"),
        (lambda d: d["chunks"][0].__setitem__(1, -1), r"chunks\[0\]"),
        (lambda d: d["chunks"].append(d["chunks"][0]), "twice"),
        (lambda d: d["files"][0].update(name="../x"), "out of the folder"),
        (lambda d: d["files"][0].update(name="config.json"), "twice"),
        (lambda d: d["files"][0].update(header=1), "header"),
        (lambda d: d["files"][0].update(header=10**6), "names chunk"),
        (lambda d: d["files"][0].update(leaves=0), "leaves"),
        (lambda d: d["files"][0].update(leaves=None), "leaves"),
        (lambda d: d["files"][0]["data"].pop(), "covers"),
        (lambda d: d["files"][0]["data"][0].__setitem__(1, 10**9), "up to"),
        (lambda d: d["files"][0]["data"].__setitem__(0, [3, [0, 2, 1, 4]]), "overlap"),
        (lambda d: d["files"][0]["data"].__setitem__(0, [3, [0, 2, 1]]), "no .start, rows, stride, width"),
        (lambda d: d["files"][0]["data"].__setitem__(0, [True, 0]), "True"),
        (lambda d: d["sidecars"][0].update(size=8), "another size"),
        (lambda d: d["tensors"].update(x="y"), "tensors"),
        (lambda d: d.update(schema="kvctl.report/1"), "no model manifest"),
    ],
)
def test_each_fault_is_named(change: Callable[[dict[str, Any]], object], words: str) -> None:  # Any: JSON
    with pytest.raises(FormatError, match=words):
        parse_manifest(edited(change), "m")


def test_a_newer_schema_is_told() -> None:
    with pytest.raises(IncompatibleError, match=r"kvctl\.model/2"):
        parse_manifest(edited(lambda d: d.update(schema="kvctl.model/2")), "m")


GOOD = manifest().to_bytes()


@given(st.data())
@settings(max_examples=150)
def test_damaged_manifests_raise_our_errors_only(data: st.DataObject) -> None:
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from(list(b'{}[]",:-.0189enul\\ ')))
    try:
        parse_manifest(bytes(raw), "m")
    except KvctlError:
        return
