"""Where KV comes from and goes to: the two small seams of push and pull, and memory that stands at either end.

Bytes are canonical: of each layer K, then V, each [heads, tokens, dim], C order, little endian, in the descriptor's
dtype. MLA: one head, K the latent, V the rope part. An indexer has K only. A recurrent layer's K is its state, one
blob.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvctl.core.errors import UsageError
from kvctl.kv.identity import DTYPE_BYTES, Descriptor, Group
from kvctl.kv.tokens import Extra
from kvctl.memory.buffers import HostBuffer


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer of one group in memory: flat byte views (`v` empty where the group has none) that hold tokens from
    `start` on, all heads of it one after the other.
    """

    k: memoryview
    v: memoryview
    start: int = 0


class KvSource(Protocol):
    """What `push` stores. The views stay as they are until the push ends; a source that cannot promise it is a
    `CheckedSource`.
    """

    @property
    def descriptor(self) -> Descriptor: ...
    @property
    def tokens(self) -> array[int]:
        """All token ids of the session."""
        ...

    @property
    def extras(self) -> Sequence[Extra]: ...
    @property
    def producer(self) -> Mapping[str, str]:
        """Labels of who made it; no meaning."""
        ...

    def layer(self, group: int, layer: int) -> LayerKv: ...


@runtime_checkable
class CheckedSource(Protocol):
    """A source over memory that others may write to, asked before anything refers to what was read."""

    def check(self) -> None:
        """Raises VersionChangedError when the views did not stay as they were."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """What a sink must give room for: heads [first_head, first_head + heads) of a layer of a group, tokens
    [start, end). `k_bytes`, `v_bytes`: sizes of the two views. A recurrent layer's state is `k_bytes`, valid at `end`
    exactly.
    """

    group: int
    layer: int
    first_head: int
    heads: int
    start: int
    end: int
    k_row: int  # bytes of one token of one head
    v_row: int
    k_bytes: int
    v_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A pull's destination: `tokens` usable tokens, and the slots in order of layer."""

    tokens: int
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return sum(slot.k_bytes + slot.v_bytes for slot in self.slots)


class KvSink(Protocol):
    """What `pull` fills; one call at a time, not always from one thread. `prepare` comes first, and again when damage
    made the prefix shorter and its windows begin elsewhere: earlier views are void then. `layer_ready`: in order of
    layer, only in the mode 'layers', before everything has arrived. `invalid(token)`: nothing from that token on may
    be used (0: nothing at all), whatever was said before. `done(tokens)`: these first tokens are complete and verified.
    """

    def prepare(self, descriptor: Descriptor, layout: Layout) -> Sequence[LayerKv]:
        """Writable views for each slot."""
        ...

    def layer_ready(self, layer: int) -> None: ...
    def invalid(self, from_token: int) -> None: ...
    def done(self, tokens: int) -> None: ...


def slot_of(
    group_index: int, group: Group, dtype: str, layer: int, heads: tuple[int, int], start: int, end: int
) -> Slot:
    """Sizes in bytes."""
    first, count = heads
    if group.recurrent:
        return Slot(group_index, layer, 0, 1, end, end, group.k_dim, 0, group.k_dim, 0)
    width = DTYPE_BYTES[dtype]
    k_row, v_row = group.k_dim * width, group.v_dim * width
    held = end - start
    return Slot(group_index, layer, first, count, start, end, k_row, v_row, count * held * k_row, count * held * v_row)


@dataclass(slots=True)
class MemorySink:
    """Keeps what arrives in memory of this process. `usable`: tokens that may be used, 0 until `done`."""

    descriptor: Descriptor | None = None
    layout: Layout | None = None
    layers: dict[tuple[int, int], LayerKv] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    usable: int = 0
    invalid_from: int | None = None
    _buffer: HostBuffer | None = None

    def prepare(self, descriptor: Descriptor, layout: Layout) -> Sequence[LayerKv]:
        self.close()
        self.descriptor, self.layout = descriptor, layout
        self._buffer = HostBuffer(layout.nbytes)
        views: list[LayerKv] = []
        at = 0
        for slot in layout.slots:
            k = self._buffer.view[at : at + slot.k_bytes]
            v = self._buffer.view[at + slot.k_bytes : at + slot.k_bytes + slot.v_bytes]
            at += slot.k_bytes + slot.v_bytes
            views.append(LayerKv(k, v, slot.start))
            self.layers[slot.group, slot.layer] = views[-1]
        return views

    def layer_ready(self, layer: int) -> None:
        self.ready.append(layer)

    def invalid(self, from_token: int) -> None:
        self.invalid_from = from_token
        self.usable = min(self.usable, from_token)

    def done(self, tokens: int) -> None:
        self.usable = tokens

    def close(self) -> None:
        for kv in self.layers.values():
            kv.k.release()
            kv.v.release()
        self.layers.clear()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class MemorySource:
    """KV that lies in memory, as a source. Raises UsageError when a layer's views have not the descriptor's sizes."""

    def __init__(
        self,
        descriptor: Descriptor,
        tokens: array[int],
        layers: Mapping[tuple[int, int], LayerKv],
        *,
        producer: Mapping[str, str] | None = None,
        extras: Sequence[Extra] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.check = check
        self.descriptor = descriptor
        self.tokens = tokens
        self.producer = dict(producer or {})
        self.extras = tuple(extras)
        self._layers = dict(layers)
        for number, group in enumerate(descriptor.groups):
            for layer in group.layers:
                kv = self._layers.get((number, layer))
                if kv is None:
                    raise UsageError(f"the KV of layer {layer} is missing", cause=f"group {number} needs it")
                want = slot_of(
                    number, group, descriptor.dtype, layer, (0, group.kv_heads), kv.start, max(kv.start, len(tokens))
                )
                for name, view, size in (("K", kv.k, want.k_bytes), ("V", kv.v, want.v_bytes)):
                    if view.nbytes != size:
                        raise UsageError(
                            f"{name} of layer {layer} has the wrong size",
                            cause=f"{view.nbytes} bytes, expected {size} for tokens {kv.start} to {len(tokens)}",
                        )

    def layer(self, group: int, layer: int) -> LayerKv:
        return self._layers[group, layer]
