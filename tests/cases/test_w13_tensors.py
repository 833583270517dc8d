"""W13, W14, W17: unusual but valid tensors, and what the caller may keep."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvctl as api
from kvctl.testing.faulty_s3 import FaultyS3
from kvctl.testing.models import Spec, file_bytes, raw_header, tensor_bytes
from kvctl.weights.dtypes import DTYPES, torch_shape
from tests.cases.world import files_of, folders, kvctl, make_repo, push

ZERO: dict[str, list[Spec]] = {
    "alone": [("z", "F32", (0, 4))],
    "at the end": [("a", "F32", (3, 4)), ("z", "BF16", (2, 0))],
    "before a full one at offset 0": [("z", "F32", (0,)), ("a", "F32", (3, 4))],
    "several": [("y", "U8", (0,)), ("z", "F64", (0, 0)), ("a", "U8", (5,)), ("x", "F16", (7, 0)), ("b", "U8", (1,))],
}


@pytest.mark.parametrize("case", [*ZERO, "listed after the full one"])
@pytest.mark.parametrize("through", ["plain", "repo"])
def test_w13_zero_size_tensors_load_and_no_empty_request_is_sent(
    case: str, through: str, tmp_path: Path, server: FaultyS3
) -> None:
    if case == "listed after the full one":
        document = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
        document["z"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        data, names = raw_header(document) + b"abcd", {"a", "z"}
    else:
        data, names = file_bytes(ZERO[case]), {tensor[0] for tensor in ZERO[case]}
    server.put("m/model.safetensors", data)
    address: tuple[str, ...] = ("s3://bucket/m", "--endpoint-url", server.endpoint)
    if through == "repo":
        store = server.store("repo")
        make_repo([store])
        push(f"s3://bucket/m?endpoint={server.endpoint}", [store])
        address = ("m", "-r", "s3://bucket/repo", "--endpoint-url", server.endpoint)
    server.log.clear()
    done = kvctl("load-weights", *address, "--into", "dir:out", "-o", "json")
    assert done.code == 0, done.err
    assert done.document["tensors"] == len(names)
    assert files_of(tmp_path / "out")["model.safetensors"] == data
    for item in server.requests("GET"):
        assert item.status in {200, 206, 404}, item
        if item.range:
            first, last = item.range.removeprefix("bytes=").split("-")
            assert not last or int(last) >= int(first), item.range


def test_w14_every_dtype_and_scalars_have_the_right_torch_dtype_and_bytes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: install kvctl[torch]")
    tensors: list[Spec] = [(f"t.{name}", name, (3, 4)) for name in DTYPES]
    tensors += [(f"s.{name}", name, ()) for name in DTYPES if DTYPES[name].packed == 1]
    source = tmp_path / "model.safetensors"
    source.write_bytes(file_bytes(tensors))
    stores = folders(tmp_path, "a", "b")
    make_repo(stores)
    push(source, stores)
    for loaded in (
        api.load_weights(str(source)),
        api.load_weights("m", repo=[store.url for store in stores]),
    ):
        assert set(loaded) == {tensor[0] for tensor in tensors}
        for name, dtype, shape in tensors:
            value = loaded[name]
            assert value.dtype == getattr(torch, DTYPES[dtype].torch)
            assert tuple(value.shape) == torch_shape(DTYPES[dtype], shape)
            flat = value.reshape(-1) if value.dim() == 0 else value.contiguous().reshape(-1)
            assert bytes(flat.view(torch.uint8).numpy()) == tensor_bytes((name, dtype, shape)), name


def test_w17_tensors_that_are_kept_never_change(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: install kvctl[torch]")
    tensors: list[Spec] = [(f"t{number}", "U8", (1 << 20,)) for number in range(8)]
    source = tmp_path / "model.safetensors"
    source.write_bytes(file_bytes(tensors))
    stores = folders(tmp_path, "a")
    make_repo(stores)
    push(source, stores)
    repo = [store.url for store in stores]
    kept = [dict(api.open_model("m", repo=repo)), api.load_weights("m", repo=repo), api.load_weights(str(source))]
    one = api.load_weights(str(source))["t3"]  # the rest of its model is given back
    source.write_bytes(file_bytes(tensors, seed=7))
    for number in range(4):  # memory that was freed is used again
        del number
        api.load_weights(str(source))
    for loaded in kept:
        for tensor in tensors:
            assert bytes(loaded[tensor[0]].numpy()) == tensor_bytes(tensor)
    assert bytes(one.numpy()) == tensor_bytes(tensors[3])
    assert torch.equal(one, kept[0]["t3"])
