r"""Canonical digests of tensors and models: what files, repos, slots and engines compare. Pure.

Tensor digest: BLAKE3-256 of

    b"kvctl.tensor/1\0"
    u32 LE length of the dtype's name, the name in ASCII ("BF16")
    u32 LE number of dimensions, then each dimension as u64 LE
    u64 LE number of data bytes, then the data, row-major, as in a safetensors file

Model digest: the root of a binary Merkle tree over the tensors, sorted by name (as UTF-8 bytes):

    leaf  = BLAKE3-256 of b"kvctl.model.leaf/1\0", u32 LE length of the name, the name, u32 LE length of the dtype, the
            dtype, u32 LE number of dimensions, each as u64 LE, the tensor digest (32 bytes)
    node  = BLAKE3-256 of b"kvctl.model.node/1\0", left digest, right digest; an odd last one moves up as it is
    root  = BLAKE3-256 of b"kvctl.model/1\0", u64 LE number of tensors, the top digest (none: 32 zero bytes)

File names, sharding, metadata and the order in the file do not enter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import blake3

from kvctl.core.errors import FormatError, IntegrityError
from kvctl.weights import strictjson
from kvctl.weights.safetensors import TensorInfo

DIGESTS_SCHEMA: Final = "kvctl.digests/1"
_TENSOR: Final = b"kvctl.tensor/1\0"
_LEAF: Final = b"kvctl.model.leaf/1\0"
_NODE: Final = b"kvctl.model.node/1\0"
_ROOT: Final = b"kvctl.model/1\0"
_HEX: Final = frozenset("0123456789abcdef")


class TensorHasher:
    """The digest of one tensor, fed its bytes in order, in pieces of any size."""

    def __init__(self, dtype: str, shape: Sequence[int], nbytes: int) -> None:
        self._hash = blake3.blake3(_TENSOR + _frame(dtype, shape) + nbytes.to_bytes(8, "little"))
        self._left = nbytes

    def update(self, data: bytes | memoryview) -> None:
        self._left -= len(data)
        self._hash.update(data)

    @property
    def missing(self) -> int:
        """Bytes still to come; negative when too many came."""
        return self._left

    def digest(self) -> str:
        """64 hex digits. Raises IntegrityError when not exactly the tensor's bytes were fed."""
        if self._left:
            raise IntegrityError("a tensor was not hashed whole", cause=f"{self._left} bytes are missing")
        return self._hash.hexdigest()


def tensor_digest(tensor: TensorInfo, data: bytes | memoryview) -> str:
    hasher = TensorHasher(tensor.dtype, tensor.shape, tensor.nbytes)
    hasher.update(data)
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """What the model digest covers of a tensor. `digest`: 64 hex digits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


def model_digest(tensors: Iterable[TensorDigest]) -> str:
    """64 hex digits. Names must be unique."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name.encode())
    level = [
        blake3.blake3(
            _LEAF + _text(tensor.name) + _frame(tensor.dtype, tensor.shape) + bytes.fromhex(tensor.digest)
        ).digest()
        for tensor in ordered
    ]
    while len(level) > 1:
        joined = [blake3.blake3(_NODE + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
        level = joined + level[len(joined) * 2 :]
    top = level[0] if level else bytes(32)
    return blake3.blake3(_ROOT + len(ordered).to_bytes(8, "little") + top).hexdigest()


@dataclass(frozen=True, slots=True)
class DigestsFile:
    """A sidecar with the digests of a plain source (`models digest URL --out FILE`), which a load can require."""

    tensors: tuple[TensorDigest, ...]

    @property
    def digest(self) -> str:
        return model_digest(self.tensors)

    def by_name(self) -> Mapping[str, TensorDigest]:
        return {tensor.name: tensor for tensor in self.tensors}

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": DIGESTS_SCHEMA,
            "digest": self.digest,
            "tensors": {
                tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "blake3": tensor.digest}
                for tensor in sorted(self.tensors, key=lambda tensor: tensor.name.encode())
            },
        }


def parse_digests(data: bytes, where: str) -> DigestsFile:
    """Raises FormatError, also when the model digest is not that of the tensors listed."""
    document = strictjson.loads(data, where, "digests file")
    if not isinstance(document, dict) or document.get("schema") != DIGESTS_SCHEMA:
        raise FormatError(f"{where} is no digests file", cause=f"its schema is not {DIGESTS_SCHEMA}")
    entries = document.get("tensors")
    if not isinstance(entries, dict):
        raise FormatError(f"{where} has no tensors")
    tensors: list[TensorDigest] = []
    for name, entry in entries.items():
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape, digest = fields.get("dtype"), fields.get("shape"), fields.get("blake3")
        if not isinstance(dtype, str) or not isinstance(shape, list) or not is_digest(digest):
            raise FormatError(f"{where}: tensor {name!r} has no dtype, shape and blake3 digest")
        if not all(type(dim) is int and 0 <= dim < 1 << 63 for dim in shape):
            raise FormatError(f"{where}: tensor {name!r} has the shape {shape!r}")
        tensors.append(TensorDigest(name, dtype, tuple(shape), digest))
    found = DigestsFile(tuple(tensors))
    if document.get("digest") != found.digest:
        raise FormatError(
            f"{where} does not match its own digest",
            cause=f"it says {document.get('digest')}, its tensors give {found.digest}",
            hint="make it again with `kvctl models digest`",
        )
    return found


def is_digest(value: object) -> TypeGuard[str]:
    """64 lower-case hex digits."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= _HEX


def _text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "little") + data


def _frame(dtype: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(dim.to_bytes(8, "little") for dim in shape)
    return _text(dtype) + len(shape).to_bytes(4, "little") + dims
