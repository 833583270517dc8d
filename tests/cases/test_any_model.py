"""Any model, any stripe size, any members, any slice, through the real push and load: the bytes are those of a plain
read."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import IncompatibleError
from kvctl.repo.chunks import LEAF
from kvctl.testing.models import Spec, header_document, raw_header
from kvctl.weights.load import load_into
from kvctl.weights.push import PushRequest, push_weights
from kvctl.weights.request import LoadRequest
from kvctl.weights.targets import MemoryTarget
from tests.cases.world import make_repo, quick

WIDTH = {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}
# name, which dimension ranks share
NAMES = {"self_attn.q_proj.weight": 0, "self_attn.o_proj.weight": 1, "mlp.up_proj.weight": 0, "mlp.down_proj.weight": 1,
         "input_layernorm.weight": None, "self_attn.rotary_emb.inv_freq": None, "strange.matrix": None}  # fmt: skip
_NUMBERS = itertools.count()


@st.composite
def models(draw: st.DrawFn) -> list[Spec]:
    """Up to four layers of a few tensors, from empty ones to some that take several stripes."""
    found: list[Spec] = []
    for layer in range(draw(st.integers(1, 4))):
        for name in draw(st.lists(st.sampled_from(sorted(NAMES)), unique=True, min_size=1, max_size=5)):
            rows = 8 * draw(st.sampled_from([0, 1, 3, 16, 40]))
            columns = 8 * draw(st.sampled_from([1, 5, 64, 130]))
            shape = (columns,) if "norm" in name else (rows, columns)
            found.append((f"model.layers.{layer}.{name}", draw(st.sampled_from(sorted(WIDTH))), shape))
    return found


def content(tensor: Spec) -> np.ndarray:
    """The tensor's bytes, as rows of bytes of its last dimension; every tensor and place its own."""
    name, dtype, shape = tensor
    size = int(np.prod(shape)) * WIDTH[dtype]
    mixed = (np.arange(size, dtype=np.uint64) + sum(name.encode()) * 7919) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(33)).astype(np.uint8).reshape(*shape, WIDTH[dtype])


def write(folder: str, tensors: Sequence[Spec], shards: int) -> None:
    for number in range(shards):
        part = tensors[number * len(tensors) // shards : (number + 1) * len(tensors) // shards]
        with open(f"{folder}/model-{number + 1:05d}-of-{shards:05d}.safetensors", "wb") as file:
            file.write(raw_header(header_document(part), padding=number))
            file.writelines(content(tensor).tobytes() for tensor in part)


def loaded(request: LoadRequest) -> dict[str, bytes]:
    """Name -> bytes of the tensors of a load into memory."""
    report, result = load_into(request, MemoryTarget(), quick())
    assert result is not None
    found = {}
    for tensor in result.plan.tensors:
        landing = result.landings[tensor.output]
        at = landing.data_start
        found[tensor.name] = bytes(landing.buffer.view[at + tensor.start : at + tensor.end])
    for landing in result.landings:
        landing.buffer.close()
    if any(found.values()):
        assert report.verified.state == ("leaves" if request.repo else "none")
    return found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    tensors=models(), shards=st.integers(1, 3), stripe=st.sampled_from([LEAF, 2 * LEAF, 16 * LEAF]),
    members=st.integers(1, 4), replicas=st.integers(1, 2), size=st.sampled_from([1, 2, 4, 8]), data=st.data(),
)  # fmt: skip
def test_what_is_loaded_is_what_was_pushed(
    tensors: list[Spec], shards: int, stripe: int, members: int, replicas: int, size: int, data: st.DataObject
) -> None:
    number = next(_NUMBERS)
    stores = tuple(StoreConfig(f"mem://any-model-{os.getpid()}-{number}-{member}") for member in range(members))
    rank = data.draw(st.integers(0, size - 1), label="rank")
    shards = min(shards, len(tensors))
    with tempfile.TemporaryDirectory() as folder:
        write(folder, tensors, shards)
        make_repo(stores, replicas=min(replicas, members), stripe=stripe)
        push_weights(PushRequest(folder, "m", stores), quick())
        again = push_weights(PushRequest(folder, "m", stores), quick())
        assert again.written == 0
        whole = {tensor[0]: content(tensor) for tensor in tensors}
        for repo in (None, stores):
            address = folder if repo is None else "m"
            assert loaded(LoadRequest(address, repo=repo)) == {name: value.tobytes() for name, value in whole.items()}
            try:
                slices = loaded(LoadRequest(address, repo=repo, tp_size=size, tp_rank=rank))
            except IncompatibleError:
                continue
            for name, value in whole.items():
                dim = next(dim for part, dim in NAMES.items() if name.endswith(part))
                if size > 1 and dim is not None:
                    step = value.shape[dim] // size
                    value = np.take(value, range(rank * step, (rank + 1) * step), axis=dim)
                assert slices[name] == value.tobytes(), name
