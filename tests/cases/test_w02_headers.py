"""W2, W10-W12, W15, W16: files that are not what they say. The command names the file and both numbers, and leaves
nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvctl.testing.models import file_bytes, raw_header
from tests.cases.world import folders, kvctl, kvctl_process, make_repo, nothing_left, refused

GOOD = file_bytes([("a", "F32", (4, 4)), ("b", "BF16", (8,))])


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def built(document: dict[str, object], data: int = 0) -> bytes:
    return raw_header(document) + bytes(data)


def text_header(text: str, data: int) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + bytes(data)


CASES: dict[str, tuple[bytes, int, tuple[str, ...]]] = {
    "W2 shorter than the header says": (GOOD[:-7], 7, ("shorter", str(len(GOOD)), str(len(GOOD) - 7))),
    "W2 bytes after the last tensor": (GOOD + b"tail!",
        7, ("after its last tensor", str(len(GOOD)), str(len(GOOD) + 5))),
    "W2 the header itself is cut off": (GOOD[:40], 7, ("shorter than its header", "40")),
    "W10 every data byte is missing": (GOOD[: len(GOOD) - 80], 7, (str(len(GOOD)), str(len(GOOD) - 80))),
    "W11 a duplicate key": (
        text_header('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],'
                    '"data_offsets":[0,2]}}', 2),
        7, ("duplicate key", "'a'"),
    ),
    "W11 a duplicate field": (
        text_header('{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}', 2),
        7, ("duplicate key", "'dtype'"),
    ),
    "W12 overlap": (
        built({"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [2, 6])}, 6),
            7, ("overlap", "'a'", "'b'", "4", "2"),
    ),
    "W12 two names for the same bytes": (
        built({"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [0, 4])}, 4), 7, ("overlap", "'a'", "'b'"),
    ),
    "W12 a hole": (
        built({"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [6, 10])}, 10), 7, ("hole", "'a'", "'b'", "4", "6"),
    ),
    "W12 the first tensor is not at 0": (built({"a": entry("U8", [4], [3, 7])}, 7), 7, ("'a'", "begin at 0", "3")),
    "W12 begin after end": (built({"a": entry("U8", [4], [4, 0])}, 4), 7, ("'a'", "begin 4", "end 0")),
    "W12 a float": (built({"a": entry("U8", [4], [0, 4.0])}, 4), 7, ("'a'", "float 4.0")),
    "W12 a float in the shape": (built({"a": entry("U8", [4.5], [0, 4])}, 4), 7, ("'a'", "float 4.5", "shape")),
    "W12 a negative number": (built({"a": entry("U8", [-4], [0, 4])}, 4), 7, ("'a'", "negative", "-4")),
    "W12 a number that overflows": (built({"a": entry("U8", [1 << 64], [0, 4])}, 4),
        7, ("'a'", "overflow", str(1 << 64))),
    "W12 a product that overflows": (built({"a": entry("U8", [1 << 40, 1 << 40], [0, 4])}, 4), 7, ("'a'",)),
    "W12 a shape that does not fit its bytes": (built({"a": entry("F32", [3], [0, 4])}, 4), 7, ("'a'", "12", "4")),
    "W12 a boolean for a number": (built({"a": entry("U8", [True], [0, 1])}, 1), 7, ("'a'", "True")),
    "W12 a tensor that is no object": (built({"a": [1, 2]}, 0), 7, ("'a'",)),
    "W12 a field is missing": (built({"a": {"dtype": "U8", "shape": [1]}}, 1), 7, ("'a'", "data_offsets")),
    "W12 a field too many": (built({"a": {**entry("U8", [1], [0, 1]), "x": 1}}, 1), 7, ("'a'", "'x'")),
    "W12 a dtype that is no text": (built({"a": entry(3, [1], [0, 1])}, 1), 7, ("'a'", "dtype")),
    "W12 a shape that is no list": (built({"a": entry("U8", 4, [0, 4])}, 4), 7, ("'a'", "shape")),
    "W12 offsets that are no pair": (built({"a": entry("U8", [1], [0, 1, 2])}, 1), 7, ("'a'", "data_offsets")),
    "W12 a header of a length beyond any": ((1 << 60).to_bytes(8, "little") + b"{}", 7, (str(1 << 60), "100000000")),
    "W12 a number of thousands of digits": (text_header('{"a":{"dtype":"U8","shape":[' + "9" * 5000 + "]}}", 0),
        7, ("overflow",)),
    "W12 NaN": (text_header('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', 1), 7, ("NaN",)),
    "W12 half a character": (text_header('{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        7, ("surrogate",)),
    "W12 metadata that is no text": (built({"__metadata__": {"a": 1}, "a": entry("U8", [1], [0, 1])}, 1),
        7, ("__metadata__",)),
    "W15 packed F4 with an odd last dimension": (built({"q": entry("F4", [2, 3], [0, 3])}, 3),
        7, ("'q'", "F4", "[2, 3]")),
    "W15 F6": (built({"q": entry("F6_E2M3", [4], [0, 3])}, 3), 8, ("'q'", "F6_E2M3")),
    "W15 an unknown dtype": (built({"q": entry("Q4_K", [4], [0, 4])}, 4), 8, ("'q'", "Q4_K")),
    "W16 an HTML page": (b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>", 7, ("HTML page",)),
    "W16 an XML error": (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', 7, ("XML document",)),
    "W16 an empty file": (b"", 7, ("empty file", "0 bytes")),
    "W16 a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        7, ("Git LFS pointer",)),
    "W16 a pickle": (b"\x80\x04\x95" + bytes(64), 7, ("pickle",)),
    "W16 a zip of pickles": (b"PK\x03\x04" + bytes(64), 7, ("zip archive",)),
    "W16 a hole of zeros": (bytes(4096), 7, ("zero",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_command_refuses_the_file_in_words_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    data, code, words = CASES[case]
    (tmp_path / "broken.safetensors").write_bytes(data)
    target = f"out-{tmp_path.name}"
    for into in ("none", f"dir:{target}", f"shm:{target}"):
        done = kvctl("load-weights", "./broken.safetensors", "--into", into, "-o", "json")
        refused(done, code, "broken.safetensors", *words)
    nothing_left(tmp_path, target)


def test_one_broken_shard_stops_the_load_of_all_before_a_weight_byte(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    one, two = [("a", "F32", (64, 64))], [("b", "F32", (64, 64))]
    (model / "model-00001-of-00002.safetensors").write_bytes(file_bytes(one))
    (model / "model-00002-of-00002.safetensors").write_bytes(file_bytes(two)[:-1])
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    done = kvctl_process("load-weights", "./model", "--into", "dir:out", "-o", "json")
    refused(done, 7, "model-00002-of-00002.safetensors", "shorter")
    nothing_left(tmp_path)


def test_a_broken_file_is_not_pushed(tmp_path: Path) -> None:
    stores = folders(tmp_path, "a", "b")
    make_repo(stores)
    before = sorted((tmp_path / "a").rglob("*")) + sorted((tmp_path / "b").rglob("*"))
    (tmp_path / "broken.safetensors").write_bytes(GOOD[:-1])
    refused(kvctl("push-weights", "./broken.safetensors", "m", "-r", "./a,./b", "-o", "json"), 7, "shorter")
    assert sorted((tmp_path / "a").rglob("*")) + sorted((tmp_path / "b").rglob("*")) == before


def test_the_error_for_people_has_three_parts(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(GOOD[:-1])
    done = kvctl_process("load-weights", "./broken.safetensors")
    assert done.code == 7
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["error", "cause", "hint"]
