"""Bundles: written and read back, as files and streams; what is damaged or does not fit is refused."""

from __future__ import annotations

import io
import json
import os
import random
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.errors import (
    CapacityError,
    EnvError,
    FormatError,
    KvctlError,
    NotFoundError,
    UsageError,
    VersionChangedError,
)
from kvctl.kv import bundle
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.seams import LayerKv, slot_of
from kvctl.kv.tokens import Extra

IDS = array("I", range(100, 130))
DESCRIPTOR = Descriptor(
    weights="11" * 32,
    tokenizer="22" * 32,
    rope="33" * 32,
    dtype="BF16",
    groups=(
        Group("sliding", (0, 2), 2, 4, 4, 8),
        Group("full", (1,), 2, 4, 6),
        Group("mla", (3,), 1, 16, 4),
        Group("indexer", (3,), 1, 8, 0),
        Group("recurrent", (4,), 1, 24, 0),
    ),
)


def layers(descriptor: Descriptor, count: int, start: int = 23) -> dict[tuple[int, int], LayerKv]:
    made = random.Random(5)
    found = {}
    for number, group in enumerate(descriptor.groups):
        for layer in group.layers:
            first = min(start, count) if group.window else 0
            slot = slot_of(number, group, descriptor.dtype, layer, (0, group.kv_heads), first, count)
            k, v = made.randbytes(slot.k_bytes), made.randbytes(slot.v_bytes)
            found[number, layer] = LayerKv(memoryview(k), memoryview(v), first)
    return found


def written() -> bytes:
    stream = io.BytesIO()
    bundle.write_bundle(stream, DESCRIPTOR, 30, layers(DESCRIPTOR, 30), token_ids=IDS)
    return stream.getvalue()


def test_a_bundle_comes_back_from_a_file_and_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    made = layers(DESCRIPTOR, 30)
    extras = (Extra(3, 4, "image", b"\xab" * 32),)
    size = bundle.write_bundle(path, DESCRIPTOR, 30, made, token_ids=IDS, producer={"model": "tiny"}, extras=extras)
    assert path.stat().st_size == size
    assert [item.name for item in tmp_path.iterdir()] == ["chat.kv"]
    for source in (path, str(path), io.BytesIO(path.read_bytes())):
        with bundle.read_bundle(source) as found:
            assert (found.descriptor, found.tokens, found.token_ids) == (DESCRIPTOR, 30, IDS)
            assert (found.producer, found.extras) == ({"model": "tiny"}, extras)
            assert found.layers == made
            assert found.source().extras == extras
            with pytest.raises(UsageError, match="is not the one"):
                found.source(list(range(30)))


def test_a_bundle_is_a_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="pip install safetensors")
    (tmp_path / "x").write_bytes(written())
    with safetensors.safe_open(tmp_path / "x", "np") as file:
        assert sorted(file.keys()) == [
            *("layer.0.k", "layer.0.v", "layer.1.k", "layer.1.v", "layer.2.k", "layer.2.v"),
            *("layer.3.indexer", "layer.3.k", "layer.3.v", "layer.4.state"),
        ]
        assert file.get_slice("layer.0.k").get_shape() == [2, 7, 4]
        assert json.loads(file.metadata()["starts"]) == {"0": 23, "2": 23}


def test_without_token_ids_the_transcript_is_needed() -> None:
    stream = io.BytesIO()
    bundle.write_bundle(stream, DESCRIPTOR, 30, layers(DESCRIPTOR, 30))
    stream.seek(0)
    with bundle.read_bundle(stream) as found:
        assert found.token_ids is None
        with pytest.raises(UsageError, match="holds no token ids"):
            found.source()
        assert found.source(IDS).tokens == IDS
        with pytest.raises(UsageError):
            found.source(IDS[:-1])


def test_what_cannot_be_read_or_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        bundle.read_bundle(tmp_path / "none")
    with pytest.raises(EnvError):
        bundle.read_bundle(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    for damaged in (b"", b"\x01", b"\x00" * 8, written()[:-1], written() + b"x", written()[:5000]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(KvctlError):
            bundle.read_bundle(tmp_path / "damaged")
        with pytest.raises(KvctlError):
            bundle.read_bundle(io.BytesIO(damaged))
    with pytest.raises((EnvError, CapacityError)):
        bundle.write_bundle(tmp_path / "no" / "folder", DESCRIPTOR, 30, layers(DESCRIPTOR, 30))
    with pytest.raises(UsageError, match="layer 0 is missing"):
        bundle.write_bundle(tmp_path / "x", DESCRIPTOR, 30, {})
    with pytest.raises(UsageError, match="wrong size"):
        bundle.write_bundle(tmp_path / "x", DESCRIPTOR, 30, layers(DESCRIPTOR, 29))
    assert not list(tmp_path.glob("x*"))


def edited(change: dict[str, str], tensor: dict[str, object] | None = None) -> bytes:
    data = written()
    size = 8 + int.from_bytes(data[:8], "little")
    document = json.loads(data[8:size])
    document["__metadata__"].update(change)
    document["layer.1.v"].update(tensor or {})
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + data[size:]


@pytest.mark.parametrize(
    "data",
    [
        edited({"kvctl.bundle": "2"}),
        edited({"identity": "{}"}),
        edited({"tokens": "31"}),
        edited({"tokens": "-30"}),
        edited({"token_ids": "AAAA"}),
        edited({"token_ids": "!"}),
        edited({"starts": '{"0": 24, "2": 23}'}),  # a window of 8 at 30 tokens needs tokens from 23 on
        edited({"starts": "[]"}),
        edited({"starts": '{"x": 1}'}),
        edited({"producer": "[1]"}),
        edited({"extras": "[[0, 1, 2]]"}),
        edited({"extras": '[[0, 1, "image", "zz"]]'}),
        edited({"more": "1"}),
        edited({}, {"dtype": "F32"}),
        edited({}, {"shape": [2, 30, 5]}),
        edited({}, {"data_offsets": [0, 720]}),
        edited({}, {"data_offsets": [0]}),
        edited({}, {"data_offsets": "x"}),
    ],
)
def test_bundles_that_contradict_themselves_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        bundle.read_bundle(io.BytesIO(data))


@given(st.data())
@settings(max_examples=80)
def test_damaged_headers_raise_errors_of_ours_only(data: st.DataObject) -> None:
    damaged = bytearray(written())
    size = 8 + int.from_bytes(damaged[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    try:
        found = bundle.read_bundle(io.BytesIO(damaged))
    except KvctlError:
        return
    assert found.tokens == 30
    found.close()


def test_a_file_that_is_written_to_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(written())
    with bundle.read_bundle(path) as found:
        source = found.source()
        source.check()
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        os.utime(path, ns=(1, 1))  # whatever the clock's resolution
        with pytest.raises(VersionChangedError, match="changed while it was read"):
            source.check()
    path.unlink()
    path.write_bytes(written())
    with bundle.read_bundle(path) as found:
        path.unlink()
        path.write_bytes(written())  # another file of the same name is another's
        found.source().check()
