"""The header parser: the format's rules, each with its own words, and agreement with the reference package."""

from __future__ import annotations

import json
import struct
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from kvctl.core.errors import FormatError, IncompatibleError, KvctlError, SizeMismatchError
from kvctl.testing.models import Spec, file_bytes, header_document, raw_header
from kvctl.weights.dtypes import DTYPES, torch_shape
from kvctl.weights.safetensors import MAX_HEADER, PROBE, header_size, parse_header, rest_of_header

Entry = tuple[str, str, object, object]


def parse(data: bytes) -> list[str]:
    return [tensor.name for tensor in parse_header(data, len(data), "m.safetensors").tensors]


def built(*entries: Entry, data: int = 0) -> bytes:
    """A file whose header has the entries as they are and whose data section has `data` bytes."""
    document = {n: {"dtype": d, "shape": s, "data_offsets": o} for n, d, s, o in entries}
    return raw_header(document) + bytes(data)


def refuse(data: bytes, *words: str, kind: type[KvctlError] = FormatError) -> KvctlError:
    with pytest.raises(kind) as caught:
        parse_header(data, len(data), "m.safetensors")
    text = str(caught.value)
    assert "m.safetensors" in text
    for word in words:
        assert word in text, text
    return caught.value


def test_every_dtype_has_its_size_and_place() -> None:
    tensors: list[Spec] = [(f"t.{name}", name, (3, 4)) for name in DTYPES]
    data = file_bytes(tensors, metadata={"format": "pt"})
    header = parse_header(data, len(data), "m.safetensors")
    assert [tensor.dtype for tensor in header.tensors] == list(DTYPES)
    assert header.metadata == {"format": "pt"}
    assert header.file_size == len(data)
    assert header.raw == data[: header.header_size]
    assert {tensor.nbytes for tensor in header.tensors} == {6, 12, 24, 48, 96}


@pytest.mark.torch
def test_torch_has_every_dtype_under_the_name_we_give() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: install kvctl[torch]")
    for dtype in DTYPES.values():
        assert getattr(torch, dtype.torch).itemsize * 8 == dtype.bits * dtype.packed


def test_packed_elements_count_as_one_in_torch() -> None:
    assert torch_shape(DTYPES["F4"], (3, 8)) == (3, 4)
    assert torch_shape(DTYPES["F32"], (3, 8)) == (3, 8)


def test_scalars_and_zero_sizes_anywhere_are_valid() -> None:
    data = built(
        ("full", "U8", [4], [0, 4]),
        ("none_at_start", "F32", [0], [0, 0]),
        ("scalar", "F32", [], [4, 8]),
        ("none_inside", "F32", [2, 0], [4, 4]),
        ("none_at_end", "F32", [0, 9], [8, 8]),
        data=8,
    )
    assert parse(data) == ["none_at_start", "full", "none_inside", "scalar", "none_at_end"]
    assert parse(built(("none", "F32", [0], [0, 0]))) == ["none"]
    assert parse(raw_header({})) == []
    assert parse(raw_header({"__metadata__": None})) == []
    assert parse(raw_header({}, padding=6)) == []


def test_offsets_each_fault_has_its_own_words() -> None:
    refuse(built(("a", "U8", [4], [0, 4]), ("b", "U8", [4], [2, 6]), data=6), "'a' and 'b' overlap", "4", "2")
    refuse(built(("a", "U8", [4], [0, 4]), ("b", "U8", [4], [0, 4]), data=4), "overlap")
    refuse(built(("a", "U8", [4], [0, 4]), ("z", "U8", [0], [2, 2]), data=4), "overlap")
    refuse(built(("a", "U8", [4], [0, 4]), ("b", "U8", [4], [6, 10]), data=10), "hole", "'a'", "'b'")
    refuse(built(("a", "U8", [4], [2, 6]), data=6), "does not begin at 0", "begins at 2")
    refuse(built(("a", "U8", [4], [4, 0]), data=4), "begins after its end", "begin 4, end 0")
    refuse(built(("a", "F32", [4], [0, 4]), data=4), "takes 16 bytes, data_offsets give 4")


def test_numbers_each_fault_has_its_own_words() -> None:
    refuse(built(("a", "U8", [4.0], [0, 4]), data=4), "the float 4.0 in its shape")
    refuse(built(("a", "U8", [4], [0, 4e0]), data=4), "the float 4.0 in its data_offsets")
    refuse(built(("a", "U8", [-4], [0, 4]), data=4), "negative number in its shape: -4")
    refuse(built(("a", "U8", [4], [-4, 0]), data=4), "negative number in its data_offsets")
    refuse(built(("a", "U8", [1 << 63], [0, 4]), data=4), "overflows in its shape")
    refuse(built(("a", "U8", [1 << 32, 1 << 32], [0, 0])), "shape that overflows")
    refuse(built(("a", "F64", [1 << 60], [0, 0])), "size that overflows")
    refuse(built(("a", "U8", [True], [0, 1]), data=1), "True (bool)")
    refuse(built(("a", "U8", ["4"], [0, 4]), data=4), "'4' (str)")
    refuse(built(("a", "U8", None, [0, 4]), data=4), "a shape that is no list")
    refuse(built(("a", "U8", [4], [0, 4, 8]), data=4), "data_offsets that are no pair")
    huge = b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'
    refuse(len(huge).to_bytes(8, "little") + huge, "a number that overflows")


def reference(data: bytes) -> list[tuple[str, dict[str, Any]]]:  # Any: as the package gives it
    return list(safetensors.deserialize(data))  # type: ignore[no-untyped-call]


def text_file(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def test_duplicate_keys_are_named() -> None:
    one = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    refuse(text_file(b"{" + one + b"," + one + b"}"), "duplicate key 'a'")
    refuse(text_file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "duplicate key 'dtype'")
    refuse(text_file(b'{"__metadata__":{"k":"1","k":"2"}}'), "duplicate key 'k'")


def test_json_that_is_none_or_means_nothing_is_refused() -> None:
    refuse(text_file(b"{ "), "not valid JSON")
    refuse(text_file(b'{"a":NaN}'), "NaN")
    refuse(text_file(b'{"\xff":1}'), "not UTF-8")
    refuse(text_file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "lone surrogate")
    refuse(text_file(b"{}" + b"\0" * 6), "not valid JSON")
    refuse(text_file(b'{"a":' + b"[" * 100_000), "nested too deeply")
    refuse(text_file(b'{"a":3}'), "described by int")
    refuse(text_file(b'{"__metadata__":{"k":1}}'), "strings to strings")
    refuse(raw_header({"a": {"dtype": "U8", "shape": [0]}}), "no 'data_offsets'")
    refuse(
        raw_header({"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "device": "cpu"}}),
        "an unknown field 'device'",
    )
    refuse(raw_header({"a": {"dtype": 3, "shape": [0], "data_offsets": [0, 0]}}), "dtype that is no string")


def test_dtypes_that_nothing_can_hold_are_named() -> None:
    error = refuse(built(("w", "Q4_K", [4], [0, 4]), data=4), "'w'", "'Q4_K'", "unknown", kind=IncompatibleError)
    assert error.exit_code == 8
    refuse(built(("w", "F6_E2M3", [4], [0, 3]), data=3), "'w'", "F6_E2M3", kind=IncompatibleError)
    error = refuse(built(("w", "F4", [2, 3], [0, 3]), data=3), "'w'", "F4", "odd last dimension")
    assert error.exit_code == 7
    refuse(built(("w", "F4", [], [0, 0])), "odd last dimension")


def test_sizes_that_disagree_show_both() -> None:
    good = built(("a", "U8", [4], [0, 4]), data=4)
    error = refuse(good[:-1], str(len(good)), str(len(good) - 1), "shorter", kind=SizeMismatchError)
    assert error.exit_code == 7
    refuse(good + b"x", str(len(good)), str(len(good) + 1), "after its last tensor", kind=SizeMismatchError)
    refuse(good[:20], "shorter than its header", "20", kind=SizeMismatchError)
    with pytest.raises(SizeMismatchError, match="header is not whole"):
        parse_header(good[:20], len(good), "m.safetensors")


def a_zip() -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty file"),
        (b"abc", "text"),
        (b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>", "HTML page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML document"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n", "Git LFS pointer"),
        (b'{"error": "Repository not found"}', "JSON document"),
        (a_zip(), "zip archive"),
        (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}", "pickle"),
        (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
        (bytes(4096), "all zero"),
        (b"Not Found: the model does not exist here", "text"),
    ],
)
def test_other_files_are_told_by_what_they_look_like(data: bytes, words: str) -> None:
    refuse(data, "no safetensors file", "looks like", words)


def test_length_prefix_limits() -> None:
    assert MAX_HEADER == 100_000_000
    refuse(struct.pack("<Q", MAX_HEADER + 1) + b"{}", str(MAX_HEADER + 1), "limit")
    refuse(struct.pack("<Q", 1 << 63) + b"{}", "limit")
    refuse(struct.pack("<Q", 3) + b" {}", "must start with '{'")
    refuse(struct.pack("<Q", 1) + b"{", "smallest")


def test_the_second_read_is_the_rest_of_a_long_header() -> None:
    data = file_bytes([("a", "U8", (4,))], padding=PROBE)
    first = data[:PROBE]
    rest = rest_of_header(first, len(data), "m")
    assert rest == (PROBE, len(data) - 4 - PROBE)
    assert header_size(first, len(data), "m") == len(data) - 4
    assert rest_of_header(data[:PROBE], len(data), "m") is not None
    assert rest_of_header(file_bytes([("a", "U8", (4,))]), 100, "m") is None


NAMES = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSOR = st.tuples(NAMES, st.sampled_from(sorted(DTYPES)), SHAPES).map(
    lambda t: (t[0], t[1], (*t[2], 2) if t[1] == "F4" else t[2])
)
TENSORS = st.lists(TENSOR, max_size=6, unique_by=lambda tensor: tensor[0])


@settings(max_examples=100)
@given(TENSORS, st.dictionaries(NAMES, NAMES, max_size=3), st.integers(0, 9))
def test_valid_headers_mean_what_the_reference_package_says(
    tensors: list[Spec], metadata: dict[str, str], padding: int
) -> None:
    data = file_bytes(tensors, metadata=metadata, padding=padding)
    header = parse_header(data, len(data), "m")
    theirs = {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in reference(data)}
    ours = {
        tensor.name: (
            tensor.dtype,
            tensor.shape,
            data[header.header_size + tensor.start : header.header_size + tensor.end],
        )
        for tensor in header.tensors
    }
    assert ours == theirs
    assert header.metadata == metadata


@settings(max_examples=30)
@given(TENSORS.filter(bool))
def test_files_written_by_the_reference_package_parse(tensors: list[Spec]) -> None:
    arrays = {name: np.zeros(shape, np.int16) for name, dtype, shape in tensors}
    data = save(arrays)
    header = parse_header(data, len(data), "m")
    assert {tensor.name: tensor.shape for tensor in header.tensors} == {name: shape for name, _, shape in tensors}


@settings(max_examples=200)
@given(TENSORS, st.data())
def test_damaged_headers_raise_our_errors_only(tensors: list[Spec], data: st.DataObject) -> None:
    raw = bytearray(file_bytes(tensors, metadata={"a": "b"}))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.one_of(st.sampled_from(list(b'{}[]",:-.0189eE\\u ')), st.integers(0, 255)))
    cut = data.draw(st.integers(0, len(raw)))
    for candidate in (bytes(raw), bytes(raw[:cut])):
        try:
            parse_header(candidate, len(candidate), "m")
        except KvctlError:
            continue
        reference(candidate)  # what we accept, the reference accepts


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {}, optional={"dtype": JSON | st.just("U8"), "shape": JSON | st.just([2]), "data_offsets": JSON | st.just([0, 2])}
)


@settings(max_examples=200)
@given(st.dictionaries(st.text(max_size=5), ENTRY | JSON, max_size=3), st.integers(0, 4))
def test_any_json_raises_our_errors_only(document: dict[str, object], data: int) -> None:
    raw = raw_header(document) + bytes(data)
    try:
        parse_header(raw, len(raw), "m")
    except KvctlError:
        return
    reference(raw)


def test_a_real_file_on_disk_parses_from_its_first_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes([("a", "F32", (100, 100)), ("b", "BF16", (7,))]))
    with path.open("rb") as file:
        header = parse_header(file.read(PROBE), path.stat().st_size, str(path))
    document = header_document([("a", "F32", (100, 100)), ("b", "BF16", (7,))])
    assert json.loads(header.raw[8:]) == document
