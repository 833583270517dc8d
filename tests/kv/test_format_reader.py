"""A reader of repos written from `kvctl help format` alone: it imports nothing of kvctl, and reads the test vectors.

Where this file and format.md disagree, one of them is wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import blake3
import pytest
import xxhash

zstandard = pytest.importorskip("zstandard", reason="pip install zstandard")

VECTORS = Path(__file__).resolve().parent / "vectors"
REPO = VECTORS / "repo"
LEAF = 262144

Json = Any  # Any: JSON


def get(key: str) -> bytes:
    """The store is a folder, and keys are paths."""
    return (REPO / key).read_bytes()


def document(key: str, schema: str) -> Json:
    found = json.loads(get(key))
    assert found["schema"] == schema
    return found


def xxh3(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def chunk(name: str, size: int) -> bytes:
    data = get(f"chunks/{name[:2]}/{name}")
    assert len(data) == size
    assert blake3.blake3(data).hexdigest() == name.partition(".")[0]
    return data


def frames(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def mac(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()


# -- models -------------------------------------------------------------------------------------------------


def rebuilt(manifest: Json, file: Json) -> bytes:
    """The file, every leaf checked on the way."""
    chunks = [chunk(*entry) for entry in manifest["chunks"]]
    header: bytes = chunks[file["header"]]
    assert len(header) == file["header_size"]
    data = bytearray(file["size"] - len(header))
    table = chunks[file["leaves"]]
    leaf_at = filled = 0
    for number, *parts in file["data"]:
        content = chunks[number]
        for start in range(0, len(content), LEAF):
            assert xxh3(content[start : start + LEAF]) == struct.unpack_from("<Q", table, leaf_at)[0]
            leaf_at += 8
        if isinstance(parts[0], int):
            parts = [[parts[0], 1, len(content), len(content)]]
        at = 0
        for start, rows, stride, width in parts:
            for row in range(rows):
                data[start + row * stride : start + row * stride + width] = content[at : at + width]
                at += width
        assert at == len(content)
        filled += at
    assert (leaf_at, filled) == (len(table), len(data))
    return header + data


def text(name: str) -> bytes:
    return frames(name.encode())


def shape_of(dtype: str, shape: list[int]) -> bytes:
    return text(dtype) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", dim) for dim in shape)


def digests_of(file: bytes) -> tuple[dict[str, str], str]:
    """(tensor digests, model digest) of a safetensors file."""
    (length,) = struct.unpack_from("<Q", file)
    header = json.loads(file[8 : 8 + length])
    tensors: dict[str, str] = {}
    level: list[bytes] = []
    for name in sorted(header, key=str.encode):
        dtype, shape, (begin, end) = (header[name][field] for field in ("dtype", "shape", "data_offsets"))
        data = file[8 + length + begin : 8 + length + end]
        whole = b"kvctl.tensor/1\0" + shape_of(dtype, shape) + struct.pack("<Q", len(data)) + data
        digest = blake3.blake3(whole).digest()
        tensors[name] = digest.hex()
        level.append(blake3.blake3(b"kvctl.model.leaf/1\0" + text(name) + shape_of(dtype, shape) + digest).digest())
    count = struct.pack("<Q", len(level))
    while len(level) > 1:
        pairs = [blake3.blake3(b"kvctl.model.node/1\0" + level[i] + level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = [pair.digest() for pair in pairs] + level[2 * len(pairs) :]
    top = level[0] if level else bytes(32)
    return tensors, blake3.blake3(b"kvctl.model/1\0" + count + top).hexdigest()


# -- packs --------------------------------------------------------------------------------------------------


@dataclass
class Fragment:
    layer: int
    part: str
    heads: range
    blocks: range
    offset: int
    stored: int
    raw: int
    codec: int
    width: int
    checksum: int


@dataclass
class Pack:
    data: bytes
    ns: str
    dtype: str
    kind: str
    group: int
    heads: int
    block_tokens: int
    strides: dict[str, int]
    absent: int
    blocks: list[tuple[bytes, bytes, int, int, bytes]]  # key, parent, first token, tokens, token HMAC
    fragments: list[Fragment]


def pieces(count: int, step: int) -> Iterator[range]:
    for first in range(0, count, step):
        yield range(first, min(first + step, count))


def parse_pack(data: bytes, header_size: int) -> Pack:
    header = data[:header_size]
    assert header[:8] == b"KVCTLPK1"
    version, size, pack_size, checksum = struct.unpack_from("<IIQQ", header, 8)
    assert (version, size, pack_size) == (1, header_size, len(data))
    assert xxh3(header[:24] + bytes(8) + header[32:]) == checksum
    ns, dtype, kind = header[32:64].hex(), header[64:80].rstrip(b"\0").decode(), header[80:96].rstrip(b"\0").decode()
    (group, layer_count, heads, k_dim, v_dim, window) = struct.unpack_from("<6I", header, 96)
    (block_tokens, block_count, head_step, run_blocks) = struct.unpack_from("<4I", header, 120)
    (k_stride, v_stride, fragment_count) = struct.unpack_from("<3I", header, 136)
    (layers_at, blocks_at, fragments_at, absent) = struct.unpack_from("<4I", header, 148)
    assert header[164:192] == bytes(28)
    assert (layers_at, blocks_at) == (192, 192 + -(-4 * layer_count // 16) * 16)
    assert fragments_at == blocks_at + 96 * block_count
    assert header_size == -(-(fragments_at + 32 * fragment_count + 16) // 4096) * 4096
    assert (k_stride, v_stride, window) == (2 * k_dim, 2 * v_dim, 32 if kind == "sliding" else 0)  # BF16
    layers = struct.unpack_from(f"<{layer_count}I", header, layers_at)
    blocks = []
    for number in range(block_count):
        key, parent, first, tokens, zero, check = struct.unpack_from("<32s32sQII16s", header, blocks_at + 96 * number)
        assert zero == 0
        blocks.append((key, parent, first, tokens, check))
    strides = {"k": k_stride, "v": v_stride} if v_stride else {"k": k_stride}
    fragments: list[Fragment] = []
    end = header_size
    for layer in layers:
        for part, stride in strides.items():
            for head_range in pieces(heads, head_step):
                for run in pieces(block_count, run_blocks):
                    at = fragments_at + 32 * len(fragments)
                    entry = struct.unpack_from("<QIIBB6sQ", header, at)
                    offset, stored, raw, codec, width, _, fragment_checksum = entry
                    align = 4096 if stored > 65536 else 64
                    assert offset == -(-end // align) * align
                    assert data[end:offset] == bytes(offset - end)
                    assert raw == len(head_range) * len(run) * block_tokens * stride
                    end = offset + stored
                    fragments.append(
                        Fragment(layer, part, head_range, run, offset, stored, raw, codec, width, fragment_checksum)
                    )
    assert len(fragments) == fragment_count
    assert end == len(data)
    return Pack(data, ns, dtype, kind, group, heads, block_tokens, strides, absent, blocks, fragments)


def raw_bytes(pack: Pack, fragment: Fragment) -> bytes:
    stored = pack.data[fragment.offset : fragment.offset + fragment.stored]
    assert xxh3(stored) == fragment.checksum
    if fragment.codec == 0:
        return stored
    assert fragment.codec == 1
    shuffled = zstandard.ZstdDecompressor().decompress(stored)
    assert len(shuffled) == fragment.raw
    count = fragment.raw // fragment.width
    raw = bytearray(fragment.raw)
    for byte in range(fragment.width):
        raw[byte : count * fragment.width : fragment.width] = shuffled[byte * count : (byte + 1) * count]
    raw[count * fragment.width :] = shuffled[count * fragment.width :]
    return bytes(raw)


def rows_of(pack: Pack) -> Iterator[tuple[int, str, int, int, bytes]]:
    """(layer, part, head, token, bytes) for every row of the pack, zeros included."""
    for fragment in pack.fragments:
        raw = raw_bytes(pack, fragment)
        stride = pack.strides[fragment.part]
        at = 0
        for head in fragment.heads:
            for block in fragment.blocks:
                for row in range(pack.block_tokens):
                    yield fragment.layer, fragment.part, head, pack.blocks[block][2] + row, raw[at : at + stride]
                    at += stride


# -- what the vectors hold ----------------------------------------------------------------------------------

TENANT, SESSION, TOKENS = "alice", "notes/first chat", 1061
MASTER = bytes.fromhex((VECTORS / "kv.key").read_text().strip())
EXTRA = (3, 6, b"image", hashlib.sha256(b"a picture").digest())


def expected_row(layer: int, part: str, head: int, token: int) -> bytes:
    noise = hashlib.sha256(f"{layer} {part} {head} {token}".encode()).digest()[:4]
    return bytes(byte for low in noise for byte in (low, 0x3F))


def session() -> Json:
    return document(f"sessions/{quote(TENANT, safe='')}/{quote(SESSION, safe='')}/1.json", "kvctl.session/1")


def domain_secret() -> bytes:
    return mac(MASTER, frames(b"kvctl.tenant/1", TENANT.encode()))


def expected_blocks(ns: str, tokens: bytes) -> list[tuple[bytes, bytes, int, int, bytes]]:
    secret = domain_secret()
    blocks = []
    parent = bytes(32)
    for first in range(0, len(tokens) // 4, 16):
        part = tokens[4 * first : 4 * first + 64]
        start, count, kind, digest = EXTRA
        touches = start < first + 16 and start + count > first
        extras = frames(frames(struct.pack("<Q", start), struct.pack("<Q", count), kind, digest)) if touches else b""
        key = mac(secret, frames(b"kvctl.block/1", bytes.fromhex(ns), parent, part, extras))
        check = mac(secret, frames(b"kvctl.tokens/1", part))[:16]
        blocks.append((key, parent, first, len(part) // 4, check))
        parent = key
    return blocks


def test_the_repo_says_what_it_is() -> None:
    member, repo = document("member.json", "kvctl.member/1"), document("repo.json", "kvctl.repo/1")
    assert member["repo"] == repo["id"]
    assert repo["epoch"]["members"] == [member["member"]]
    assert repo["hashes"] == {"digest": "blake3-256", "leaf": "xxh3-64", "leaf_size": LEAF}
    assert repo["features"]["read"] == []
    assert repo["key_id"] == mac(MASTER, frames(b"kvctl.key-id/1"))[:8].hex()
    names = [[unquote(part) for part in path.relative_to(REPO).parts] for path in (REPO / "sessions").rglob("*.json")]
    assert names == [["sessions", TENANT, SESSION, "1.json"]]


def test_the_model_is_rebuilt_and_its_digests_are_right() -> None:
    manifest = document("models/tiny/1.json", "kvctl.model/1")
    (file,) = manifest["files"]
    content = rebuilt(manifest, file)
    assert any(isinstance(part[0], list) and part[0][1] > 1 for _, *part in file["data"])  # tiles are among them
    assert digests_of(content) == (manifest["tensors"], manifest["digest"])
    config, tokenizer = (chunk(*manifest["chunks"][item["chunk"]]) for item in manifest["sidecars"])
    assert json.loads(config)["num_hidden_layers"] == 3
    described = document(f"ns/{session()['ns']}.json", "kvctl.kv-ns/1")
    assert described["tokenizer"] == hashlib.sha256(frames(b"tokenizer.json", tokenizer)).hexdigest()
    assert described["weights"] == manifest["digest"]
    meaning = {"rope": {"rope_theta": "10000", "rope_type": "default"}, "rms_norm_eps": "0.00001", "head_dim": "4"}
    canonical = json.dumps(meaning, sort_keys=True, separators=(",", ":")).encode()
    assert described["rope"] == hashlib.sha256(canonical).hexdigest()


def test_the_descriptor_is_canonical_and_named_by_its_digest() -> None:
    ns = session()["ns"]
    data = get(f"ns/{ns}.json")
    assert hashlib.sha256(data).hexdigest() == ns
    assert json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == data
    salt = mac(domain_secret(), frames(b"kvctl.salt/1", b"a salt that no object holds")).hex()
    assert json.loads(data)["salt"] == salt
    for path in REPO.rglob("*"):
        assert path.is_dir() or b"a salt" not in path.read_bytes()


def test_keys_parents_and_hmacs_are_those_of_the_tokens() -> None:
    manifest = session()
    tokens = chunk(*manifest["chunks"][manifest["tokens_chunk"]])
    assert len(tokens) == 4 * TOKENS == 4 * manifest["tokens"]
    assert mac(domain_secret(), frames(b"kvctl.tokens/1", tokens)).hex() == manifest["token_hmac"]
    expected = expected_blocks(manifest["ns"], tokens)
    assert [block[3] for block in expected] == [16] * 66 + [5]
    ends: dict[int, int] = {}
    for number, group, first, count, blocks, header_size, total in manifest["packs"]:
        pack = parse_pack(chunk(*manifest["chunks"][number]), header_size)
        assert (pack.ns, pack.group, len(pack.blocks)) == (manifest["ns"], group, total)
        begin = first // 16
        assert pack.blocks == expected[begin : begin + blocks]
        assert pack.blocks[0][2] + pack.absent == first
        assert group not in ends or ends[group] == first
        ends[group] = first + count
    assert ends == {0: TOKENS, 1: TOKENS}


def test_every_byte_of_kv_is_there() -> None:
    manifest = session()
    described = json.loads(get(f"ns/{manifest['ns']}.json"))
    seen: set[tuple[int, str, int, int]] = set()
    codecs = set()
    for number, group, first, count, _, header_size, _ in manifest["packs"]:
        pack = parse_pack(chunk(*manifest["chunks"][number]), header_size)
        codecs |= {fragment.codec for fragment in pack.fragments}
        assert (pack.kind, pack.dtype) == (described["groups"][group]["kind"], "BF16")
        for layer, part, head, token, row in rows_of(pack):
            if first <= token < first + count:
                assert row == expected_row(layer, part, head, token)
                seen.add((layer, part, head, token))
            else:  # before a window, or behind the tail
                assert row == bytes(8)
    assert codecs == {0, 1}
    window = TOKENS - 31
    assert seen == {
        (layer, part, head, token)
        for layer in range(3)
        for part in "kv"
        for head in range(2)
        for token in range(window if layer == 1 else 0, TOKENS)
    }


def test_a_layer_is_one_range_of_a_pack() -> None:
    manifest = session()
    for number, _, _, _, _, header_size, _ in manifest["packs"]:
        pack = parse_pack(chunk(*manifest["chunks"][number]), header_size)
        order = [fragment.layer for fragment in pack.fragments]
        assert order == sorted(order)


def spacing(place: int) -> int:
    return max(1024, 2 ** (place.bit_length() - 1) // 16) if place else 1024


def places(tokens: int, block_tokens: int) -> list[int]:
    """Where a session has index nodes."""
    found = [place for place in range(1024, tokens + 1, 1024) if place % spacing(place) == 0]
    at = found[-1] if found else 0
    widths = [spacing(at) // 8**power for power in range(1, 9)]
    for step in [*(width for width in widths if width > 8 * block_tokens), *(n * block_tokens for n in (8, 4, 2, 1))]:
        fit = (tokens - at) // step
        found += [at + number * step for number in range(1, fit + 1)]
        at += fit * step
    return found if at == tokens else [*found, tokens]


def test_index_nodes_lie_where_they_must() -> None:
    known = json.loads((VECTORS / "places.json").read_text())
    assert sum(len(by_tokens) for by_tokens in known.values()) == 24
    for block_tokens, by_tokens in known.items():
        for tokens, expected in by_tokens.items():
            assert places(int(tokens), int(block_tokens)) == expected


def test_index_nodes_lead_to_the_session() -> None:
    manifest = session()
    ns = manifest["ns"]
    tokens = chunk(*manifest["chunks"][manifest["tokens_chunk"]])
    keys = {block[2] + block[3]: block[0] for block in expected_blocks(ns, tokens)}
    ends = places(TOKENS, 16)
    assert ends == [1024, 1056, TOKENS]
    assert manifest["index"] == [keys[end].hex() for end in ends]
    for end, key in zip(ends, manifest["index"], strict=True):
        node = document(f"index/{ns}/{key}.json", "kvctl.index/1")
        anchor = max((place for place in ends if place < end and place % spacing(place) == 0), default=0)
        assert (node["key"], node["tokens"]) == (key, end)
        assert node["previous"] == (keys[anchor].hex() if anchor else "00" * 32)
        since = mac(domain_secret(), frames(b"kvctl.tokens/1", tokens[4 * anchor : 4 * end]))
        assert node["token_hmac"] == since[:16].hex()
        for name, size, group, first, count, blocks, total, header_size in node["packs"]:
            pack = parse_pack(chunk(name, size), header_size)
            assert (pack.group, len(pack.blocks)) == (group, total)
            assert first + count == min(end, sum(pack.blocks[blocks - 1][2:4]))
