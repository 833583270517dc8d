"""The model manifest, `models/<name>/<version>.json`, schema kvctl.model/1. Pure: JSON to values and back.

    schema      "kvctl.model/1"
    name, version, created (RFC 3339, UTC), digest (model digest, hex); revision and producer where known
    stripe, leaf    bytes: the largest data chunk, and the leaf size of the tables
    chunks      [[name, size], ..]: every chunk that the model needs; the other fields name chunks by position here
    files       [{name, size, header, header_size, leaves, data}]: `header` is the chunk with the first `header_size`
                bytes; `data` the chunks of the data section, each [chunk, start] for one contiguous range that is the
                whole chunk, else [chunk, [start, rows, stride, width], ..]: the chunk's bytes are those parts one after
                the other, each row by row, offsets from the start of the data section; `leaves` is the chunk with the
                leaf tables of `data`, one after the other (u64 LE per leaf), null when there is no data
    tensors     {name: tensor digest, hex}
    sidecars    [{name, size, chunk}]; chunk is null when the file is empty

A reader needs nothing but this: how the cuts were chosen is the writer's matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvctl.core.errors import FormatError, IncompatibleError
from kvctl.weights import strictjson
from kvctl.weights.cut import ChunkCut
from kvctl.weights.digests import is_digest
from kvctl.weights.strided import Strided, span

SCHEMA: Final = "kvctl.model/1"
LEAF_ENTRY: Final = 8
_FAMILY: Final = "kvctl.model/"


@dataclass(frozen=True, slots=True)
class DataChunk:
    """`chunk`: position in the manifest's chunks."""

    chunk: int
    cut: ChunkCut


@dataclass(frozen=True, slots=True)
class ModelFile:
    """`header` and `leaves`: positions in the manifest's chunks. Sizes in bytes."""

    name: str
    size: int
    header: int
    header_size: int
    leaves: int | None
    data: tuple[DataChunk, ...] = field(repr=False)

    @property
    def data_size(self) -> int:
        return self.size - self.header_size

    def tables(self, table: memoryview, leaf: int) -> Iterator[tuple[DataChunk, memoryview]]:
        """Each data chunk with its part of the file's leaf table. Raises FormatError when the table's size is wrong."""
        at = 0
        for item in self.data:
            end = at + LEAF_ENTRY * -(-item.cut.size // leaf)
            yield item, table[at:end]
            at = end
        if at != len(table):
            raise FormatError(
                f"the leaf table of {self.name} has a wrong size", cause=f"{len(table)} bytes, expected {at}"
            )


@dataclass(frozen=True, slots=True)
class Sidecar:
    name: str
    size: int
    chunk: int | None


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """See the module's text. `chunks`: (name, size in bytes)."""

    name: str
    version: str
    created: str
    digest: str
    stripe: int
    leaf: int
    chunks: tuple[tuple[str, int], ...] = field(repr=False)
    files: tuple[ModelFile, ...]
    tensors: Mapping[str, str] = field(repr=False)
    sidecars: tuple[Sidecar, ...] = ()
    revision: str | None = None
    producer: str | None = None

    @property
    def data_bytes(self) -> int:
        return sum(file.data_size for file in self.files)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        document: dict[str, Any] = {  # Any: JSON
            "schema": SCHEMA,
            "name": self.name,
            "version": self.version,
            "created": self.created,
            "digest": self.digest,
            "stripe": self.stripe,
            "leaf": self.leaf,
            "chunks": [list(chunk) for chunk in self.chunks],
            "files": [
                {
                    "name": file.name,
                    "size": file.size,
                    "header": file.header,
                    "header_size": file.header_size,
                    "leaves": file.leaves,
                    "data": [_data_json(item) for item in file.data],
                }
                for file in self.files
            ],
            "tensors": dict(self.tensors),
            "sidecars": [{"name": item.name, "size": item.size, "chunk": item.chunk} for item in self.sidecars],
        }
        if self.revision is not None:
            document["revision"] = self.revision
        if self.producer is not None:
            document["producer"] = self.producer
        return document

    def to_bytes(self) -> bytes:
        """Compact JSON, UTF-8, keys in the order above."""
        return json.dumps(self.to_json(), separators=(",", ":"), ensure_ascii=False).encode()


def _data_json(item: DataChunk) -> list[Any]:  # Any: JSON
    parts = item.cut.parts
    if len(parts) == 1 and parts[0].rows == 1:
        return [item.chunk, parts[0].start]
    return [item.chunk, *([part.start, part.rows, part.stride, part.width] for part in parts)]


def parse_manifest(data: bytes, where: str) -> ModelManifest:
    """Strict. Raises FormatError (7), IncompatibleError (8) for a schema of another version."""
    document = strictjson.loads(data, where, "manifest")
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, str) and schema.startswith(_FAMILY) and schema != SCHEMA:
        raise IncompatibleError(
            f"{where} has schema {schema}, this kvctl reads {SCHEMA}", hint="use a newer kvctl to read it"
        )
    if schema != SCHEMA:
        raise FormatError(f"{where} is no model manifest", cause=f"its schema is {schema!r}, not {SCHEMA!r}")
    return _Reader(document, where).manifest()


class _Reader:
    """Field by field, each fault named by its path in the document."""

    def __init__(self, document: dict[str, Any], where: str) -> None:  # Any: JSON
        self.document = document
        self.where = where
        self.sizes: list[int] = []

    def manifest(self) -> ModelManifest:
        document = self.document
        self.keys(
            document,
            "manifest",
            {"schema", "name", "version", "created", "digest", "stripe", "leaf"}
            | {"chunks", "files", "tensors", "sidecars"},
            {"revision", "producer"},
        )
        chunks = tuple(self.chunk(entry, number) for number, entry in enumerate(self.items(document, "chunks")))
        if len({name for name, _ in chunks}) != len(chunks):
            raise self.bad("chunks", "a name is twice")
        self.sizes = [size for _, size in chunks]
        leaf = self.number(document["leaf"], "leaf", 1)
        files = tuple(
            self.file(entry, f"files[{number}]", leaf) for number, entry in enumerate(self.items(document, "files"))
        )
        sidecars = tuple(
            self.sidecar(entry, f"sidecars[{number}]") for number, entry in enumerate(self.items(document, "sidecars"))
        )
        names = [file.name for file in files] + [item.name for item in sidecars]
        if len(set(names)) != len(names):
            raise self.bad("files", "a file name is twice")
        tensors = document["tensors"]
        if not isinstance(tensors, dict) or not all(map(is_digest, tensors.values())):
            raise self.bad("tensors", "must map names to digests")
        if not is_digest(document["digest"]):
            raise self.bad("digest", "is no digest")
        return ModelManifest(
            name=self.text(document["name"], "name"),
            version=self.text(document["version"], "version"),
            created=self.text(document["created"], "created"),
            digest=document["digest"],
            stripe=self.number(document["stripe"], "stripe", 1),
            leaf=leaf,
            chunks=chunks,
            files=files,
            tensors=tensors,
            sidecars=sidecars,
            revision=self.optional(document, "revision"),
            producer=self.optional(document, "producer"),
        )

    def chunk(self, entry: Any, number: int) -> tuple[str, int]:  # Any: JSON
        path = f"chunks[{number}]"
        if not isinstance(entry, list) or len(entry) != 2:
            raise self.bad(path, "is no [name, size]")
        name = self.text(entry[0], path)
        digest, dot, incarnation = name.partition(".")
        if not is_digest(digest) or not dot or len(incarnation) != 8 or set(incarnation) - set("0123456789abcdef"):
            raise self.bad(path, f"has the name {name!r}, which is no <digest>.<incarnation>")
        return name, self.number(entry[1], path, 1)

    def file(self, entry: Any, path: str, leaf: int) -> ModelFile:  # Any: JSON
        self.keys(entry, path, {"name", "size", "header", "header_size", "leaves", "data"}, set())
        name = self.file_name(entry["name"], path)
        size = self.number(entry["size"], f"{path}.size", 8)
        header_size = self.number(entry["header_size"], f"{path}.header_size", 8)
        header = self.position(entry["header"], f"{path}.header")
        if self.sizes[header] != header_size:
            raise self.bad(f"{path}.header", f"is a chunk of {self.sizes[header]} bytes, not {header_size}")
        data_size = size - header_size
        data = tuple(
            self.data(item, f"{path}.data[{number}]", data_size)
            for number, item in enumerate(self.items(entry, "data", path))
        )
        covered = sum(item.cut.size for item in data)
        if covered != data_size:
            raise self.bad(f"{path}.data", f"covers {covered} bytes of {data_size}")
        leaves = None if entry["leaves"] is None else self.position(entry["leaves"], f"{path}.leaves")
        table = sum(LEAF_ENTRY * -(-item.cut.size // leaf) for item in data)
        if (leaves is None) != (not data) or (leaves is not None and self.sizes[leaves] != table):
            raise self.bad(f"{path}.leaves", f"must be a table of {table} bytes")
        return ModelFile(name, size, header, header_size, leaves, data)

    def data(self, entry: Any, path: str, data_size: int) -> DataChunk:  # Any: JSON
        if not isinstance(entry, list) or len(entry) < 2:
            raise self.bad(path, "is no [chunk, start] or [chunk, part, ..]")
        chunk = self.position(entry[0], path)
        size = self.sizes[chunk]
        if not isinstance(entry[1], list):
            if len(entry) != 2:
                raise self.bad(path, "is no [chunk, start]")
            parts: tuple[Strided, ...] = (span(self.number(entry[1], path, 0), size),)
        else:
            parts = tuple(self.part(item, path) for item in entry[1:])
        cut = ChunkCut(parts)
        if cut.size != size or cut.end > data_size:
            raise self.bad(path, f"names {cut.size} bytes up to {cut.end}: the chunk has {size}, the data {data_size}")
        return DataChunk(chunk, cut)

    def part(self, entry: Any, path: str) -> Strided:  # Any: JSON
        if not isinstance(entry, list) or len(entry) != 4:
            raise self.bad(path, "has a part that is no [start, rows, stride, width]")
        start, rows, stride, width = (
            self.number(value, path, low) for value, low in zip(entry, (0, 1, 1, 1), strict=True)
        )
        if stride < width:
            raise self.bad(path, f"has rows that overlap (stride {stride}, width {width})")
        return Strided(start, rows, stride, width)

    def sidecar(self, entry: Any, path: str) -> Sidecar:  # Any: JSON
        self.keys(entry, path, {"name", "size", "chunk"}, set())
        size = self.number(entry["size"], f"{path}.size", 0)
        chunk = None if entry["chunk"] is None else self.position(entry["chunk"], f"{path}.chunk")
        if (0 if chunk is None else self.sizes[chunk]) != size:
            raise self.bad(path, "has another size than its chunk")
        return Sidecar(self.file_name(entry["name"], path), size, chunk)

    def file_name(self, value: Any, path: str) -> str:  # Any: JSON
        name = self.text(value, path)
        if name in {".", ".."} or any(char in name for char in "/\\\0"):
            raise self.bad(path, f"has the name {name!r}, which would lead out of the folder")
        return name

    def position(self, value: Any, path: str) -> int:  # Any: JSON
        number = self.number(value, path, 0)
        if number >= len(self.sizes):
            raise self.bad(path, f"names chunk {number} of {len(self.sizes)}")
        return number

    def number(self, value: Any, path: str, low: int) -> int:  # Any: JSON
        if type(value) is not int or not low <= value < 1 << 63:
            raise self.bad(path, f"has {value!r} where a whole number from {low} is needed")
        return value

    def text(self, value: Any, path: str) -> str:  # Any: JSON
        if not isinstance(value, str) or not value:
            raise self.bad(path, f"has {value!r} where text is needed")
        return value

    def optional(self, document: Mapping[str, Any], key: str) -> str | None:  # Any: JSON
        return self.text(document[key], key) if key in document else None

    def items(self, document: Mapping[str, Any], key: str, path: str = "") -> Sequence[Any]:  # Any: JSON
        value = document[key]
        if not isinstance(value, list):
            raise self.bad(f"{path}.{key}".lstrip("."), "is no list")
        return value

    def keys(self, document: Any, path: str, needed: set[str], optional: set[str]) -> None:  # Any: JSON
        if not isinstance(document, dict):
            raise self.bad(path, "is no object")
        missing, extra = needed - document.keys(), document.keys() - needed - optional
        if missing or extra:
            raise self.bad(path, f"lacks {sorted(missing)}" if missing else f"has unknown fields {sorted(extra)}")

    def bad(self, path: str, problem: str) -> FormatError:
        return FormatError(f"{self.where}: {path} {problem}", hint="the manifest is damaged; see `kvctl repo check`")
