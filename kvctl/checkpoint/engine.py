"""An engine's own weights as a source of checkpoints, and its tokens' gaps as latencies, through its adapter.

The engine's lease makes updates wait while the weights are copied, `hold_seconds` at most; after that it is no longer
renewed, an update comes in, and the copy begins again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvctl.checkpoint.shards import LiveTensor, UpdatedError
from kvctl.core.errors import ConflictError, KvctlError
from kvctl.engines.api import EngineAdapter, Part, ReadsParts, Samples

LEASE: Final = 30.0
HOLD: Final = 300.0


class EngineWeights:
    """See `shards.LiveWeights`. Owns the adapter."""

    def __init__(self, adapter: EngineAdapter, url: str, *, hold_seconds: float = HOLD) -> None:
        self.name = f"engine:{url}"
        self._adapter = adapter
        self._hold = hold_seconds
        self._lock = threading.Lock()  # an adapter is for one thread at a time
        self._weights = adapter.weights(lease_seconds=LEASE)
        self._began = self._renewed = time.monotonic()

    def tensors(self) -> Sequence[LiveTensor]:
        return [LiveTensor(tensor.name, tensor.dtype, tensor.shape) for tensor in self._weights.tensors]

    def side_files(self) -> Mapping[str, bytes]:
        return self._weights.files

    def generation(self) -> str:
        with self._lock:
            return str(self._adapter.info().generation)

    def again(self) -> None:
        with self._lock:
            self._weights = self._adapter.weights(lease_seconds=LEASE)
            self._began = self._renewed = time.monotonic()

    def read(self, parts: Sequence[Part], view: memoryview) -> None:
        with self._lock:
            self._keep()
            try:
                if isinstance(self._adapter, ReadsParts):
                    self._adapter.read_parts(self._weights, parts, view)
                else:
                    at = 0
                    for part in parts:
                        self._adapter.read(self._weights, part.name, part.offset, view[at : at + part.length])
                        at += part.length
            except ConflictError as error:
                raise UpdatedError(str(error)) from error

    def _keep(self) -> None:
        now = time.monotonic()
        if now - self._renewed > LEASE / 3 and now - self._began < self._hold:
            self._adapter.renew(LEASE)
            self._renewed = now

    @contextlib.contextmanager
    def held(self, seconds: float) -> Iterator[bool]:
        """The last copy: updates wait for as long as it takes, `seconds` at most."""
        before, self._hold = self._hold, seconds
        try:
            yield True
        finally:
            self._hold = before

    def close(self) -> None:
        with self._lock, contextlib.suppress(KvctlError):  # else the lease ends by itself
            self._adapter.release()
        self._adapter.close()


class EngineLatencies:
    """See `latency.Latencies`. Owns the adapter: one of its own, as weights are read meanwhile."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        found = adapter.samples(time.time())
        self._until = found.until
        self.resolution = (
            "raw inter-token samples of the engine"
            if found.raw
            else f"the engine's metrics, edges {1000 * found.resolution:g} ms apart"
        )

    def take(self) -> Sequence[float]:
        try:
            found = self._adapter.samples(self._until)
        except KvctlError:
            return ()  # what tells nothing is paced by rates alone
        self._until = found.until
        return gaps_of(found)

    def close(self) -> None:
        self._adapter.close()


def gaps_of(found: Samples) -> list[float]:
    """The gaps, seconds: of a step's tokens, which all streams of a batch get at once, the longest. They are one
    observation, and a p99 of them as many as there are streams would be of less than it seems.
    """
    if not found.raw:
        return [sample.gap for sample in found.samples]
    steps: dict[float, float] = {}
    for sample in found.samples:
        steps[sample.at] = max(sample.gap, steps.get(sample.at, 0.0))
    return list(steps.values())
