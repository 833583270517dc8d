"""The connector in a worker's process: KV from the store into the engine's blocks, and out of them into the store, in
threads beside the steps.

A load lands in host memory, is verified there, and is written into the request's blocks layer by layer; a store is read
out of the blocks first, which are free again then, and goes up from host memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kvctl.core.errors import IncompatibleError, KvctlError
from kvctl.core.units import format_size
from kvctl.kv.fetching import choose_heads
from kvctl.kv.identity import DTYPE_BYTES, Descriptor, Group
from kvctl.kv.promoting import prefix_name
from kvctl.kv.push import PushSession
from kvctl.kv.seams import LayerKv, Layout, MemorySource, Slot
from kvctl.kv.tokens import domain_secret
from kvctl.kv.verdict import window_start
from kvctl.memory.buffers import HostBuffer
from kvctl_vllm.counts import Counts
from kvctl_vllm.filling import Filled, Wanted, fill
from kvctl_vllm.held import held, learn_digest
from kvctl_vllm.identity import DTYPES, Identity, digest_folder
from kvctl_vllm.messages import Load, News, Orders, Store
from kvctl_vllm.paging import Pages, pages_of, slots_of
from kvctl_vllm.ranks import Exchange
from kvctl_vllm.settings import Settings
from kvctl_vllm.tiers import Tiers

log = logging.getLogger("vllm.kvctl")
LOADERS: Final = 2
RECENT: Final = 64  # requests whose tokens are remembered, so that they can be stored by their id
TORCH: Final = {theirs: getattr(torch, ours) for ours, theirs in DTYPES.items()}
NOBODY: Final = "0" * 64


@dataclass(slots=True)
class _Loading:
    """A load under way. `layers`: set once that layer is in the blocks, or never will be."""

    load: Load
    layers: dict[int, threading.Event]
    done: threading.Event = field(default_factory=threading.Event)


class WorkerSide:
    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        tiers: Tiers,
        key: bytes | None,
        groups: Sequence[Sequence[str]],
        folder: str,
        rank: tuple[int, int],
        engine: str,
    ) -> None:
        self._exchange = Exchange(engine, rank[0])
        self._settings = settings
        self._identity = identity
        self._tiers = tiers
        self._key = key
        self._several = len(groups) > 1
        self._rank = rank
        self._pages: dict[tuple[int, int], Pages] = {}
        self._problem = ""
        self._group_of: dict[int, int] = {}
        try:
            self._group_of = {layer_number(name): number for number, names in enumerate(groups) for name in names}
        except KvctlError as error:
            self._problem = str(error)
        self._nameless = ""  # why the weights that the engine started with have no digest
        self._lock = threading.Lock()
        self._loads = ThreadPoolExecutor(LOADERS, "kvctl-load")
        self._stores = ThreadPoolExecutor(1, "kvctl-store")
        self._going: dict[str, _Loading] = {}
        self._staging = threading.local()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._sent: set[str] = set()
        self._holding: set[str] = set()  # requests whose blocks are still read
        self._bad: set[int] = set()
        self.counts = Counts()
        self._recent: dict[str, Store] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}  # Any: JSON
        if held().digest is None:
            generation = held().generation
            threading.Thread(target=self._learn, args=(generation, folder), name="kvctl-digest", daemon=True).start()

    def _learn(self, generation: int, folder: str) -> None:
        """The digest of weights that another loader read."""
        digest = self._settings.weights or digest_folder(held().source or folder)
        if digest is None:
            self._nameless = f"the digest of the weights in {folder} is not known: say it as 'weights' in the settings"
        else:
            learn_digest(generation, digest)

    def news(self) -> News:
        now = held()
        problem = self._problem or (self._nameless if now.digest is None else "")
        return News(now.generation, None if problem else now.digest, problem)

    # -- the engine's memory ---------------------------------------------------------------------------------

    def register(self, caches: Mapping[str, Any], isa_of: Mapping[str, str | None]) -> None:  # Any: as vLLM gives them
        """What is not understood is said once; then nothing is loaded and nothing stored."""
        try:
            by_layer = {layer_number(name): name for name in caches}
            descriptor = self._identity.descriptor(NOBODY)
            for number, group in enumerate(descriptor.groups):
                if group.recurrent or group.kind == "indexer":
                    raise IncompatibleError(f"{group.kind} layers of this engine are not stored yet")
                _, heads = choose_heads(group, *self._rank)
                for layer in group.layers:
                    if layer not in by_layer:
                        raise IncompatibleError(f"the engine has no KV of layer {layer}, which config.json describes")
                    name = by_layer[layer]
                    self._pages[number, layer] = pages_of(name, caches[name], group, heads, isa_of.get(name))
        except Exception as error:  # whatever it is, the engine serves without
            self._problem = str(error)
            log.warning("kvctl: KV is neither stored nor loaded: %s", error)

    # -- orders of a step ------------------------------------------------------------------------------------

    def start(self, orders: Orders) -> None:
        with self._lock:
            self.counts.looked(orders.looked)
        for load in orders.loads:
            layers = {layer: threading.Event() for _, layer in self._pages}
            going = self._going[load.request] = _Loading(load, layers)
            self._loads.submit(self._load, going)
        for store in orders.stores:
            with self._lock:
                self._holding.add(store.request)
            self._stores.submit(self._store, store)

    def wait_for_layer(self, name: str) -> None:
        waiting = [going for going in list(self._going.values()) if going.load.waits]
        if waiting:
            layer = layer_number(name)
            for going in waiting:
                if layer in going.layers:
                    going.layers[layer].wait()

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """(stored, loaded, failed) since the last call."""
        with self._lock:
            found = self._sent, self._received, self._failed
            self._sent, self._received, self._failed = set(), set(), set()
        return found

    def bad_blocks(self) -> set[int]:
        for going in list(self._going.values()):
            if going.load.waits:
                going.done.wait()
        with self._lock:
            found, self._bad = self._bad, set()
            self._going = {name: going for name, going in self._going.items() if not going.done.is_set()}
        return found

    # -- loads -------------------------------------------------------------------------------------------------

    def _load(self, going: _Loading) -> None:
        load = going.load
        started = time.monotonic()
        wanted = Wanted(load.want, load.found, load.tier, load.start, load.end, self._several, load.waits)
        try:
            done = fill(
                self._tiers, wanted, lambda: _EngineSink(self, going), self._tiers.shared.depot.ctx,
                handed=lambda: any(layer.is_set() for layer in going.layers.values()),
                rank=self._rank, batch=self._settings.staging // LOADERS,
            )  # fmt: skip
            self._count(load, done)
            usable = done.usable
            log.info(
                "kvctl: request %s: %d of %d tokens loaded in %.3f s (%s)", load.request, usable - load.start,
                load.end - load.start, time.monotonic() - started,
                ", ".join(f"{tokens} from {tier}" for tier, tokens, _ in done.parts),
            )  # fmt: skip
            self._loaded(load, usable)
        except Exception:
            log.exception("kvctl: loading for request %s failed", load.request)
            self._loaded(load, load.start)
        finally:
            for event in going.layers.values():
                event.set()
            going.done.set()

    def _count(self, load: Load, done: Filled) -> None:
        with self._lock:
            self.counts.loads += 1
            self.counts.tokens += done.usable - load.start
            self.counts.lost += load.end - done.usable
            for name, tokens, report in done.parts:
                self.counts.needed += report.needed
                self.counts.fetched += report.fetched
                self.counts.tier(name).tokens += tokens
                self.counts.tier(name).bytes += report.fetched
        for _, _, report in done.parts:
            for note in report.notes:
                log.warning("kvctl: request %s: %s", load.request, note)

    def _loaded(self, load: Load, usable: int) -> None:
        """Tell the engine which blocks hold what they should. In several cache groups block numbers are not unique, so
        there the whole load fails.
        """
        with self._lock:
            if usable < load.end:
                if self._several:
                    self._failed.add(load.request)
                else:
                    block = next(iter(self._pages.values())).block
                    self._bad.update(load.blocks[0][usable // block : -(-load.end // block)])
            if not load.waits:
                self._received.add(load.request)

    def place(self, load: Load, slot: Slot, kv: LayerKv, end: int) -> None:
        """A layer's verified bytes, tokens [slot.start, end), into the request's blocks."""
        dtype = TORCH[load.want.descriptor.dtype]
        pages = self._pages[slot.group, slot.layer]
        ids = load.blocks[self._group_of[slot.layer]]
        if end <= slot.start:
            return
        k = _canonical(kv.k, dtype, slot.heads, slot.end - slot.start)[:, : end - slot.start]
        v = _canonical(kv.v, dtype, slot.heads, slot.end - slot.start)[:, : end - slot.start]
        pages.write(slots_of(ids, pages.block, slot.start, end), k, v)

    def room(self, nbytes: int) -> memoryview:
        """Staging memory of this thread, kept from load to load: fresh memory is slow."""
        known: HostBuffer | None = getattr(self._staging, "buffer", None)
        if known is None or known.nbytes < nbytes:
            if known is not None:
                known.close()
            known = self._staging.buffer = HostBuffer(nbytes)
        return known.view[:nbytes]

    # -- stores ------------------------------------------------------------------------------------------------

    def _store(self, store: Store) -> None:
        try:
            self._put(store)
        except KvctlError as error:
            log.warning("kvctl: request %s is not stored: %s", store.request, error)
            self._settled(store.request, problem=str(error))
        except Exception as error:
            log.exception("kvctl: storing request %s failed", store.request)
            self._settled(store.request, problem=str(error))
        finally:
            self._release(store.request)

    def _release(self, request: str) -> None:
        """The request's blocks are free, as far as kvctl goes; vLLM wants to hear that exactly once."""
        with self._lock:
            if request in self._holding:
                self._holding.discard(request)
                self._sent.add(request)

    def _put(self, store: Store) -> None:
        self._remember(store)
        want = store.want
        starts = [
            self._held_from(want.descriptor, number, store, len(want.tokens))
            for number in range(len(want.descriptor.groups))
        ]
        size = self._size(want.descriptor, starts, len(want.tokens))
        if size > self._settings.staging or self._tiers.resting or store.generation != held().generation:
            self.counts.dropped += 1
            why = (
                f"its {format_size(size)} are more than staging allows" if size > self._settings.staging
                else "the store does not answer" if self._tiers.resting
                else "the weights have changed"
            )  # fmt: skip
            log.warning("kvctl: request %s is not stored: %s", store.request, why)
            self._settled(store.request, problem=why)
            return
        layers, memory = self._read_out(store, starts)
        self._release(store.request)
        try:
            if self._rank[0]:
                self._exchange.give(store.request, [_bytes(part) for part in memory])
            elif self._rank[1] == 1 or self._collect(store, starts, memory):
                self._push(store, layers, size)
        finally:
            del layers, memory

    @property
    def resting(self) -> bool:
        """Whether nothing is asked at the moment: the store did not answer, and no agent has KV ahead of it."""
        return self._tiers.resting

    def outcome(self, request: str) -> dict[str, Any]:  # Any: JSON
        """What became of storing the request whose id contains this: {} while it is under way or unknown."""
        with self._lock:
            return next((dict(found) for name, found in reversed(self._outcomes.items()) if request in name), {})

    def tokens_of(self, request: str) -> list[int] | None:
        with self._lock:
            found = next((store for name, store in reversed(self._recent.items()) if request in name), None)
        return None if found is None else found.want.tokens.tolist()

    def _settled(self, request: str, **what: Any) -> None:  # Any: JSON
        with self._lock:
            self._outcomes[request] = what
            while len(self._outcomes) > RECENT:
                del self._outcomes[next(iter(self._outcomes))]

    def _push(self, store: Store, layers: dict[tuple[int, int], LayerKv], size: int) -> None:
        want = store.want
        session = store.session or str(prefix_name(domain_secret(self._key, want.tenant), want, len(want.tokens)))
        producer = {"engine": "vllm", "model": self._identity.where.rstrip("/").rpartition("/")[2]}
        source = MemorySource(want.descriptor, want.tokens, layers, producer=producer)
        request = PushSession(
            self._tiers.shared.depot.stores, session, source, key=self._key, with_tokens=store.with_tokens,
            codec=self._settings.codec, labels=self._settings.labels, expires=self._settings.expires,
        )  # fmt: skip
        started = time.monotonic()
        pushed = self._tiers.push(request, size)
        report, held_as = pushed.report, pushed.held
        if report is None:
            self.counts.held += held_as is not None
            self.counts.dropped += held_as is None
            where = "" if held_as is None else "; it is in the agent's KV, which brings it there when it does"
            self._settled(store.request, problem=f"the store does not answer{where}")
            return
        self.counts.stores += 1
        self.counts.stored_tokens += len(want.tokens)
        self.counts.written += report.written
        self._settled(
            store.request, session=f"{session}@{report.extra['generation']}", tokens=len(want.tokens),
            written=report.written, seconds=time.monotonic() - started,
        )  # fmt: skip
        log.info(
            "kvctl: request %s: %d tokens stored as %s@%s, %s written in %.3f s", store.request, len(want.tokens),
            session, report.extra["generation"], format_size(report.written), time.monotonic() - started,
        )  # fmt: skip

    def _held_from(self, descriptor: Descriptor, number: int, store: Store, tokens: int) -> int:
        """The first token of a group that is stored: of a sliding one, where its window begins."""
        group = descriptor.groups[number]
        if group.window is None:
            return 0
        pages = self._pages[number, group.layers[0]]
        ids = store.blocks[self._group_of[group.layers[0]]]
        gone = next((place for place, page in enumerate(ids) if page), len(ids)) * pages.block
        return max(gone, window_start(group, tokens) // 16 * 16)

    def _size(self, descriptor: Descriptor, starts: Sequence[int], tokens: int) -> int:
        width = DTYPE_BYTES[descriptor.dtype]
        return sum(
            len(group.layers) * group.kv_heads * (group.k_dim + group.v_dim) * width * (tokens - start)
            for group, start in zip(descriptor.groups, starts, strict=True)
        )

    def _read_out(
        self, store: Store, starts: Sequence[int]
    ) -> tuple[dict[tuple[int, int], LayerKv], list[torch.Tensor]]:
        """The request's KV in canonical form, in memory of its own: in rank 0 with room for all heads, in others their
        own. The tensors are K and V of each layer, in order.
        """
        descriptor, end = store.want.descriptor, len(store.want.tokens)
        dtype = TORCH[descriptor.dtype]
        layers: dict[tuple[int, int], LayerKv] = {}
        memory: list[torch.Tensor] = []
        for number, group in enumerate(descriptor.groups):
            start = starts[number]
            first, count = choose_heads(group, *self._rank)
            heads, own = (count, slice(0, count)) if self._rank[0] else (group.kv_heads, slice(first, first + count))
            for layer in group.layers:
                k = torch.empty(heads, end - start, group.k_dim, dtype=dtype)
                v = torch.empty(heads, end - start, group.v_dim, dtype=dtype)
                ids = store.blocks[self._group_of[layer]]
                self._pages[number, layer].read(ids, start, end, k[own], v[own])
                memory += (k, v)
                layers[number, layer] = LayerKv(_bytes(k), _bytes(v), start)
        return layers, memory

    def _collect(self, store: Store, starts: Sequence[int], memory: Sequence[torch.Tensor]) -> bool:
        """The other ranks' heads into this one's memory; False when one did not come."""
        groups = store.want.descriptor.groups
        have = [0] * len(groups)  # heads of each group that are there
        for rank in range(self._rank[1]):
            shares = [choose_heads(group, rank, self._rank[1]) for group in groups]
            if rank:
                parts = [
                    tensor[first : first + count]
                    for (first, count), tensor in zip(self._by_tensor(groups, shares), memory, strict=True)
                ]
                with self._exchange.taken(store.request, rank, sum(part.nbytes for part in parts)) as data:
                    if data is None:
                        why = f"the heads of rank {rank} did not come: is it on another host?"
                        log.warning("kvctl: request %s is not stored: %s", store.request, why)
                        self.counts.dropped += 1
                        self._settled(store.request, problem=why)
                        return False
                    at = 0
                    for part in parts:
                        _bytes(part)[:] = data[at : at + part.nbytes]
                        at += part.nbytes
            have = [max(known, first + count) for known, (first, count) in zip(have, shares, strict=True)]
        return have == [group.kv_heads for group in groups]

    @staticmethod
    def _by_tensor(groups: Sequence[Group], shares: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The share of each tensor of `_read_out`, in its order."""
        return [share for group, share in zip(groups, shares, strict=True) for _ in group.layers for _ in "kv"]

    def _remember(self, store: Store) -> None:
        with self._lock:
            self._recent[store.request] = store
            while len(self._recent) > RECENT:
                del self._recent[next(iter(self._recent))]

    def close(self) -> None:
        self._loads.shutdown(wait=True, cancel_futures=True)
        self._stores.shutdown(wait=True)  # what has been read out of the engine is stored
        self._exchange.close()
        self._tiers.close()


class _EngineSink:
    """Where a pull lands: staging memory for a batch of layers, then the request's blocks."""

    def __init__(self, side: WorkerSide, going: _Loading) -> None:
        self._side = side
        self._going = going
        self._slots: dict[int, list[tuple[Slot, LayerKv]]] = {}
        self._end = going.load.end

    def prepare(self, descriptor: Descriptor, layout: Layout) -> Sequence[LayerKv]:
        room = self._side.room(layout.nbytes)
        views: list[LayerKv] = []
        self._slots = {}
        at = 0
        for slot in layout.slots:
            middle, end = at + slot.k_bytes, at + slot.k_bytes + slot.v_bytes
            views.append(LayerKv(room[at:middle], room[middle:end], slot.start))
            self._slots.setdefault(slot.layer, []).append((slot, views[-1]))
            at = end
        return views

    def layer_ready(self, layer: int) -> None:
        for slot, kv in self._slots[layer]:
            self._side.place(self._going.load, slot, kv, min(slot.end, self._end))
        self._going.layers[layer].set()

    def invalid(self, from_token: int) -> None:
        self._end = min(self._end, from_token)

    def done(self, tokens: int) -> None:
        return


def layer_number(name: str) -> int:
    """The layer's number in its name ('model.layers.3.self_attn.attn')."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise IncompatibleError(f"the layer {name!r} has no one number", hint="its KV cannot be told from others'")
    return numbers[0]


def _canonical(view: memoryview, dtype: torch.dtype, heads: int, tokens: int) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(heads, tokens, -1)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
