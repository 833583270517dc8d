"""Writes the test vectors of the format, `tests/kv/vectors/`: a small repo with a model and a session, byte for byte
the same on every run (fixed ids, incarnations, times and secret). `tests/kv/test_format_reader.py` reads them by
`kvctl help format` alone. The zstd parts also depend on the version of libzstd.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from array import array
from pathlib import Path

from kvctl.kv.identity import Descriptor, Group, Lora, rope_digest, tokenizer_digest
from kvctl.kv.index import PackUse, make_nodes, node_key
from kvctl.kv.names import SessionName
from kvctl.kv.packs import PackGeometry, TokenView, encode_pack
from kvctl.kv.places import points
from kvctl.kv.tokens import Extra, chain, domain_secret, key_id, salt_id, token_bytes, token_hmac
from kvctl.kv.writing import make_manifest
from kvctl.repo.chunks import LEAF, ChunkRef, digest_of, leaf_table
from kvctl.repo.format import Epoch, MemberFile, RepoFormat
from kvctl.repo.layout import model_key
from kvctl.weights.cut import cut_file, gather
from kvctl.weights.digests import TensorDigest, model_digest, tensor_digest
from kvctl.weights.manifest import DataChunk, ModelFile, ModelManifest, Sidecar
from kvctl.weights.safetensors import parse_header

VECTORS = Path(__file__).resolve().parent.parent / "tests" / "kv" / "vectors"
MASTER = bytes(range(32))
REPO, MEMBER = "00112233445566778899aabbccddeeff", "f0e1d2c3b4a5968778695a4b3c2d1e0f"
CREATED = "2026-11-29T12:00:00+00:00"
SALT = b"a salt that no object holds"
TOKENS, WINDOW = 1061, 32  # 66 blocks of 16 and a tail of 5; the window's KV begins inside a block
TENANT, SESSION = "alice", "notes/first chat"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
}
TOKENIZER = b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]}}'
GROUPS = (Group("full", (0, 2), 2, 4, 4), Group("sliding", (1,), 2, 4, 4, WINDOW))
EXTRAS = (Extra(3, 6, "image", hashlib.sha256(b"a picture").digest()),)

LENGTHS = {
    16: (1, 15, 16, 1023, 1024, TOKENS, 2047, 32768, 33791, 34815, 34816, 65535, 131071, 262144, 438764, 4194303),
    1: (1023, 40000),
    256: (500, 34815, 438764),
    1024: (1000, 5000, 438764),
}  # tokens of sessions, by those of a block


def kv_row(layer: int, part: str, head: int, token: int) -> bytes:
    """K or V of one token of one head: 4 BF16, the low bytes from a hash, the high bytes 0x3f (0.5 to 2)."""
    noise = hashlib.sha256(f"{layer} {part} {head} {token}".encode()).digest()[:4]
    return bytes(byte for low in noise for byte in (low, 0x3F))


def view(group: Group, layer: int, part: str, start: int) -> TokenView:
    rows = (kv_row(layer, part, head, token) for head in range(group.kv_heads) for token in range(start, TOKENS))
    return TokenView(memoryview(b"".join(rows)), start, TOKENS - start)


class Vectors:
    """Objects by key, chunks with counted incarnations."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.chunks = 0

    def chunk(self, data: bytes | memoryview) -> ChunkRef:
        self.chunks += 1
        ref = ChunkRef(digest_of(data), f"{self.chunks:08x}", len(data))
        self.objects[ref.key] = bytes(data)
        return ref


def safetensors() -> bytes:
    made = random.Random(3)
    tensors = {
        "model.embed_tokens.weight": ("BF16", [8, 16]),
        "model.layers.0.mlp.down_proj.weight": ("F32", [32, 128]),
        "model.norm.weight": ("F32", [3]),
    }
    header: dict[str, object] = {}
    data = b""
    for name, (dtype, shape) in tensors.items():
        size = (2 if dtype == "BF16" else 4) * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += made.randbytes(size)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def add_model(made: Vectors) -> str:
    """Returns the model digest."""
    file = safetensors()
    header = parse_header(file, len(file), "model.safetensors")
    data = memoryview(file)[header.header_size :]
    refs: list[ChunkRef] = [made.chunk(file[: header.header_size])]
    chunks: list[DataChunk] = []
    table = b""
    for cut in cut_file(header, LEAF):
        held = bytearray(cut.size)
        gather(cut, data, memoryview(held))
        chunks.append(DataChunk(len(refs), cut))
        refs.append(made.chunk(memoryview(held)))
        table += leaf_table(held)
    refs.append(made.chunk(table))
    sidecars = []
    for name, content in (("config.json", json.dumps(CONFIG).encode()), ("tokenizer.json", TOKENIZER)):
        sidecars.append(Sidecar(name, len(content), len(refs)))
        refs.append(made.chunk(content))
    digests = [
        TensorDigest(item.name, item.dtype, item.shape, tensor_digest(item, data[item.start : item.end]))
        for item in header.tensors
    ]
    manifest = ModelManifest(
        name="tiny",
        version="1",
        created=CREATED,
        digest=model_digest(digests),
        stripe=LEAF,
        leaf=LEAF,
        chunks=tuple((ref.name, ref.size) for ref in refs),
        files=(ModelFile("model.safetensors", len(file), 0, header.header_size, len(chunks) + 1, tuple(chunks)),),
        tensors={item.name: item.digest for item in digests},
        sidecars=tuple(sidecars),
    )
    made.objects[model_key("tiny", "1")] = manifest.to_bytes()
    return manifest.digest


def descriptor(weights: str) -> Descriptor:
    return Descriptor(
        weights=weights,
        tokenizer=tokenizer_digest({"tokenizer.json": TOKENIZER}),
        rope=rope_digest(CONFIG),
        dtype="BF16",
        groups=GROUPS,
        lora=(Lora(hashlib.sha256(b"an adapter").hexdigest(), "0.5"),),
        salt=salt_id(domain_secret(MASTER, TENANT), SALT),
    )


def add_session(made: Vectors, meaning: Descriptor) -> None:
    secret = domain_secret(MASTER, TENANT)
    choose = random.Random(11)
    ids = array("I", (choose.randrange(50_000) for _ in range(TOKENS)))
    blocks = chain(secret, meaning.digest, ids, meaning.block_tokens, EXTRAS)
    start = TOKENS - (WINDOW - 1)
    uses: list[PackUse] = []
    # (group, first token, end, codec, heads and blocks of a fragment)
    for group, first, end, codec, step, run in (
        (0, 0, 1024, "zstd", 1, 24),
        (0, 1024, TOKENS, "none", 2, 2),
        (1, start, TOKENS, "none", 1, 3),
    ):
        own = blocks[first // 16 : -(-end // 16)]
        geometry = PackGeometry(group, meaning.groups[group], "BF16", len(own), step, run)

        def source(layer: int, part: str, group: int = group, first: int = first) -> TokenView:
            return view(meaning.groups[group], layer, part, start if group else 0)

        pack = encode_pack(geometry, meaning.digest, own, source, codec, first=first)
        uses.append(
            PackUse(group, first, end - first, len(own), len(own), geometry.header_size, made.chunk(bytes(pack)))
        )
    made.objects[f"ns/{meaning.digest}.json"] = meaning.canonical()
    nodes = make_nodes(secret, blocks, token_bytes(ids), uses, meaning)
    for node in nodes:
        made.objects[node_key(meaning.digest, node.key)] = node.to_bytes()
    session = SessionName(TENANT, SESSION)
    manifest = make_manifest(
        session, None, meaning, TOKENS, token_hmac(secret, ids), uses, [node.key for node in nodes],
        made.chunk(token_bytes(ids)), producer={"model": "tiny"}, labels={"team": "docs"}, codecs=("none", "zstd"),
        created=CREATED,
    )  # fmt: skip
    made.objects[session.key(1)] = manifest.to_bytes()


def objects() -> dict[str, bytes]:
    """Every object of the repo's only member, by key."""
    made = Vectors()
    fmt = RepoFormat(
        id=REPO, members=(MEMBER,), epoch=Epoch(1, (MEMBER,)), stripe_size=LEAF, names={MEMBER: "vectors"},
        key_id=key_id(MASTER), generation=2,
    )  # fmt: skip
    made.objects["member.json"] = MemberFile(REPO, MEMBER).to_bytes()
    made.objects["repo.json"] = fmt.to_bytes()
    add_session(made, descriptor(add_model(made)))
    return made.objects


def places() -> str:
    """Where sessions have index nodes: {block_tokens: {tokens: [place, ..]}}, a line each."""
    parts = []
    for block_tokens, lengths in LENGTHS.items():
        lines = ",\n  ".join(f'"{tokens}": {json.dumps(points(tokens, block_tokens))}' for tokens in lengths)
        parts.append(f'"{block_tokens}": {{\n  {lines}\n}}')
    return "{" + ", ".join(parts) + "}\n"


README = """\
# Test vectors of the format

Written by `scripts/make_kv_vectors.py`; the format is `kvctl help format`, a reader written from it alone is
`../test_format_reader.py`.

    kv.key      the master secret, 64 hex digits: bytes 0, 1, .., 31
    repo/       the only member of a repo. Its keys are paths below this folder
    places.json where sessions of some lengths have index nodes: {{block_tokens: {{tokens: [place, ..]}}}}

The model `tiny`, version 1: one safetensors file of three tensors, one of them cut into eight column tiles, and two
sidecars. The session `notes/first chat` of tenant `alice`, generation 1: {tokens} tokens, of which 3 to 8 stand for an
image (extra of kind "image", digest SHA-256("a picture")); the raw salt is "a salt that no object holds"; one adapter.

    group 0     full attention, layers 0 and 2, 2 heads of 4 elements BF16
                pack of tokens 0 to 1023, 64 blocks, zstd, fragments of 1 head and 24 blocks
                pack of tokens 1024 to 1060, 2 blocks and a tail of 5 tokens, fragments of 2 heads and 2 blocks
    group 1     sliding attention, layer 1, window 32: the last 31 tokens are kept
                pack of tokens 1030 to 1060: its first block begins at 1024, 6 tokens of it are not there

K and V of layer l, part p ("k" or "v"), head h, token t: the first 4 bytes of SHA-256 of the text "l p h t" (so
"0 k 1 17") are the low bytes of the 4 elements; each high byte is 0x3f.

The header of the last pack, byte by byte:

    {name}

{dump}

After it come zeros up to 4096, then the fragments: K of head 0 (384 bytes: 3 blocks x 16 tokens x 8 bytes; the first 48
bytes are the zeros of the 6 tokens that are not there, the last 88 those of the 11 that the tail lacks), K of head 1, V
of head 0, V of head 1. 384 is a multiple of 64, so nothing lies between them.
"""

_FIELDS = (
    *((8, "magic"), (4, "version"), (4, "header size 4096"), (8, "pack size"), (8, "XXH3-64 of the header")),
    *((32, "nsdigest"), (16, "dtype"), (16, "kind"), (4, "group 1"), (4, "1 layer"), (4, "2 heads"), (4, "k_dim 4")),
    *((4, "v_dim 4"), (4, "window 32"), (4, "block_tokens 16"), (4, "3 blocks"), (4, "head_step 1")),
    *((4, "run_blocks 3"), (4, "K stride 8"), (4, "V stride 8"), (4, "4 fragments"), (4, "layer table at 192")),
    *((4, "block table at 208"), (4, "fragment table at 496"), (4, "6 tokens are not there"), (28, "zeros")),
    *((4, "layer table: layer 1"), (12, "zeros")),
    *(
        field
        for block in ("1024", "1040", "1056, the tail")
        for field in (
            *((32, f"block from token {block}: key"), (32, "parent"), (8, "first token"), (4, "tokens"), (4, "zero")),
            (16, "token HMAC"),
        )
    ),
    *(
        field
        for fragment in ("K head 0", "K head 1", "V head 0", "V head 1")
        for field in (
            *((8, f"fragment {fragment}: offset"), (4, "stored bytes"), (4, "raw bytes"), (1, "codec none")),
            *((1, "element bytes"), (6, "zeros"), (8, "XXH3-64")),
        )
    ),
)


def readme(found: dict[str, bytes]) -> str:
    (key,) = (key for key, data in found.items() if data[80:87] == b"sliding")
    lines = []
    at = 0
    for size, meaning in _FIELDS:
        part = found[key][at : at + size]
        for row in range(0, size, 16):
            shown = part[row : row + 16].hex(" ", -4)
            lines.append(f"    {at + row:<5} {shown:<36} {meaning if not row else ''}".rstrip())
        at += size
    return README.format(tokens=TOKENS, name=key, dump="\n".join(lines))


def main() -> None:
    folder = VECTORS / "repo"
    shutil.rmtree(folder, ignore_errors=True)
    found = objects()
    for key, data in found.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (VECTORS / "README.md").write_text(readme(found), encoding="utf-8")
    (VECTORS / "places.json").write_text(places(), encoding="ascii")
    (VECTORS / "kv.key").write_text(MASTER.hex() + "\n", encoding="ascii")
    print(f"{len(found)} objects, {sum(map(len, found.values()))} bytes in {folder}")


if __name__ == "__main__":
    main()
