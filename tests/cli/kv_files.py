"""KV bundles of a made-up model, for the program's tests: random bytes, real tokens, no torch."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path

from kvctl.kv.bundle import read_bundle, write_bundle
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.seams import LayerKv

WEIGHTS = "ab" * 32
FULL = Group("full", (0, 1, 2), 4, 8, 8)
MEANING = Descriptor(WEIGHTS, "11" * 32, "22" * 32, "BF16", (FULL,))
PER_TOKEN = 3 * 2 * 4 * 8 * 2


def tokens_of(count: int, seed: int = 0) -> array[int]:
    """The first tokens of a seed are the same for every count."""
    rng = random.Random(seed)
    return array("I", (rng.randrange(32000) for _ in range(count)))


def bundle_at(
    path: Path,
    count: int,
    *,
    seed: int = 0,
    meaning: Descriptor = MEANING,
    model: str = "m",
    with_ids: bool = True,
) -> Path:
    """A bundle of `count` tokens; the KV of a token depends on the seed and its place only."""
    row = FULL.k_dim * 2
    layers = {}
    for layer in FULL.layers:
        parts = []
        for part in "kv":
            heads = [random.Random(f"{seed}{part}{layer}{head}").randbytes(row * 4096) for head in range(FULL.kv_heads)]
            parts.append(memoryview(b"".join(head[: row * count] for head in heads)))
        layers[0, layer] = LayerKv(parts[0], parts[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = tokens_of(count, seed) if with_ids else None
    write_bundle(str(path), meaning, count, layers, token_ids=ids, producer={"model": model, "engine": "test"})
    return path


def other_weights(digest: str) -> Descriptor:
    return replace(MEANING, weights=digest)


def kv_of(path: Path) -> tuple[int, bytes]:
    """Tokens, and all bytes of the tensors."""
    with read_bundle(str(path)) as bundle:
        return bundle.tokens, b"".join(bytes(kv.k) + bytes(kv.v) for _, kv in sorted(bundle.layers.items()))
