"""W6-W9: the index and the shards, both ways, before any weight byte is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvctl.testing.faulty_s3 import FaultyS3
from kvctl.testing.models import file_bytes
from tests.cases.world import files_of, kvctl, nothing_left, refused

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B, C = ("a", "F32", (128, 128)), ("b", "F32", (128, 128)), ("c", "F32", (128, 128))
DATA = 128 * 128 * 4


def index(weight_map: Mapping[str, str]) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": dict(weight_map)}).encode()


CASES: dict[str, tuple[dict[str, bytes], int, tuple[str, ...]]] = {
    "W6 the index names a shard that is not there": (
        {ONE: file_bytes([A]), "model.safetensors.index.json": index({"a": ONE, "b": TWO})},
        4, ("model.safetensors.index.json", TWO, "1 of 2"),
    ),
    "W6 no index, and a numbered shard is missing": ({ONE: file_bytes([A])}, 4, ("lacks shard 2 of 2",)),
    "W7 the index maps a tensor to a shard that lacks it": (
        {ONE: file_bytes([A]), TWO: file_bytes([B, C]),
         "model.safetensors.index.json": index({"a": ONE, "b": ONE, "c": TWO})},
        7, ("'b'", ONE, TWO),
    ),
    "W7 the index names a tensor that no shard holds": (
        {ONE: file_bytes([A]), TWO: file_bytes([B]),
         "model.safetensors.index.json": index({"a": ONE, "b": TWO, "x": TWO})},
        7, ("'x'", TWO, "no shard holds it"),
    ),
    "W7 a shard holds a tensor that the index does not name": (
        {ONE: file_bytes([A, C]), TWO: file_bytes([B]), "model.safetensors.index.json": index({"a": ONE, "b": TWO})},
        7, ("'c'", ONE, "names 2", "hold 3"),
    ),
    "W8 one tensor in two shards": (
        {ONE: file_bytes([A]), TWO: file_bytes([A, B]), "model.safetensors.index.json": index({"a": ONE, "b": TWO})},
        7, ("'a'", ONE, TWO),
    ),
    "W8 without an index too": ({"x.safetensors": file_bytes([A]), "y.safetensors": file_bytes([A])},
                                7, ("'a'", "x.safetensors", "y.safetensors")),
    "an index that leads out of the folder": (
        {ONE: file_bytes([A]), "model.safetensors.index.json": index({"a": f"../{ONE}"})}, 7, ("'a'", f"../{ONE}"),
    ),
    "an index that is cut off": (
        {ONE: file_bytes([A]), "model.safetensors.index.json": index({"a": ONE})[:-9]},
        7, ("model.safetensors.index.json",),
    ),
    "an index without a map": ({ONE: file_bytes([A]), "model.safetensors.index.json": b"{}"}, 7, ("weight_map",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_command_refuses_before_any_weight_byte_is_read(case: str, tmp_path: Path, server: FaultyS3) -> None:
    files, code, words = CASES[case]
    for name, data in files.items():
        server.put(f"m/{name}", data)
    done = kvctl("load-weights", "s3://bucket/m", "--endpoint-url", server.endpoint, "--into", "dir:out", "-o", "json")
    refused(done, code, *words)
    nothing_left(tmp_path)
    # the header probe is 64 KiB: nothing behind it was asked for
    assert all(int(item.range.split("-")[1]) < 65536 for item in server.requests("GET", "*.safetensors") if item.range)
    if case.startswith("W6"):
        assert server.requests("GET", "*.safetensors") == []


def test_w9_the_index_decides_and_what_was_ignored_is_reported(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    stale, whole = "model-00001-of-00003.safetensors", "consolidated.safetensors"
    for name, data in {
        ONE: file_bytes([A]), TWO: file_bytes([B]), stale: file_bytes([A, C], seed=9), whole: file_bytes([A, B]),
        "model.safetensors.index.json": index({"a": ONE, "b": TWO}),
    }.items():  # fmt: skip
        (model / name).write_bytes(data)
    done = kvctl("load-weights", "./model", "--into", "dir:out", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["bytes"] == done.document["fetched"] == 2 * DATA
    assert f"ignored {whole}: a consolidated copy" in done.document["notes"]
    assert f"ignored {stale}: not named by the index" in done.document["notes"]
    loaded = files_of(tmp_path / "out")
    assert sorted(loaded) == [ONE, TWO, "model.safetensors.index.json"]
    assert loaded[ONE] == file_bytes([A])


def test_w9_stale_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / ONE).write_bytes(file_bytes([A]))
    (model / TWO).write_bytes(file_bytes([B]))
    (model / "model-00001-of-00003.safetensors").write_bytes(file_bytes([A], seed=9))
    refused(kvctl("load-weights", "./model", "-o", "json"), 7, "several exports", "of-2", "of-3")
