"""The session manifest, `sessions/<tenant>/<session>/<generation>.json`, schema kvctl.session/1. Pure.

    schema      "kvctl.session/1"
    tenant, session, generation (from 1), parent (the generation that was the latest at the push, or null)
    created     RFC 3339, UTC
    ns          nsdigest: the descriptor is ns/<ns>.json
    producer    {name: text}: labels of who made it (model name, revision, engine and its block size); no meaning
    tokens      how many tokens the session has
    token_hmac  HMAC of all its tokens, hex
    codecs      which codecs its packs use, for people; each fragment names its own
    lossy       whether any of them is
    chunks      [[name, size], ..]: every chunk that the session needs
    packs       [[chunk, group, first token, tokens, blocks, header size, total], ..] in order of group, then token:
                `chunk` is a position in chunks, `blocks` how many of the pack's `total` blocks, from its first, belong
                to the session, and `tokens` how many tokens those hold. Within a group there is no hole; all but a
                sliding group begin at token 0 (a recurrent one has one pack, whose block ends at `tokens`). A sliding
                group may begin inside its first block: what that block holds before `first token` is zeros
    tokens_chunk    position of the chunk that holds the token ids (u32 LE), or null
    index       [key, ..]: block keys (hex) of the index nodes that lead to the session, from the first to the last
    labels      {name: text}, set at the push

Compact JSON: 438,764 tokens in 64 MiB packs take less than half a MiB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvctl.core.errors import FormatError
from kvctl.kv.documents import Fields, loads
from kvctl.repo.chunks import ChunkRef

SCHEMA: Final = "kvctl.session/1"
PAGE: Final = 4096
_FIELDS: Final = {
    *("schema", "tenant", "session", "generation", "parent", "created", "ns", "producer", "tokens", "token_hmac"),
    *("codecs", "lossy", "chunks", "packs", "tokens_chunk", "index", "labels"),
}


@dataclass(frozen=True, slots=True)
class PackRow:
    """One pack of a session. `chunk`: position in the manifest's chunks. `blocks`: how many of the pack's blocks, from
    its first, the session uses; they hold `tokens` tokens from `first` on. `header_size` in bytes. `total`: blocks that
    the pack has.
    """

    chunk: int
    group: int
    first: int
    tokens: int
    blocks: int
    header_size: int
    total: int

    @property
    def end(self) -> int:
        return self.first + self.tokens


@dataclass(frozen=True, slots=True)
class SessionManifest:
    """See the module's text. `chunks`: (name, size in bytes)."""

    tenant: str
    session: str
    generation: int
    parent: int | None
    created: str
    ns: str
    tokens: int
    token_hmac: str
    chunks: tuple[tuple[str, int], ...] = field(repr=False)
    packs: tuple[PackRow, ...] = field(repr=False)
    producer: Mapping[str, str] = field(default_factory=dict)
    codecs: tuple[str, ...] = ("none",)
    lossy: bool = False
    tokens_chunk: int | None = None
    index: tuple[str, ...] = field(default=(), repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def refs(self) -> list[ChunkRef]:
        return [ChunkRef.parse(name, size) for name, size in self.chunks]

    def packs_of(self, group: int) -> list[PackRow]:
        return [row for row in self.packs if row.group == group]

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": SCHEMA,
            "tenant": self.tenant,
            "session": self.session,
            "generation": self.generation,
            "parent": self.parent,
            "created": self.created,
            "ns": self.ns,
            "producer": dict(self.producer),
            "tokens": self.tokens,
            "token_hmac": self.token_hmac,
            "codecs": list(self.codecs),
            "lossy": self.lossy,
            "chunks": [list(chunk) for chunk in self.chunks],
            "packs": [
                [row.chunk, row.group, row.first, row.tokens, row.blocks, row.header_size, row.total]
                for row in self.packs
            ],
            "tokens_chunk": self.tokens_chunk,
            "index": list(self.index),
            "labels": dict(self.labels),
        }

    def to_bytes(self) -> bytes:
        """Compact JSON, UTF-8, keys in the order above."""
        return json.dumps(self.to_json(), separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def parse(cls, data: bytes | memoryview, where: str) -> SessionManifest:
        """Strict. Raises FormatError (7), IncompatibleError (8) for a schema of another version."""
        fields = Fields(loads(data, where), where)
        fields.schema(SCHEMA)
        fields.only(_FIELDS)
        chunks = tuple(_chunk(row, fields, i) for i, row in enumerate(fields.rows("chunks", 2)))
        if len({name for name, _ in chunks}) != len(chunks):
            raise fields.bad("chunks", "name a chunk twice")
        codecs = tuple(fields.items("codecs"))
        if not all(isinstance(codec, str) for codec in codecs):
            raise fields.bad("codecs", "is no list of names")
        found = cls(
            tenant=fields.text("tenant"),
            session=fields.text("session"),
            generation=fields.number("generation", 1),
            parent=fields.number_or_null("parent", 1),
            created=fields.text("created"),
            ns=fields.hex("ns"),
            tokens=fields.number("tokens", 1),
            token_hmac=fields.hex("token_hmac"),
            chunks=chunks,
            packs=tuple(_row(row, fields, i) for i, row in enumerate(fields.rows("packs", 7))),
            producer=fields.texts("producer"),
            codecs=codecs,
            lossy=fields.flag("lossy"),
            tokens_chunk=fields.number_or_null("tokens_chunk"),
            index=tuple(fields.as_hex(key, "index", 32) for key in fields.items("index")),
            labels=fields.texts("labels"),
        )
        fault = found.fault()
        if fault:
            raise fields.bad("", fault)
        return found

    def fault(self) -> str:
        """Why a well-formed manifest contradicts itself; empty when it does not."""
        if self.parent is not None and self.parent >= self.generation:
            return f"has parent {self.parent} of generation {self.generation}"
        if self.tokens_chunk is not None and (
            self.tokens_chunk >= len(self.chunks) or self.chunks[self.tokens_chunk][1] != 4 * self.tokens
        ):
            return f"has a tokens_chunk that does not hold {self.tokens} tokens of 4 bytes"
        used = [row.chunk for row in self.packs] + ([] if self.tokens_chunk is None else [self.tokens_chunk])
        if sorted(used) != list(range(len(self.chunks))):
            return f"uses chunks {sorted(used)[:8]}.. where each of {len(self.chunks)} is used once"
        before: PackRow | None = None
        for number, row in enumerate(self.packs):
            if row.header_size % PAGE or row.header_size >= self.chunks[row.chunk][1]:
                return (
                    f"has a packs[{number}] whose header takes {row.header_size} of {self.chunks[row.chunk][1]} bytes"
                )
            if row.blocks > row.total:
                return f"has a packs[{number}] that uses {row.blocks} of {row.total} blocks"
            if row.end > self.tokens:
                return f"has a packs[{number}] that ends at token {row.end} of {self.tokens}"
            same = before is not None and before.group == row.group
            if before is not None and (before.group > row.group or (same and before.end != row.first)):
                return f"has a packs[{number}] out of order, or a hole before it"
            if before is not None and not same and before.end != self.tokens:
                return f"has a packs[{number - 1}] that ends its group at token {before.end} of {self.tokens}"
            before = row
        if before is None or before.end != self.tokens:
            return f"has packs that end at token {before.end if before else 0} of {self.tokens}"
        return ""


def _chunk(row: list[Any], fields: Fields, number: int) -> tuple[str, int]:  # Any: JSON
    path = f"chunks[{number}]"
    size = fields.as_number(row[1], path, 1)
    if not isinstance(row[0], str):
        raise fields.bad(path, "has no name")
    try:
        return ChunkRef.parse(row[0], size).name, size
    except FormatError as problem:
        raise fields.bad(path, str(problem)) from None


def _row(row: list[Any], fields: Fields, number: int) -> PackRow:  # Any: JSON
    path = f"packs[{number}]"
    lows = (0, 0, 0, 1, 1, PAGE, 1)
    values = [fields.as_number(value, path, low) for value, low in zip(row, lows, strict=True)]
    if values[0] >= len(fields.items("chunks")):
        raise fields.bad(path, f"names chunk {values[0]} of {len(fields.items('chunks'))}")
    return PackRow(*values)
