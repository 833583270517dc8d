"""`model.safetensors.index.json`: which shard holds which tensor, and the two-way check against the headers. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvctl.core.errors import FormatError, NotFoundError
from kvctl.weights import strictjson
from kvctl.weights.safetensors import Header

INDEX_NAME: Final = "model.safetensors.index.json"
INDEX_SUFFIX: Final = ".safetensors.index.json"
SHARD_SUFFIX: Final = ".safetensors"
MAX_INDEX: Final = 256 * 1024 * 1024
_NUMBERED = re.compile(r"^(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class Index:
    """`weight_map`: tensor -> shard, in the file's order. `shards`: the distinct shards, sorted."""

    weight_map: Mapping[str, str]
    shards: tuple[str, ...]


def parse_index(data: bytes, where: str) -> Index:
    """Raises FormatError, also for shard names that would lead out of the folder."""
    document = strictjson.loads(data, where, "index")
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(
            f"{where} has no weight_map",
            cause="an index is an object whose weight_map maps each tensor to its shard",
            hint="write the model again with save_pretrained, or remove the index of a single-file model",
        )
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            raise FormatError(
                f"{where} maps tensor {tensor!r} to {shard!r}, which is no file beside the index",
                cause="a shard is a plain file name",
                hint="the index is damaged or hostile",
                details={"file": where, "tensor": tensor},
            )
    return Index(weight_map, tuple(sorted(set(weight_map.values()))))


def check_shards_exist(index: Index, present: Iterable[str], where: str) -> None:
    """Every shard that the index names is there. Raises NotFoundError."""
    have = set(present)
    missing = [shard for shard in index.shards if shard not in have]
    if missing:
        raise NotFoundError(
            f"{where} names shard {missing[0]}, which is not there",
            cause=f"{len(missing)} of {len(index.shards)} shards are missing",
            hint="finish the upload or download; nothing was read",
            details={"index": where, "missing": missing},
        )


def check_index(index: Index, headers: Mapping[str, Header], where: str) -> None:
    """Index and headers agree both ways, and no tensor is twice. `headers`: shard -> header. Raises FormatError."""
    check_unique(headers)
    held = {tensor.name: shard for shard, header in headers.items() for tensor in header.tensors}
    for tensor, shard in index.weight_map.items():
        actual = held.get(tensor)
        if actual != shard:
            raise FormatError(
                f"{where} maps tensor {tensor!r} to {shard}, whose header lacks it",
                cause=f"it is in {actual}" if actual else "no shard holds it",
                hint="the index belongs to another export; write the index again",
                details={"index": where, "tensor": tensor, "shard": shard},
            )
    for tensor, shard in held.items():
        if tensor not in index.weight_map:
            raise FormatError(
                f"{shard} holds tensor {tensor!r}, which {where} does not name",
                cause=f"the index names {len(index.weight_map)} tensors, the shards hold {len(held)}",
                hint="the index belongs to another export; write the index again",
                details={"index": where, "tensor": tensor, "shard": shard},
            )


def check_unique(headers: Mapping[str, Header]) -> None:
    """No tensor is in two files. Raises FormatError naming both."""
    held: dict[str, str] = {}
    for shard, header in headers.items():
        for tensor in header.tensors:
            other = held.setdefault(tensor.name, shard)
            if other != shard:
                raise FormatError(
                    f"tensor {tensor.name!r} is in two files: {other} and {shard}",
                    cause="which one counts would be a guess",
                    hint="remove the file of the older export, or add an index",
                    details={"tensor": tensor.name, "files": [other, shard]},
                )


def check_numbering(names: Sequence[str], where: str) -> None:
    """Files named -00001-of-00005 without an index: one set, complete. Raises FormatError, NotFoundError."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in names:
        match = _NUMBERED.match(name)
        if match:
            sets.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    if len(sets) > 1:
        shown = ", ".join(f"{stem}-*-of-{count}" for stem, count in sorted(sets))
        raise FormatError(
            f"{where} holds shards of several exports and no index that decides",
            cause=shown,
            hint="remove the stale shards, or add the index",
        )
    for (stem, count), numbers in sets.items():
        first = next((n for n in itertools.count(1) if n not in numbers), count)
        if first <= count:
            raise NotFoundError(
                f"{where} lacks shard {first} of {count} of {stem}",
                cause=f"{len(numbers)} of {count} are there, and no index says that this is all",
                hint="finish the upload or download; nothing was read",
                details={"folder": where, "expected": count, "present": len(numbers)},
            )


def is_numbered(name: str) -> bool:
    return _NUMBERED.match(name) is not None


def _is_plain(name: str) -> bool:
    return bool(name) and name not in {".", ".."} and not any(char in name for char in "/\\\0")
