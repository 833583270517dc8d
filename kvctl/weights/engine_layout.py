"""Weights as an engine has laid them out: one safetensors file whose names are the engine's own, and whose metadata
says for which engine. Another process of the same engine takes the tensors as they are; nobody else reads them. Values
and their encoding; knows no torch and no agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvctl.core.errors import FormatError, IncompatibleError
from kvctl.weights.dtypes import DTYPES
from kvctl.weights.layout import encode_header

FILE: Final = "engine.safetensors"
LAYOUT: Final = "kvctl.engine_layout"  # in the file's metadata; its value is JSON
SCHEMA: Final = "kvctl.engine-layout/1"
_LINE: Final = 64  # bytes: kernels read what begins with a cache line


@dataclass(frozen=True, slots=True)
class Laid:
    """A tensor in memory: `shape` as the engine sees it; its bytes are in the order of dimensions `order`, so that they
    are dense whatever the strides are. `kind`: "param" or "buffer".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    order: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.order)

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """`key`: everything that has to be equal for an engine to take these tensors (release, model class, dtype, ranks,
    quantisation, ..). `source`, `fingerprint`, `digest`, `names`: the checkpoint they were made of. `aliases`: other
    names of a tensor. `attrs`: what loading set on the model besides.
    """

    key: Mapping[str, Any]  # Any: JSON
    source: str
    fingerprint: str
    digest: str | None
    names: tuple[str, ...]
    tensors: tuple[Laid, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON

    @property
    def engine(self) -> str:
        """For which engine, in words."""
        return _engine(self.key)

    @property
    def nbytes(self) -> int:
        """Of the data section."""
        return sum(item.nbytes for item in self.tensors)

    def differs(self, key: Mapping[str, Any]) -> str:  # Any: JSON
        """What keeps an engine with `key` from taking these tensors, in words; empty when nothing does."""
        for name in sorted(self.key.keys() | key.keys()):
            if self.key.get(name) != key.get(name):
                return f"{name} is {self.key.get(name)!r} there, {key.get(name)!r} here"
        return ""

    def header(self) -> bytes:
        """The file's header; tensors in their order, back to back."""
        about = {
            "schema": SCHEMA, "key": dict(self.key), "source": self.source, "fingerprint": self.fingerprint,
            "digest": self.digest, "names": list(self.names), "aliases": dict(self.aliases), "attrs": dict(self.attrs),
            "tensors": {item.name: [item.kind, list(item.order)] for item in self.tensors},
        }  # fmt: skip
        document: dict[str, object] = {"__metadata__": {LAYOUT: json.dumps(about, separators=(",", ":"))}}
        at = 0
        for item in self.tensors:
            end = at + item.nbytes
            document[item.name] = {
                "dtype": item.dtype, "shape": list(item.stored_shape), "data_offsets": [at, end],
            }  # fmt: skip
            at = end
        return encode_header(document, _LINE)

    @classmethod
    def parse(
        cls, metadata: Mapping[str, str], tensors: Sequence[tuple[str, str, Sequence[int]]], where: str
    ) -> EngineLayout:
        """`tensors`: (name, dtype, stored shape) in the file's order. Raises FormatError."""
        try:
            about = json.loads(metadata[LAYOUT])
            if about["schema"] != SCHEMA:
                raise FormatError(f"{where} is laid out by another kvctl ({about['schema']})", hint="unload the slot")
            laid = []
            for name, dtype, stored in tensors:
                kind, order = about["tensors"][name]
                shape = [0] * len(stored)
                for axis, size in zip(order, stored, strict=True):
                    shape[axis] = size
                laid.append(Laid(name, dtype, tuple(shape), str(kind), tuple(order)))
            return cls(
                about["key"], about["source"], about["fingerprint"], about["digest"], tuple(about["names"]),
                tuple(laid), about["aliases"], about["attrs"],
            )  # fmt: skip
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise FormatError(f"{where} has no layout of an engine that we can read", cause=repr(error)) from error


def laid_out_for(metadata: Mapping[str, str]) -> str | None:
    """For which engine the file with this metadata is laid out, in words; None for an ordinary checkpoint."""
    text = metadata.get(LAYOUT)
    if text is None:
        return None
    try:
        return _engine(json.loads(text)["key"])
    except (KeyError, ValueError, TypeError):
        return "an engine"


def _engine(key: Mapping[str, Any]) -> str:  # Any: JSON
    return f"{key['engine']} {key['release']}, {key['model']}"


def check_is_checkpoint(metadata: Mapping[str, str], where: str) -> None:
    """Raises IncompatibleError for a file that only its engine understands."""
    engine = laid_out_for(metadata)
    if engine is not None:
        raise IncompatibleError(
            f"{where} is laid out for an engine, it is no checkpoint",
            cause=f"its tensors are those of {engine}: fused, padded or packed",
            hint="load from the checkpoint it was made of; engines attach to such a slot by `engine_slot`",
        )
