"""The Python API with real torch: names, dtypes, values, ownership."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

import kvctl
from kvctl.core.errors import FormatError, UsageError
from kvctl.testing.models import Spec, file_bytes, write_llama

torch = pytest.importorskip("torch", reason="the tensor API needs torch: pip install 'kvctl[torch]'")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="compared with: pip install safetensors")

pytestmark = pytest.mark.torch


def same(ours: object, theirs: object) -> bool:
    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return bool((ours.contiguous().view(-1).view(torch.uint8) == theirs.contiguous().view(-1).view(torch.uint8)).all())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_what_safetensors_gives(tmp_path: Path, shards: int) -> None:
    write_llama(str(tmp_path), shards=shards)
    ours = kvctl.load_weights(str(tmp_path))
    theirs: dict[str, object] = {}
    for file in tmp_path.glob("*.safetensors"):
        theirs |= safetensors_torch.load_file(file)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)


def test_every_dtype_scalars_and_zero_size_tensors(tmp_path: Path) -> None:
    kinds = "BOOL U8 I8 F8_E4M3 F8_E5M2 I16 U16 F16 BF16 I32 U32 F32 I64 U64 F64 C64"
    tensors: list[Spec] = [(f"t.{kind}", kind, (3, 2)) for kind in kinds.split()]
    tensors += [("scalar", "F32", ()), ("empty", "BF16", (0, 7)), ("packed", "F4", (2, 4)), ("scale", "F8_E8M0", (2,))]
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(tensors, padding=5))
    ours = kvctl.load_weights(str(path))
    assert ours["scalar"].shape == ()
    assert ours["empty"].shape == (0, 7)
    assert ours["packed"].shape == (2, 2)
    assert ours["packed"].dtype == torch.float4_e2m1fn_x2
    theirs = safetensors_torch.load_file(path)
    for name in set(theirs) - {"packed", "empty"}:
        assert same(ours[name], theirs[name]), name


def test_kept_tensors_never_change(tmp_path: Path) -> None:
    """A consumer that keeps tensors after the loader moved on, and after other loads."""
    write_llama(str(tmp_path / "a"), seed=1)
    write_llama(str(tmp_path / "b"), seed=2)
    kept = {name: (tensor, tensor.clone()) for name, tensor in kvctl.open_model(str(tmp_path / "a"))}
    gc.collect()
    for _ in range(3):
        kvctl.load_weights(str(tmp_path / "b"))
    os.unlink(tmp_path / "a" / "model.safetensors")
    assert all(same(now, then) for now, then in kept.values())


def test_open_model_knows_shapes_before_it_loads(tmp_path: Path) -> None:
    write_llama(str(tmp_path))
    model = kvctl.open_model(str(tmp_path))
    assert len(model) == len(model.names)
    described = model.describe("model.norm.weight")
    tensors, report = model.load()
    assert tensors["model.norm.weight"].shape == described.shape
    assert report.bytes == report.fetched == sum(tensor.nbytes for tensor in tensors.values())


def test_nothing_is_handed_over_when_a_header_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"<html>404</html>")
    with pytest.raises(FormatError):
        kvctl.load_weights(str(tmp_path))


def test_an_unknown_option_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        kvctl.load_weights(str(tmp_path), no_such_option=1)
