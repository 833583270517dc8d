"""Digests: the documented framing, independence from files and order, the digests file."""

from __future__ import annotations

import itertools
import json

import blake3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.errors import FormatError, IntegrityError, KvctlError
from kvctl.weights.digests import (
    DigestsFile,
    TensorDigest,
    TensorHasher,
    model_digest,
    parse_digests,
    tensor_digest,
)
from kvctl.weights.safetensors import TensorInfo


def hashed(data: bytes) -> bytes:
    return blake3.blake3(data).digest()


def test_the_tensor_digest_has_the_documented_framing() -> None:
    tensor = TensorInfo("w", "BF16", (2, 3), 100, 112)
    framed = (
        b"kvctl.tensor/1\0\x04\x00\x00\x00BF16\x02\x00\x00\x00"
        + (2).to_bytes(8, "little")
        + (3).to_bytes(8, "little")
        + (12).to_bytes(8, "little")
        + b"abcdefghijkl"
    )
    assert tensor_digest(tensor, b"abcdefghijkl") == hashed(framed).hex()


def test_the_model_digest_has_the_documented_tree() -> None:
    tensors = [TensorDigest(name, "U8", (1,), hashed(name.encode()).hex()) for name in ("b", "a", "c")]

    def leaf(name: bytes) -> bytes:
        frame = b"\x02\x00\x00\x00U8\x01\x00\x00\x00" + (1).to_bytes(8, "little")
        return hashed(b"kvctl.model.leaf/1\0\x01\x00\x00\x00" + name + frame + hashed(name))

    left = hashed(b"kvctl.model.node/1\0" + leaf(b"a") + leaf(b"b"))
    top = hashed(b"kvctl.model.node/1\0" + left + leaf(b"c"))
    assert model_digest(tensors) == hashed(b"kvctl.model/1\0" + (3).to_bytes(8, "little") + top).hex()
    assert model_digest([]) == hashed(b"kvctl.model/1\0" + bytes(8) + bytes(32)).hex()


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=5))
@settings(max_examples=50)
def test_pieces_give_the_digest_of_the_whole(data: bytes, cuts: list[int]) -> None:
    hasher = TensorHasher("U8", (len(data),), len(data))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(places):
        hasher.update(memoryview(data)[start:stop])
    assert hasher.digest() == tensor_digest(TensorInfo("x", "U8", (len(data),), 0, len(data)), data)


def test_a_tensor_must_be_hashed_whole() -> None:
    hasher = TensorHasher("U8", (4,), 4)
    hasher.update(b"abc")
    assert hasher.missing == 1
    with pytest.raises(IntegrityError, match="1 bytes are missing"):
        hasher.digest()


DIGEST = st.binary(min_size=32, max_size=32).map(bytes.hex)
TENSORS = st.lists(
    st.builds(TensorDigest, st.text(max_size=5), st.sampled_from(["U8", "F32"]), st.tuples(st.integers(0, 9)), DIGEST),
    max_size=7,
    unique_by=lambda tensor: tensor.name,
)


@given(TENSORS, st.data())
@settings(max_examples=60)
def test_the_model_digest_depends_on_the_tensors_only(tensors: list[TensorDigest], data: st.DataObject) -> None:
    digest = model_digest(tensors)
    assert model_digest(data.draw(st.permutations(tensors))) == digest
    seen = {digest}
    for number, tensor in enumerate(tensors):
        for other in (
            TensorDigest(tensor.name + "x", tensor.dtype, tensor.shape, tensor.digest),
            TensorDigest(tensor.name, "I8", tensor.shape, tensor.digest),
            TensorDigest(tensor.name, tensor.dtype, (*tensor.shape, 1), tensor.digest),
            TensorDigest(tensor.name, tensor.dtype, tensor.shape, hashed(bytes.fromhex(tensor.digest)).hex()),
        ):
            seen.add(model_digest([*tensors[:number], other, *tensors[number + 1 :]]))
    assert len(seen) == 1 + 4 * len(tensors)


@given(TENSORS)
@settings(max_examples=40)
def test_the_digests_file_goes_to_json_and_back(tensors: list[TensorDigest]) -> None:
    file = DigestsFile(tuple(tensors))
    back = parse_digests(json.dumps(file.to_json()).encode(), "f")
    assert back.digest == file.digest
    assert back.by_name() == file.by_name()


def test_a_digests_file_that_was_edited_is_refused() -> None:
    document = DigestsFile((TensorDigest("a", "U8", (1,), "0" * 64),)).to_json()
    document["tensors"]["a"]["blake3"] = "1" * 64
    with pytest.raises(FormatError, match="does not match its own digest"):
        parse_digests(json.dumps(document).encode(), "f")
    for change in ({"blake3": "x"}, {"shape": [-1]}, {"shape": 3}, {"dtype": None}):
        document["tensors"]["a"] = {"dtype": "U8", "shape": [1], "blake3": "0" * 64, **change}
        with pytest.raises(FormatError, match="tensor 'a'"):
            parse_digests(json.dumps(document).encode(), "f")


@given(st.binary(max_size=40) | st.sampled_from([b"{}", b"[]", b'{"schema":"kvctl.digests/1"}']))
@settings(max_examples=40)
def test_any_bytes_raise_our_errors_only(data: bytes) -> None:
    with pytest.raises(KvctlError):
        parse_digests(data, "f")
