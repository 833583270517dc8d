"""Chunks: immutable, content-addressed objects, and the leaf tables that let a part of one be verified. Pure.

digest: BLAKE3-256 of the chunk's bytes, hex. leaf: XXH3-64 (seed 0) of each 256 KiB of a chunk, the last one
shorter; a leaf table is those as u64 little endian, in order. An incarnation is one writing of a digest: gc
deletes incarnations, and a deleted one is never written again.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import blake3
import xxhash

from kvctl.core.errors import FormatError, IntegrityError
from kvctl.repo.layout import CHUNKS

LEAF: Final = 256 * 1024
_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One incarnation of a chunk. `digest`: 64 hex digits. `incarnation`: 8 hex digits, random. `size`: bytes."""

    digest: str
    incarnation: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.digest}.{self.incarnation}"

    @property
    def key(self) -> str:
        return chunk_key(self.name)

    @classmethod
    def fresh(cls, digest: str, size: int) -> ChunkRef:
        return cls(digest, secrets.token_hex(4), size)

    @classmethod
    def parse(cls, name: str, size: int) -> ChunkRef:
        """Raises FormatError when `name` is not `<digest>.<incarnation>`."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise FormatError(f"{name!r} does not name a chunk", hint="expected <64 hex digits>.<8 hex digits>")
        return cls(match.group(1), match.group(2), size)


def chunk_key(name: str) -> str:
    return f"{CHUNKS}{name[:2]}/{name}"


def name_of_key(key: str) -> str | None:
    """The chunk's name in a key under chunks/; None when no chunk can be called so."""
    folder, _, name = key.removeprefix(CHUNKS).partition("/")
    return name if _NAME.fullmatch(name) and folder == name[:2] and key.startswith(CHUNKS) else None


def digest_of(view: bytes | bytearray | memoryview) -> str:
    return blake3.blake3(view).hexdigest()


def digest_of_parts(parts: Iterable[bytes | bytearray | memoryview]) -> str:
    """The digest of what the parts are one after the other."""
    digest = blake3.blake3()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def leaf_count(size: int) -> int:
    return -(-size // LEAF)


def leaf_table(view: bytes | bytearray | memoryview) -> bytes:
    """The leaf table of a whole chunk."""
    flat = memoryview(view).cast("B") if len(view) else memoryview(b"")
    leaves = [xxhash.xxh3_64_intdigest(flat[at : at + LEAF]) for at in range(0, len(flat), LEAF)]
    return struct.pack(f"<{len(leaves)}Q", *leaves)


def verify_leaves(view: bytes | bytearray | memoryview, offset_in_chunk: int, table: bytes | memoryview) -> None:
    """Check bytes that begin at `offset_in_chunk` (a multiple of LEAF) and end at a leaf's end against the
    chunk's `table`. Raises IntegrityError for bytes that differ, or that are not whole leaves of this chunk.
    """
    if offset_in_chunk % LEAF:
        raise IntegrityError(f"offset {offset_in_chunk} of a chunk is not at a leaf", cause=f"leaves are {LEAF} bytes")
    flat = memoryview(view).cast("B") if len(view) else memoryview(b"")
    first = offset_in_chunk // LEAF
    count = leaf_count(len(flat))
    if (first + count) * 8 > len(table):
        raise IntegrityError(
            "a chunk is longer than its leaf table says",
            cause=f"leaf {first + count} of {len(table) // 8}",
        )
    if len(flat) % LEAF and (first + count) * 8 != len(table):
        raise IntegrityError(
            f"bytes [{offset_in_chunk}, {offset_in_chunk + len(flat)}) of a chunk end inside a leaf",
            cause=f"leaves are {LEAF} bytes, only the last of {len(table) // 8} may be shorter",
        )
    expected = struct.unpack_from(f"<{count}Q", table, first * 8)
    for number, want in enumerate(expected):
        at = number * LEAF
        got = xxhash.xxh3_64_intdigest(flat[at : at + LEAF])
        if got != want:
            start = offset_in_chunk + at
            raise IntegrityError(
                f"bytes [{start}, {min(start + LEAF, offset_in_chunk + len(flat))}) of a chunk are damaged",
                cause=f"XXH3-64 {got:016x}, expected {want:016x}",
                hint="`kvctl repo check --read-data` finds which replicas are damaged, `repo repair` replaces them",
            )
