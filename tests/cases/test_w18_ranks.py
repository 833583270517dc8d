"""W18: what tensor-parallel ranks ask for, counted by the server's log: the sharded part once over all ranks, the
replicated part once for each, and headers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from kvctl.testing.faulty_s3 import FaultyS3
from kvctl.testing.models import LlamaShape, Spec, header_document, raw_header
from kvctl.testing.s3_protocol import Stored
from kvctl.weights.load import plan_load
from kvctl.weights.request import LoadRequest
from kvctl.weights.safetensors import parse_header
from kvctl.weights.slicing import slice_model
from tests.cases.world import kvctl, make_repo, push, quick

# 69 MB in two layers: the rounding to leaves of 256 KiB is small beside a rank's slices
SHAPE = LlamaShape(layers=2, hidden=2048, heads=16, kv_heads=8, head_dim=128, inner=2048, vocab=1024)
SIZES = [2, 4, 8]


@cache
def model() -> dict[str, bytes]:
    """One shard per layer part; bytes that differ between tensors and places, made without a loop over bytes."""
    tensors = SHAPE.tensors()
    half = len(tensors) // 2
    files: dict[str, bytes] = {"config.json": json.dumps(SHAPE.config()).encode()}
    weight_map: dict[str, str] = {}
    for number, part in enumerate((tensors[:half], tensors[half:]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        files[name] = raw_header(header_document(part)) + b"".join(pattern(tensor) for tensor in part)
        weight_map.update((tensor[0], name) for tensor in part)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files


def pattern(tensor: Spec) -> bytes:
    size = 2
    for dim in tensor[2]:
        size *= dim
    seed = sum(tensor[0].encode()) % 251
    # a period that no power of two divides: rows differ
    period = bytes((seed + number * 7) % 256 for number in range(10007))
    return (period * (size // len(period) + 1))[:size]


PUSHED: dict[tuple[str, str], Stored] = {}  # what the first push wrote; later servers start with it


def stored(server: FaultyS3) -> None:
    """The model is in the bucket as it is, and in a repo."""
    for name, data in model().items():
        server.put(f"m/{name}", data)
    if not PUSHED:
        store = server.store("repo")
        make_repo([store], stripe=16 << 20)
        push(f"s3://bucket/m?endpoint={server.endpoint}", [store])
        PUSHED.update((place, item) for place, item in server.objects.items() if place[1].startswith("repo/"))
    server.objects.update(PUSHED)
    server.log.clear()


def shares(size: int) -> tuple[int, int]:
    """(bytes of all ranks' sharded slices, bytes of the tensors that each rank holds whole)."""
    sharded = replicated = 0
    tensors = [
        tensor
        for name, data in model().items()
        if name.endswith(".safetensors")
        for tensor in parse_header(data, len(data), name).tensors
    ]
    for rank in range(size):
        found = slice_model(tensors, rank, size, config=SHAPE.config())
        sharded, replicated = sharded + found.sharded_bytes, found.replicated_bytes
    return sharded, replicated


def sent(server: FaultyS3, key: str) -> int:
    return sum(item.sent for item in server.requests("GET", key) if item.status == 206)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_a_repos_model_ask_for_their_slices_exactly(size: int, server: FaultyS3) -> None:
    stored(server)
    sharded, replicated = shares(size)
    assert sharded + replicated == sum(tensor_bytes(name) for name in model())
    small = 0
    for rank in range(size):
        done = kvctl(
            "load-weights", "m", "-r", "s3://bucket/repo", "--endpoint-url", server.endpoint, "--tp-size", size,
            "--tp-rank", rank, "-o", "json",
        )  # fmt: skip
        assert done.code == 0, done.err
        assert done.document["verified"]["state"] == "leaves"
        small += done.document["metadata_bytes"]
        assert done.document["bytes"] == done.document["tp"]["sharded_bytes"] + done.document["tp"]["replicated_bytes"]
    # ranged answers are bulk; headers, tables and manifests are whole objects
    bulk = sent(server, "repo/chunks/*")
    assert sharded + size * replicated <= bulk <= 1.02 * (sharded + size * replicated)
    whole = sum(item.sent for item in server.requests("GET", "repo/chunks/*") if item.status == 200)
    assert whole <= small + size * len(model()["config.json"])


def tensor_bytes(name: str) -> int:
    data = model()[name]
    return parse_header(data, len(data), name).data_size if name.endswith(".safetensors") else 0


@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_a_plain_model_ask_for_dim_0_slices_exactly_and_say_what_they_read_too_much(
    size: int, server: FaultyS3
) -> None:
    stored(server)
    source = f"s3://bucket/m?endpoint={server.endpoint}"
    sharded, replicated = shares(size)
    strided = 2 * SHAPE.layers * SHAPE.hidden * (SHAPE.heads * SHAPE.head_dim + SHAPE.inner)  # o_proj and down_proj
    fetched = 0
    for rank in range(size):
        plan = plan_load(LoadRequest(source, tp_rank=rank, tp_size=size), quick())
        fetched += plan.fetched_bytes
    server.log.clear()
    for rank in range(size):
        done = kvctl(
            "load-weights", "s3://bucket/m", "--endpoint-url", server.endpoint, "--tp-size", size, "--tp-rank", rank,
            "-o", "json",
        )  # fmt: skip
        assert done.code == 0, done.err
    probes = size * 2 * 65536
    assert sent(server, "m/*.safetensors") - probes == fetched
    # each rank alone reads a strided tensor whole; everything else once
    exact = sharded - strided + size * replicated
    assert fetched <= 1.02 * (exact + size * strided)
    assert fetched >= exact


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("through", ["plain", "repo"])
def test_all_ranks_in_one_process_read_every_byte_once(
    size: int, through: str, tmp_path: Path, server: FaultyS3
) -> None:
    stored(server)
    address: tuple[object, ...] = ("s3://bucket/m",)
    key = "m/*.safetensors"
    if through == "repo":
        address, key = ("m", "-r", "s3://bucket/repo"), "repo/chunks/*"
    done = kvctl(
        "load-weights", *address, "--endpoint-url", server.endpoint, "--tp-size", size, "--into", "dir:out",
        "-o", "json",
    )  # fmt: skip
    assert done.code == 0, done.err
    total = sum(tensor_bytes(name) for name in model())
    probes = 2 * 65536 if through == "plain" else 0
    assert total <= sent(server, key) - probes <= 1.02 * total
    check_slices(tmp_path / "out", size)


def check_slices(folder: Path, size: int) -> None:
    """The files of all ranks hold what slicing with numpy gives."""
    np = pytest.importorskip("numpy")
    whole = {}
    for name, data in model().items():
        if name.endswith(".safetensors"):
            header = parse_header(data, len(data), name)
            for tensor in header.tensors:
                raw = np.frombuffer(data, np.uint16, tensor.nbytes // 2, header.header_size + tensor.start)
                whole[tensor.name] = raw.reshape(tensor.shape)
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) == size
    for rank, path in enumerate(found):
        data = path.read_bytes()
        header = parse_header(data, len(data), path.name)
        assert len(header.tensors) == len(whole)
        for tensor in header.tensors:
            full = whole[tensor.name]
            if tensor.shape != full.shape:
                dim = next(n for n in range(2) if tensor.shape[n] != full.shape[n])
                full = np.split(full, size, axis=dim)[rank]
            raw = np.frombuffer(data, np.uint16, tensor.nbytes // 2, header.header_size + tensor.start)
            assert np.array_equal(raw.reshape(tensor.shape), full), tensor.name
