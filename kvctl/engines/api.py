"""`EngineAdapter`, the seam between kvctl and an engine, and its values.

An adapter is a client: it runs in kvctl's process (CLI, agent), talks to a running engine, and is used by one thread at
a time. Weights are named, typed and shaped as in the checkpoint that the engine was loaded from, whatever the engine
has made of them; a generation counts up with every change of the weights. A whole adapter for an engine that serves
files over HTTP fits in a page: `kvctl help engines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

SCHEMA: Final = "kvctl.engine/1"
IN_FLIGHT: Final = ("drain", "abort", "keep")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """`source`: the address of the weights held, `digest` their model digest, None where nobody knows it. `ranks`: of
    tensor parallelism.
    """

    engine: str
    version: str
    model: str
    source: str
    digest: str | None
    generation: int
    paused: bool
    ranks: int = 1
    details: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON, the engine's own


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """`dtype` by the names of safetensors. Bytes row-major, as a safetensors file has them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The weights of one generation, ready to be read. `files`: config.json, tokenizer and what else belongs beside
    them. `digest`: as in EngineInfo; it covers the tensors as they were loaded, which an engine may keep in another
    dtype.
    """

    generation: int
    digest: str | None
    tensors: tuple[WeightTensor, ...]
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a tensor."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One token of some stream: when it was ready (Unix seconds), and how long after the one before it (seconds)."""

    at: float
    gap: float


@dataclass(frozen=True, slots=True)
class Samples:
    """`raw`: each token was measured in the engine; False: from metrics, whose edges are `resolution` seconds apart.
    `until`: ask from here next time.
    """

    samples: tuple[Sample, ...]
    until: float
    raw: bool = True
    resolution: float = 0.0


@dataclass(frozen=True, slots=True)
class SwapRequest:
    """`weights`: an address as the engine's host understands it. `in_flight`: what becomes of running requests: 'drain'
    waits for them, at most `drain_seconds`, 'abort' ends them, 'keep' lets them go on with the new weights. `hold`:
    stop before requests come in again, until `finish` or `rollback` (or until `hold_seconds` have passed: rollback).
    `check_only`: say whether they fit, and do nothing.
    `fail_at`: a step at which to fail on purpose, for rehearsals.
    """

    weights: str
    repo: str | None = None
    in_flight: str = "drain"
    drain_seconds: float = 60.0
    keep_previous: bool = False
    hold: bool = False
    hold_seconds: float = 300.0
    fail_at: str = ""
    check_only: bool = False


@dataclass(frozen=True, slots=True)
class SwapResult:
    """`state`: 'serving', 'held' or 'fits' (only checked). `steps`: seconds of each, in order. `paused`: seconds
    in which no request ran. `token`: lets requests through while held. `verified`: bytes whose digests
    were compared in the engine.
    """

    state: str
    source: str
    digest: str | None
    generation: int
    steps: Mapping[str, float]
    paused: float
    verified: int
    token: str = ""
    notes: tuple[str, ...] = ()


class EngineAdapter(Protocol):
    """Raises the errors of `kvctl.core.errors`: MemberDownError when the engine does not answer, AuthError, and
    IncompatibleError for what it cannot do.
    """

    def info(self) -> EngineInfo: ...

    # -- weights out -----------------------------------------------------------------------------------------
    def weights(self, *, lease_seconds: float = 60.0) -> WeightSet:
        """What it holds now. Until the lease ends an update waits (no longer than that); see `renew`."""
        ...

    def renew(self, lease_seconds: float) -> None: ...

    def read(self, weights: WeightSet, tensor: str, offset: int, into: memoryview) -> None:
        """Bytes of a tensor from `offset` on, as many as `into` takes; small reads stall the engine little. Raises
        ConflictError when the engine holds another generation by now.
        """
        ...

    def release(self) -> None:
        """End of reading: updates wait no longer."""
        ...

    # -- weights in ------------------------------------------------------------------------------------------
    def swap(self, request: SwapRequest) -> SwapResult:
        """Raises IncompatibleError before anything is paused; SwapFailedError when the old weights serve on,
        NothingServesError when nothing does.
        """
        ...

    def finish(self) -> SwapResult:
        """Let requests in after a held swap."""
        ...

    def rollback(self) -> SwapResult:
        """Back to the weights before the last swap: of a held one, or of one that kept them. Raises NotFoundError when
        there are none.
        """
        ...

    # -- KV ----------------------------------------------------------------------------------------------------
    def warm(self, tokens: Sequence[int], session: str | None) -> Mapping[str, Any]:  # Any: JSON
        """Load the stored prefix of the tokens into the engine's cache: {"tokens", "cached", "seconds"}."""
        ...

    def store(
        self, tokens: Sequence[int], session: str, *, with_tokens: bool = False
    ) -> Mapping[str, Any]:  # Any: JSON
        """Make the engine store these tokens' KV, computing what it has not: {"tokens", "seconds"}."""
        ...

    # -- pace --------------------------------------------------------------------------------------------------
    def samples(self, since: float) -> Samples:
        """Inter-token times after `since` (Unix seconds); the first call starts measuring."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ReadsParts(Protocol):
    """What an adapter may have besides: engines answer between two steps, and a model has hundreds of small tensors."""

    def read_parts(self, weights: WeightSet, parts: Sequence[Part], into: memoryview) -> None:
        """As `read`, of several tensors in one request, one after the other in `into`, which they fill."""
        ...
