"""Packs: consecutive blocks of one layer group in one chunk, so that a layer of all blocks, or a tensor-parallel shard
of it, is one contiguous range. Pure. Byte by byte in `kvctl/help/format.md`; here is what the code needs:

    header page(s)  fixed part, layer table, block table, fragment table; XXH3-64 of itself; a multiple of 4 KiB
    payload         fragments in order of layer, K then V, head range, run of blocks
    fragment        [head][block][token][dim], C order, little endian: the unit of codec and checksum

Fragments of more than 64 KiB begin at multiples of 4 KiB, others at multiples of 64 bytes, each at the first such place
after the one before; the gaps are zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from kvctl.core.errors import FormatError, IncompatibleError, IntegrityError, SizeMismatchError, UsageError
from kvctl.kv import codecs
from kvctl.kv.fragments import Fragment, FragmentTable, parse_fragments
from kvctl.kv.identity import Group
from kvctl.kv.packgeometry import BLOCK, FIXED, FRAGMENT, PAGE, PackGeometry, Place, aligned
from kvctl.kv.tokens import TOKEN_HMAC_SIZE, BlockKey
from kvctl.kv.views import Source, TokenView, check_view, gather, lying_together

__all__ = [
    "Fragment",
    "PackGeometry",
    "PackHeader",
    "Place",
    "Source",
    "Span",
    "TokenView",
    "decode_fragment",
    "encode_pack",
    "encode_parts",
    "header_size",
    "parse_pack_header",
    "ranges",
    "ranges_of",
    "verify_fragment",
]

MAGIC: Final = b"KVCTLPK1"
VERSION: Final = 1
_CHECKSUM_AT: Final = 24


@dataclass(frozen=True, slots=True)
class PackHeader:
    """A parsed header. `where` names the pack in errors. `first`: the first token that is there, in or at the start of
    the first block. `fragments` in order of the payload.
    """

    where: str
    ns: str
    geometry: PackGeometry
    header_size: int
    pack_size: int
    first: int
    blocks: tuple[BlockKey, ...] = field(repr=False)
    fragments: FragmentTable = field(repr=False)

    @property
    def tokens(self) -> int:
        return self.blocks[-1].end - self.first


@dataclass(frozen=True, slots=True)
class Span:
    """One contiguous range of a pack to read, and the fragments it holds, from number `first` of the pack on; between
    them are at most padding bytes.
    """

    offset: int
    length: int
    first: int
    fragments: tuple[Fragment, ...]


def encode_pack(
    geometry: PackGeometry,
    ns: str,
    blocks: Sequence[BlockKey],
    source: Source,
    codec: str = codecs.NONE,
    *,
    first: int | None = None,
    out: memoryview | None = None,
) -> memoryview:
    """The pack's bytes in one piece. `out`: writable bytes, at least `geometry.bound`, used instead of new memory; the
    result is its beginning. See `encode_parts`.
    """
    bound = geometry.bound
    if out is None:
        out = memoryview(bytearray(bound))
    elif len(out) < bound:
        raise UsageError(f"a pack of up to {bound} bytes does not fit in {len(out)}")
    at = 0
    for part in encode_parts(geometry, ns, blocks, source, codec, first=first):
        out[at : at + len(part)] = part
        at += len(part)
    return out[:at]


def encode_parts(
    geometry: PackGeometry,
    ns: str,
    blocks: Sequence[BlockKey],
    source: Source,
    codec: str = codecs.NONE,
    *,
    first: int | None = None,
) -> list[memoryview]:
    """The pack's bytes in turn: raw fragments are the source's own memory where its rows lie together there. `ns`:
    nsdigest, hex. `blocks`: consecutive, as many as the geometry says. `first`: the first token that is there, where a
    window's KV sets in inside the first block; what is before it becomes zeros. A fragment that a codec does not make
    smaller is stored raw, and recurrent states never take the lossy codec. Raises UsageError for blocks or views that
    do not fit, EnvError when the codec's library is missing.
    """
    problem = geometry.fault() or _chain_fault(blocks, geometry)
    if problem:
        raise UsageError("these blocks cannot be packed", cause=problem)
    first = blocks[0].start if first is None else first
    if not blocks[0].start <= first < blocks[0].end:
        raise UsageError(f"token {first} is not in the first block", cause=f"it begins at token {blocks[0].start}")
    if geometry.group.recurrent and codec in codecs.LOSSY:
        codec = codecs.NONE
    codecs.check_codec(codec, geometry.dtype)
    encode = codecs.encoder(codec, geometry.dtype, geometry.element)
    at = geometry.header_size
    table: list[bytes] = []
    parts: list[memoryview] = [memoryview(b"")]  # the header's place
    view = TokenView(memoryview(b""), 0, 0)
    seen: tuple[int, str] | None = None
    for place in geometry.places():
        if seen != (place.layer, place.part):
            seen = (place.layer, place.part)
            view = source(*seen)
            check_view(geometry, view, first, blocks[-1].end, *seen)
        raw = lying_together(geometry, place, blocks, first, view)
        if raw is None:
            raw = memoryview(bytearray(place.raw))
            gather(geometry, place, blocks, first, view, raw)
        stored, used = raw, codecs.NONE
        if codec != codecs.NONE:
            coded = encode(raw)
            if len(coded) < place.raw:
                stored, used = memoryview(coded), codec
        begin = aligned(at, len(stored))
        if begin > at:
            parts.append(memoryview(bytes(begin - at)))
        parts.append(stored)
        checksum = xxhash.xxh3_64_intdigest(stored)
        table.append(
            FRAGMENT.pack(begin, len(stored), place.raw, codecs.CODECS.index(used), geometry.element, checksum)
        )
        at = begin + len(stored)
    parts[0] = memoryview(_header(geometry, ns, blocks, table, at, first - blocks[0].start))
    return parts


def _header(
    geometry: PackGeometry, ns: str, blocks: Sequence[BlockKey], table: list[bytes], size: int, absent: int
) -> bytearray:
    group = geometry.group
    layers_at = FIXED.size
    blocks_at = layers_at + -(-4 * len(group.layers) // 16) * 16
    fragments_at = blocks_at + BLOCK.size * len(blocks)
    data = bytearray(geometry.header_size)
    FIXED.pack_into(
        data,
        0,
        MAGIC,
        VERSION,
        geometry.header_size,
        size,
        0,
        bytes.fromhex(ns),
        geometry.dtype.encode("ascii"),
        group.kind.encode("ascii"),
        *(geometry.index, len(group.layers), group.kv_heads, group.k_dim, group.v_dim, group.window or 0),
        *(geometry.block_tokens, geometry.blocks, geometry.head_step, geometry.run_blocks),
        *(geometry.row("k"), geometry.row("v"), len(table), layers_at, blocks_at, fragments_at, absent),
        bytes(28),
    )
    struct.pack_into(f"<{len(group.layers)}I", data, layers_at, *group.layers)
    for number, block in enumerate(blocks):
        BLOCK.pack_into(
            data,
            blocks_at + number * BLOCK.size,
            *(block.key, block.parent, block.start, block.count, 0, block.token_hmac),
        )
    data[fragments_at : fragments_at + FRAGMENT.size * len(table)] = b"".join(table)
    struct.pack_into("<Q", data, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(data))
    return data


def _chain_fault(blocks: Sequence[BlockKey], geometry: PackGeometry) -> str:
    """Why the blocks are not consecutive blocks of one chain; empty when they are."""
    if len(blocks) != geometry.blocks:
        return f"{len(blocks)} blocks for a pack of {geometry.blocks}"
    for number, block in enumerate(blocks):
        whole = block.count == geometry.block_tokens
        if block.start % geometry.block_tokens or not (whole or 0 < block.count < geometry.block_tokens):
            return f"block {number} holds {block.count} tokens from {block.start} on"
        if number + 1 < len(blocks):
            after = blocks[number + 1]
            if not whole or after.start != block.end or after.parent != block.key:
                return f"block {number + 1} does not follow block {number}"
        if (len(block.key), len(block.parent), len(block.token_hmac)) != (32, 32, TOKEN_HMAC_SIZE):
            return f"block {number} has keys of a wrong size"
    return ""


def header_size(first: bytes | memoryview, where: str) -> int:
    """Bytes of the header, from the pack's first 16 bytes or more. Raises FormatError, IncompatibleError."""
    if len(first) < 16 or bytes(first[:8]) != MAGIC:
        raise FormatError(f"{where} is no pack", cause=f"it begins with {bytes(first[:8])!r}")
    version, size = struct.unpack_from("<II", first, 8)
    if version != VERSION:
        raise IncompatibleError(
            f"{where} has pack version {version}, this kvctl reads {VERSION}", hint="use a newer kvctl to read it"
        )
    if size % PAGE or not size:
        raise FormatError(f"{where} is damaged", cause=f"its header takes {size} bytes, no multiple of {PAGE}")
    return int(size)


def parse_pack_header(data: bytes | memoryview, where: str) -> PackHeader:
    """The header in `data`, which begins with it and may go on. Strict: checksum, geometry, chain, fragments. Raises
    IntegrityError, FormatError, SizeMismatchError (7), IncompatibleError (8) for another version or unknown codec.
    """
    size = header_size(data, where)
    if len(data) < size:
        raise SizeMismatchError(f"{where}: the header is not whole", cause=f"{len(data)} of {size} bytes")
    raw = bytearray(data[:size])
    want = int.from_bytes(raw[_CHECKSUM_AT : _CHECKSUM_AT + 8], "little")
    raw[_CHECKSUM_AT : _CHECKSUM_AT + 8] = bytes(8)
    got = xxhash.xxh3_64_intdigest(raw)
    if got != want:
        raise IntegrityError(f"{where}: the header is damaged", cause=f"XXH3-64 {got:016x}, expected {want:016x}")
    fixed = FIXED.unpack_from(raw)
    pack_size, ns = fixed[3], fixed[5].hex()
    (index, layers, heads, k_dim, v_dim, window, tokens, blocks, step, run, k_row, v_row, count, *more) = fixed[8:-1]
    layers_at, blocks_at, fragments_at, absent = more

    def bad(cause: str) -> FormatError:
        return FormatError(f"{where} is malformed", cause=cause, hint="see `kvctl repo check`")

    at = FIXED.size + -(-4 * layers // 16) * 16
    if (layers_at, blocks_at, fragments_at) != (FIXED.size, at, at + BLOCK.size * blocks):
        raise bad(f"its tables begin at {layers_at}, {blocks_at}, {fragments_at}")
    if not blocks or fragments_at + FRAGMENT.size * count > size:
        raise bad(f"{blocks} blocks and {count} fragments in a header of {size} bytes")
    dtype, kind = (text.rstrip(b"\0").decode("ascii", "replace") for text in fixed[6:8])
    numbers = struct.unpack_from(f"<{layers}I", raw, layers_at)
    group = Group(kind, numbers, heads, k_dim, v_dim, window or None)
    geometry = PackGeometry(index, group, dtype, blocks, step, run, tokens)
    problem = geometry.fault()
    if problem:
        raise bad(problem)
    if (count, size, k_row, v_row) != (
        geometry.fragments,
        geometry.header_size,
        geometry.row("k"),
        geometry.row("v"),
    ):
        raise bad(f"{count} fragments, {size} bytes of header, rows of {k_row} and {v_row} do not fit its geometry")
    keys = tuple(
        BlockKey(key, parent, start, tokens_of, check)
        for key, parent, start, tokens_of, _, check in BLOCK.iter_unpack(raw[blocks_at:fragments_at])
    )
    problem = _chain_fault(keys, geometry)
    if problem:
        raise bad(problem)
    if absent >= keys[0].count:
        raise bad(f"{absent} tokens of a first block of {keys[0].count} are absent")
    table = memoryview(raw)[fragments_at : fragments_at + FRAGMENT.size * count]
    fragments = parse_fragments(geometry, table, pack_size, where)
    return PackHeader(where, ns, geometry, size, pack_size, keys[0].start + absent, keys, fragments)


def ranges(
    header: PackHeader,
    layers: Sequence[int] | None = None,
    heads: tuple[int, int] | None = None,
    first_block: int = 0,
    count: int | None = None,
) -> list[Span]:
    """What to read for model layers `layers` (None: all), heads [a, b) (None: all) and `count` blocks from
    `first_block` of the pack on (None: the rest): whole fragments, neighbours in one span, by offset.
    """
    return ranges_of(header.geometry, header.fragments, layers, heads, first_block, count)


def ranges_of(
    geometry: PackGeometry,
    fragments: Sequence[Fragment],
    layers: Sequence[int] | None,
    heads: tuple[int, int] | None,
    first_block: int,
    count: int | None,
) -> list[Span]:
    """See `ranges`."""
    end = geometry.blocks if count is None else first_block + count
    low, high = heads or (0, geometry.group.kv_heads)
    wanted = None if layers is None else frozenset(layers)
    spans: list[tuple[int, list[Fragment]]] = []
    before = -2
    for number, fragment in enumerate(fragments):
        place = fragment.place
        if (
            (wanted is not None and place.layer not in wanted)
            or place.head >= high
            or place.end_head <= low
            or place.block >= end
            or place.end_block <= first_block
        ):
            continue
        if before == number - 1:
            spans[-1][1].append(fragment)
        else:
            spans.append((number, [fragment]))
        before = number
    return [Span(part[0].offset, part[-1].end - part[0].offset, first, tuple(part)) for first, part in spans]


def verify_fragment(header: PackHeader, fragment: Fragment, stored: memoryview) -> None:
    """Raises IntegrityError when `stored` is not what was written."""
    got = xxhash.xxh3_64_intdigest(stored)
    if got != fragment.checksum or len(stored) != fragment.stored:
        place = fragment.place
        raise IntegrityError(
            f"{header.where}: layer {place.layer} {place.part}, heads [{place.head}, {place.end_head}), blocks "
            f"[{place.block}, {place.end_block}) are damaged",
            cause=f"XXH3-64 {got:016x} of {len(stored)} bytes, expected {fragment.checksum:016x} of {fragment.stored}",
            hint="`kvctl repo check --read-data` finds which replicas are damaged, `repo repair` replaces them",
            details={"pack": header.where, "layer": place.layer, "part": place.part, "block": place.block},
        )


def decode_fragment(header: PackHeader, fragment: Fragment, stored: memoryview, out: memoryview) -> None:
    """Fill `out` (`fragment.place.raw` bytes) with the raw bytes [head][block][token][dim] of a verified fragment.
    Raises IntegrityError when they do not decode, EnvError when the codec's library is missing.
    """
    codecs.decode(fragment.codec, header.geometry.dtype, fragment.width, stored, out, header.where)
