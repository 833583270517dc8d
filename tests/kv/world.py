"""KV for the tests: made from the tokens, so that equal prefixes have equal bytes and any slice can be told."""

from __future__ import annotations

import hashlib
import itertools
import random
from array import array
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.identity import DTYPE_BYTES, Descriptor, Group
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import LayerKv, MemorySink, MemorySource
from kvctl.kv.verdict import window_start
from kvctl.repo.repo import Repo
from kvctl.transfer.report import Report
from kvctl.transports.mem import space

_NAMES = itertools.count()
FULL = Group("full", (0, 1), 2, 8, 8)


def mem_stores(count: int = 1) -> tuple[StoreConfig, ...]:
    # a repo orders its members by URL: with numbers of one width, members are in the order of these
    return tuple(StoreConfig(f"mem://kv-test-{next(_NAMES):06}") for _ in range(count))


def file_stores(folder: Path, count: int = 1) -> tuple[StoreConfig, ...]:
    return tuple(StoreConfig(f"file://{folder}/kv-store{next(_NAMES):06}") for _ in range(count))


def make_repo(stores: Sequence[StoreConfig], ctx: Context, *, replicas: int = 1) -> tuple[StoreConfig, ...]:
    Repo.init(stores, ctx=ctx, replicas=replicas).close()
    return tuple(stores)


def objects(stores: Sequence[StoreConfig], prefix: str = "") -> dict[str, bytes]:
    """What memory stores hold under a prefix."""
    return {
        key: bytes(item.data)
        for config in stores
        for key, item in space(config.url.removeprefix("mem://")).objects.items()
        if key.startswith(prefix)
    }


def skip(stores: Sequence[StoreConfig], seconds: float) -> None:
    """Move the clocks of memory stores forward."""
    for config in stores:
        space(config.url.removeprefix("mem://")).clock_skew += timedelta(seconds=seconds)


def descriptor(*groups: Group, **changes: object) -> Descriptor:
    known: dict[str, object] = {
        "weights": "aa" * 32,
        "tokenizer": "bb" * 32,
        "rope": "cc" * 32,
        "dtype": "BF16",
        "groups": groups or (FULL,),
    }
    return Descriptor(**{**known, **changes})  # type: ignore[arg-type]  # fields by name


def some_tokens(count: int, seed: int = 0) -> array[int]:
    choose = random.Random(seed)
    return array("I", (choose.randrange(50_000) for _ in range(count)))


def some_ids(count: int, seed: int = 0) -> array[int]:
    """As `some_tokens`, quicker, of all u32."""
    return array("I", random.Random(seed).randbytes(4 * count))


def rows_of(tokens: array[int], what: str, width: int) -> list[bytes]:
    """`width` bytes for each token, which follow from all tokens up to it."""
    found: list[bytes] = []
    state = hashlib.blake2b(what.encode(), digest_size=16).digest()
    for token in tokens:
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=16).digest()
        found.append((state * (width // 16 + 1))[:width])
    return found


def layer_kv(meaning: Descriptor, tokens: array[int], group: int, layer: int, start: int) -> LayerKv:
    own = meaning.groups[group]
    if own.recurrent:
        return LayerKv(memoryview(rows_of(tokens, f"state {group} {layer}", own.k_dim)[-1]), memoryview(b""), 0)
    width = DTYPE_BYTES[meaning.dtype]

    def part(name: str, dim: int) -> memoryview:
        heads = [rows_of(tokens, f"{name} {group} {layer} {head}", dim * width) for head in range(own.kv_heads)]
        return memoryview(b"".join(b"".join(head[start:]) for head in heads))

    return LayerKv(part("k", own.k_dim), part("v", own.v_dim) if own.v_dim else memoryview(b""), start)


def source(
    meaning: Descriptor, tokens: array[int], *, whole_windows: bool = False, producer: Mapping[str, str] | None = None
) -> MemorySource:
    """Sliding groups hold their window only, unless `whole_windows`."""
    layers = {
        (number, layer): layer_kv(
            meaning, tokens, number, layer, 0 if whole_windows else window_start(group, len(tokens))
        )
        for number, group in enumerate(meaning.groups)
        for layer in group.layers
    }
    return MemorySource(meaning, tokens, layers, producer=producer or {"model": "tiny"})


def push(
    repo: tuple[StoreConfig, ...], address: str, tokens: array[int], ctx: Context, *groups: Group, **options: object
) -> Report:
    meaning = descriptor(*groups)
    return push_session(PushSession(repo, address, source(meaning, tokens), **options), ctx)  # type: ignore[arg-type]


def check_sink(
    sink: MemorySink, meaning: Descriptor, tokens: array[int], usable: int, heads: tuple[int, int] | None = None
) -> None:
    """Every byte of the first `usable` tokens is what the source had."""
    assert sink.usable == usable
    assert sink.layout is not None
    for slot in sink.layout.slots:
        kv = sink.layers[slot.group, slot.layer]
        own = meaning.groups[slot.group]
        want = layer_kv(meaning, tokens[:usable], slot.group, slot.layer, 0)
        if own.recurrent:
            assert kv.k == want.k
            continue
        low, high = heads or (0, own.kv_heads)
        held = slot.end - slot.start
        for have, all_of_it, row in ((kv.k, want.k, slot.k_row), (kv.v, want.v, slot.v_row)):
            for number, head in enumerate(range(low, high)):
                mine = have[number * held * row : (number * held + usable - slot.start) * row]
                theirs = all_of_it[(head * usable + slot.start) * row : (head + 1) * usable * row]
                assert mine == theirs, (slot, head)
