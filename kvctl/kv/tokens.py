"""Tokens into keys: the domain secret, the chain of block keys, token HMACs. Pure.

    frame(part)   = u32 LE length of the part, the part; frames(..) is those one after the other
    public secret = SHA-256("kvctl.kv/public")                        a repo without a key file
    domain secret = HMAC-SHA256(master, frames("kvctl.tenant/1", tenant in UTF-8))
    key id        = HMAC-SHA256(master, frames("kvctl.key-id/1")), its first 8 bytes in hex
    salt id       = HMAC-SHA256(domain secret, frames("kvctl.salt/1", raw salt))
    block key     = HMAC-SHA256(domain secret, frames("kvctl.block/1", nsdigest (32 bytes), parent key, tokens, extras))
    token HMAC    = HMAC-SHA256(domain secret, frames("kvctl.tokens/1", tokens)); of a block its first 16 bytes

tokens are u32 little endian. The first block's parent is 32 zero bytes. A tail of fewer than `block_tokens` tokens is
a block of its own. Never Python's hash(): keys do not depend on the process.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvctl.core.errors import ConfigError, FormatError, UsageError

Tokens: TypeAlias = "Sequence[int] | array[int] | memoryview | bytes | bytearray"
"""Token ids: numbers, or their u32 little endian bytes (bytes, bytearray, memoryview of bytes or of u32)."""

ROOT: Final = bytes(32)
BLOCK_TOKENS: Final = 16
ANCHOR_TOKENS: Final = 1024
TOKEN_HMAC_SIZE: Final = 16
SECRET_SIZE: Final = 32
PUBLIC_SECRET: Final = hashlib.sha256(b"kvctl.kv/public").digest()


def frames(*parts: bytes | memoryview) -> bytes:
    """Every part with its length before it (u32 LE), so that no two lists of parts give the same bytes."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(4, "little"), part))


def parse_key(data: bytes, where: str) -> bytes:
    """The master secret in a key file: 32 raw bytes, or 64 hex digits and perhaps a newline. Raises ConfigError."""
    if len(data) == SECRET_SIZE:
        return data
    try:
        found = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        found = b""
    if len(found) != SECRET_SIZE:
        raise ConfigError(
            f"{where} holds no key",
            cause=f"it has {len(data)} bytes, expected 32, or 64 hex digits",
            hint="make one with `openssl rand -hex 32` and keep it: without it, stored sessions cannot be found",
        )
    return found


def key_id(master: bytes | None) -> str | None:
    """What a repo calls the master secret by: 16 hex digits; None without one."""
    return None if master is None else hmac.digest(master, frames(b"kvctl.key-id/1"), "sha256")[:8].hex()


def domain_secret(master: bytes | None, tenant: str) -> bytes:
    """The secret under which a tenant's blocks are keyed. Without a master secret it is public and the same for all
    tenants: keys then prove nothing against one who can write to the store.
    """
    if master is None:
        return PUBLIC_SECRET
    return hmac.digest(master, frames(b"kvctl.tenant/1", tenant.encode()), "sha256")


def salt_id(secret: bytes, salt: bytes) -> str:
    """What stands for a raw salt in a descriptor, hex."""
    return hmac.digest(secret, frames(b"kvctl.salt/1", salt), "sha256").hex()


def token_bytes(tokens: Tokens) -> memoryview:
    """The u32 little endian bytes of `tokens`; no copy where they are that already. Raises UsageError."""
    if isinstance(tokens, (bytes, bytearray)):
        flat = memoryview(tokens)
    elif isinstance(tokens, memoryview) and tokens.format in {"B", "I", "L", "<I"} and tokens.itemsize in {1, 4}:
        flat = tokens if tokens.itemsize == 1 else _little(tokens.cast("B"))
    elif isinstance(tokens, array) and tokens.typecode == "I" and tokens.itemsize == 4:
        flat = _little(memoryview(tokens).cast("B"))
    else:
        try:
            flat = memoryview(struct.pack(f"<{len(tokens)}I", *tokens))
        except struct.error:
            raise UsageError("a token id is no number from 0 to 2^32 - 1") from None
    if len(flat) % 4:
        raise UsageError(f"{len(flat)} bytes are no token ids", cause="each takes 4 bytes, u32 little endian")
    return flat


def _little(native: memoryview) -> memoryview:
    if sys.byteorder == "little":
        return native
    swapped = array("I", bytes(native))
    swapped.byteswap()
    return memoryview(swapped).cast("B")


def token_ids(data: bytes | memoryview, where: str) -> array[int]:
    """The numbers in u32 little endian bytes. Raises FormatError."""
    if len(data) % 4:
        raise FormatError(f"{where} holds no token ids", cause=f"{len(data)} bytes are no multiple of 4")
    ids: array[int] = array("I")
    ids.frombytes(data)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids


@dataclass(frozen=True, slots=True)
class Extra:
    """What tokens `start` to `start + count` mean beyond their ids: an image under placeholder tokens, positions that
    do not just count up. `digest`: the full digest of it, never a shortened one.
    """

    start: int
    count: int
    kind: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A block of the chain: tokens `start` to `start + count`. Keys are 32 bytes, `token_hmac` 16."""

    key: bytes
    parent: bytes
    start: int
    count: int
    token_hmac: bytes

    @property
    def end(self) -> int:
        return self.start + self.count


def block_extras(extras: Sequence[Extra], start: int, end: int) -> bytes:
    """The extras part of the key of the block [start, end): for each extra that overlaps it, by start, then kind, then
    digest, a frame of frames(start u64 LE, count u64 LE, kind, digest). Without any: no bytes.
    """
    touching = [extra for extra in extras if extra.start < end and extra.start + extra.count > start]
    touching.sort(key=lambda extra: (extra.start, extra.count, extra.kind.encode(), extra.digest))
    return frames(
        *(
            frames(
                extra.start.to_bytes(8, "little"), extra.count.to_bytes(8, "little"), extra.kind.encode(), extra.digest
            )
            for extra in touching
        )
    )


def chain(
    secret: bytes,
    nsdigest: str,
    tokens: Tokens,
    block_tokens: int = BLOCK_TOKENS,
    extras: Sequence[Extra] = (),
    *,
    parent: bytes = ROOT,
    start: int = 0,
) -> list[BlockKey]:
    """The blocks of `tokens` in order; the last may be a tail. `nsdigest` in hex. `parent` and `start` continue a
    chain whose first `start` tokens (a multiple of `block_tokens`) are not in `tokens`. Raises UsageError.
    """
    if start % block_tokens or ANCHOR_TOKENS % block_tokens:
        raise UsageError(
            f"blocks of {block_tokens} tokens cannot go on at token {start}",
            hint=f"blocks divide {ANCHOR_TOKENS} tokens, and a chain goes on at the end of a whole block",
        )
    flat = token_bytes(tokens)
    size = 4 * block_tokens
    head = frames(b"kvctl.block/1", bytes.fromhex(nsdigest))
    token_head = frames(b"kvctl.tokens/1")
    key_length = len(ROOT).to_bytes(4, "little")
    mac = _mac(secret)
    blocks: list[BlockKey] = []
    for at in range(0, len(flat), size):
        part = bytes(flat[at : at + size])
        first, count = start + at // 4, len(part) // 4
        framed = len(part).to_bytes(4, "little") + part
        more = block_extras(extras, first, first + count) if extras else b""
        key = mac(b"".join((head, key_length, parent, framed, len(more).to_bytes(4, "little"), more)))
        check = mac(token_head + framed)[:TOKEN_HMAC_SIZE]
        blocks.append(BlockKey(key, parent, first, count, check))
        parent = key
    return blocks


def _mac(secret: bytes) -> Callable[[bytes], bytes]:
    """HMAC-SHA256 under one secret of at most 64 bytes. The key's two blocks are hashed once: `hmac.digest` takes more
    than twice as long for messages as short as a block of tokens.
    """
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in secret.ljust(64, b"\0")))
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in secret.ljust(64, b"\0")))

    def mac(message: bytes) -> bytes:
        first, second = inner.copy(), outer.copy()
        first.update(message)
        second.update(first.digest())
        return second.digest()

    return mac


def token_hmac(secret: bytes, tokens: Tokens) -> bytes:
    """32 bytes; the HMAC of a block is its first 16."""
    return hmac.digest(secret, frames(b"kvctl.tokens/1", token_bytes(tokens)), "sha256")


def same_tokens(secret: bytes, tokens: Tokens, expected: bytes) -> bool:
    """Whether `expected` (16 or 32 bytes) is the HMAC of `tokens`, compared in constant time."""
    return hmac.compare_digest(token_hmac(secret, tokens)[: len(expected)], expected) and len(expected) in {16, 32}
