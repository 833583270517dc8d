"""Resume time against the size of the store: pulls of one session while 10, 1,000, 100,000 others are in a file store.

The others are sessions of one block and of a namespace of their own: pack, index node and manifest, as a push writes
them, but without its fsyncs, locks and look-ups, so that 100,000 are made in minutes. One of them is pulled at the end
of each step, which shows that they are sessions.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import statistics
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.access import secret_of
from kvctl.kv.cutting import Cut
from kvctl.kv.encoding import encode_cut
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.index import PackUse, make_nodes, node_key
from kvctl.kv.names import SessionName
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import LayerKv, MemorySink, MemorySource
from kvctl.kv.tokens import chain, token_bytes, token_hmac
from kvctl.kv.writing import make_manifest
from kvctl.repo.chunks import ChunkRef, digest_of
from kvctl.repo.repo import Repo
from kvctl_file.store import FileStore
from kvctl_file.transport import FileTransport
from scripts.bench import kv_data, table
from scripts.bench.rival import ModelFile

TINY: Final = Descriptor("dd" * 32, "bb" * 32, "cc" * 32, "BF16", (Group("full", (0,), 1, 8, 8),))
BLOCK: Final = 16
CONTROL: Final = ("stat", "get", "put", "delete", "list")
Json = dict[str, Any]  # Any: JSON


def measure(work: str, folder: str, file: ModelFile, counts: Sequence[int], pulls: int) -> Iterator[Json]:
    """One row per count: p50 and p99 of `pulls` pulls of `file`'s session, and the requests of one."""
    place = os.path.join(work, "kv-growth")
    shutil.rmtree(place, ignore_errors=True)
    repo = (StoreConfig(f"file://{place}"),)
    ctx = Context()
    Repo.init(repo, replicas=1, ctx=ctx).close()
    memory, tensors = kv_data.read_file(folder, file)
    push_session(PushSession(repo, kv_data.address(file), kv_data.source_of(file, tensors, 0)), ctx)
    _push_tiny(repo, ctx)
    sink = kv_data.TouchedSink(kv_data.tokens_of(file) * kv_data.TOKEN_BYTES)
    request = PullSession(repo, kv_data.address(file), sink)
    made = 0
    for count in counts:
        with Repo.open(repo, ctx) as opened:
            secret = secret_of(opened, None, "others")
        begin = time.perf_counter()
        for number in range(made, count):
            _write(place, secret, number)
        made = max(made, count)
        making = time.perf_counter() - begin
        other = MemorySink()
        pull_session(PullSession(repo, str(_other(made - 1)), other), ctx)
        assert bytes(other.layers[0, 0].k) == _payload(made - 1)
        other.close()
        pull_session(request, ctx)
        seconds: list[float] = []
        for _ in range(pulls):
            begin = time.perf_counter()
            pull_session(request, ctx)
            seconds.append(time.perf_counter() - begin)
        with counted() as requests:
            pull_session(request, ctx)
        yield {
            "others": count, "p50": statistics.median(seconds), "p99": table.percentile(seconds, 0.99),
            "pulls": pulls, "requests": sum(requests.values()), "by_kind": dict(requests), "made_in_s": making,
        }  # fmt: skip
    memory.close()
    shutil.rmtree(place)


def _other(number: int) -> SessionName:
    return SessionName("others", f"s{number}")


def _payload(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK * 16)


def _source(number: int) -> MemorySource:
    data = memoryview(_payload(number))
    tokens = array("I", random.Random(-1 - number).randbytes(4 * BLOCK))
    return MemorySource(TINY, tokens, {(0, 0): LayerKv(data, data)})


def _push_tiny(repo: tuple[StoreConfig, ...], ctx: Context) -> None:
    """A push of the same kind, which leaves the namespace's descriptor behind."""
    push_session(PushSession(repo, "others/first", _source(1 << 40)), ctx)


def _write(place: str, secret: bytes, number: int) -> None:
    source = _source(number)
    blocks = chain(secret, TINY.digest, source.tokens, BLOCK, ())
    parts, header = encode_cut(TINY, Cut(0, 0, 0, BLOCK), blocks, source, "none")
    data = b"".join(parts)
    ref = ChunkRef.fresh(digest_of(data), len(data))
    uses = [PackUse(0, 0, BLOCK, 1, 1, header, ref)]
    flat = token_bytes(source.tokens)
    (node,) = make_nodes(secret, blocks, flat, uses, TINY)
    name = _other(number)
    manifest = make_manifest(
        name, None, TINY, BLOCK, token_hmac(secret, source.tokens), uses, [node.key], None,
        producer={}, labels={}, codecs=("none",),
    )  # fmt: skip
    _put(place, ref.key, data)
    _put(place, node_key(TINY.digest, node.key), node.to_bytes())
    _put(place, name.key(1), manifest.to_bytes())


def _put(place: str, key: str, data: bytes | memoryview) -> None:
    path = os.path.join(place, key)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        file.write(data)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What file stores are asked, by kind; bulk reads are `read`."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def counting(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:  # Any: passed on as they are
        @functools.wraps(real)
        def call(*args: Any, **more: Any) -> Any:  # Any: passed on
            with lock:
                counts[kind] += 1
            return real(*args, **more)

        return call

    with ExitStack() as stack:
        for owner, name in (*((FileStore, name) for name in CONTROL), (FileTransport, "perform")):
            kind = "read" if name == "perform" else name
            stack.enter_context(mock.patch.object(owner, name, counting(kind, getattr(owner, name))))
        yield counts
