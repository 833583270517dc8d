"""Weights as a stream of tensors: complete, verified, in bounded memory, and ended early without a trace."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import IntegrityError, KvctlError
from kvctl.memory.buffers import PAGE, HostBuffer
from kvctl.repo.repo import Repo
from kvctl.weights.models import digest_model
from kvctl.weights.push import PushRequest, push_weights
from kvctl.weights.request import LoadRequest
from kvctl.weights.streaming import TensorStream


def model(folder: Path, sizes: list[int], files: int = 2) -> dict[str, bytes]:
    """U8 tensors t0, t1, .. of these sizes, spread over some files."""
    folder.mkdir(parents=True)
    made = random.Random(0)
    tensors = {f"t{number}": made.randbytes(size) for number, size in enumerate(sizes)}
    for number in range(files):
        own = [name for name in tensors if int(name[1:]) % files == number]
        header, at = {}, 0
        for name in own:
            size = len(tensors[name])
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        body = b"".join(tensors[name] for name in own)
        (folder / f"model-{number}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    index = {"metadata": {}, "weight_map": {name: f"model-{int(name[1:]) % files}.safetensors" for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


SIZES = [0, 1, 4097, 300_000, 12, 5 << 20, 70_000, 1 << 20]


@pytest.mark.parametrize("kind", ["folder", "repo"])
def test_every_tensor_comes_once_with_its_bytes(tmp_path: Path, kind: str) -> None:
    tensors = model(tmp_path / "m", SIZES)
    request = LoadRequest(str(tmp_path / "m"))
    digest = digest_model(str(tmp_path / "m"), None, None, None, Context())[0].digest
    if kind == "repo":
        store = StoreConfig(f"file://{tmp_path}/repo")
        Repo.init([store], ctx=Context()).close()
        push_weights(PushRequest(str(tmp_path / "m"), "m", (store,)), Context())
        request = LoadRequest("m", repo=(store,))
    with TensorStream(request, Context()) as stream:
        assert stream.digest == (digest if kind == "repo" else None)
        found = [(tensor.name, bytes(data)) for tensor, data in stream]
    assert len(found) == len(tensors)
    assert dict(found) == tensors
    assert stream.report.bytes == stream.report.fetched == sum(SIZES)
    assert stream.report.verified.state == ("leaves" if kind == "repo" else "none")


def test_what_waits_is_bounded_and_what_was_let_go_takes_no_memory(tmp_path: Path) -> None:
    """The consumer keeps nothing: of 64 MiB, no more than a few MiB are ever resident."""
    model(tmp_path / "m", [1 << 20] * 64, files=4)
    with TensorStream(
        LoadRequest(str(tmp_path / "m"), max_in_flight_bytes=4 << 20), Context(), ahead=4 << 20
    ) as stream:
        most = 0
        for _, data in stream:
            del data
            most = max(most, sum(resident(buffer) for buffer in stream._target._buffers))
    assert most < 32 << 20


def resident(buffer: HostBuffer) -> int:
    """Bytes of a buffer that are in memory. (Not from smaps: mappings that touch are told there as one.)"""
    pages = -(-buffer.nbytes // PAGE)
    found = (ctypes.c_ubyte * pages)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(buffer.address), ctypes.c_size_t(buffer.nbytes), found)
    return PAGE * sum(page & 1 for page in found)


def test_a_tensor_that_is_kept_keeps_its_bytes(tmp_path: Path) -> None:
    tensors = model(tmp_path / "m", [200_000] * 20)
    kept: dict[str, Any] = {}
    with TensorStream(LoadRequest(str(tmp_path / "m")), Context(), ahead=200_000) as stream:
        for tensor, data in stream:
            if int(tensor.name[1:]) % 3 == 0:
                kept[tensor.name] = data
            del data
    gc.collect()
    assert {name: bytes(data) for name, data in kept.items()} == {name: tensors[name] for name in kept}


def test_leaving_early_ends_the_load(tmp_path: Path) -> None:
    model(tmp_path / "m", [1 << 20] * 16)
    before = threading.active_count()
    with TensorStream(LoadRequest(str(tmp_path / "m")), Context(), ahead=1) as stream:
        for _ in stream:
            break
    assert threading.active_count() == before


def test_damage_ends_the_iteration_with_its_error(tmp_path: Path) -> None:
    model(tmp_path / "m", [1 << 20] * 8)
    store = StoreConfig(f"file://{tmp_path}/repo")
    Repo.init([store], ctx=Context()).close()
    push_weights(PushRequest(str(tmp_path / "m"), "m", (store,)), Context())
    chunk = max((tmp_path / "repo" / "chunks").rglob("*.*"), key=lambda path: path.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.chmod(0o644)
    chunk.write_bytes(data)
    with TensorStream(LoadRequest("m", repo=(store,)), Context()) as stream, pytest.raises(IntegrityError):
        for _ in stream:
            pass


def test_what_is_wrong_with_the_source_is_said_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(KvctlError):
        TensorStream(LoadRequest(str(tmp_path / "nothing")), Context())
