"""vLLM as an `EngineAdapter`: a client of the routes in `endpoints`, and of vLLM's own completions. Imports no vLLM."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from kvctl.core.context import Context
from kvctl.core.errors import IncompatibleError, PartialError
from kvctl.engines.api import EngineInfo, Part, Sample, Samples, SwapRequest, SwapResult, WeightSet, WeightTensor
from kvctl.engines.http import EngineClient
from kvctl.engines.registry import EngineSpec

ENGINE: Final = EngineSpec("vllm", "vLLM with the plug-in kvctl_vllm", "kvctl_vllm.adapter:open_adapter")
ROOT: Final = "/v1/kvctl"
LONG: Final = 3600.0  # seconds for what takes as long as it takes: prefills, loads


def open_adapter(client: EngineClient, ctx: Context) -> VllmAdapter:
    return VllmAdapter(client, ctx)


class VllmAdapter:
    def __init__(self, client: EngineClient, ctx: Context) -> None:
        self._client = client
        self._ctx = ctx

    def info(self) -> EngineInfo:
        said = self._client.get(f"{ROOT}/engine")
        known = {"engine", "version", "model", "source", "digest", "generation", "paused", "ranks"}
        return EngineInfo(
            **{name: said[name] for name in known},
            details={name: value for name, value in said.items() if name not in known},
        )

    # -- weights out -----------------------------------------------------------------------------------------

    def weights(self, *, lease_seconds: float = 60.0) -> WeightSet:
        said = self._client.get(f"{ROOT}/weights", {"lease": lease_seconds})
        return WeightSet(
            said["generation"],
            said["digest"],
            tuple(WeightTensor(name, dtype, tuple(shape), size) for name, dtype, shape, size in said["tensors"]),
            {name: base64.b64decode(data) for name, data in said["files"].items()},
        )

    def renew(self, lease_seconds: float) -> None:
        self._client.post(f"{ROOT}/weights/lease", {"seconds": lease_seconds})

    def read(self, weights: WeightSet, tensor: str, offset: int, into: memoryview) -> None:
        query = {"generation": weights.generation, "name": tensor, "offset": offset, "length": len(into)}
        self._client.read(f"{ROOT}/weights/data", query, into)

    def read_parts(self, weights: WeightSet, parts: Sequence[Part], into: memoryview) -> None:
        query: dict[str, object] = {
            "generation": weights.generation,
            "name": [part.name for part in parts],
            "offset": [part.offset for part in parts],
            "length": [part.length for part in parts],
        }
        self._client.read(f"{ROOT}/weights/data", query, into)

    def release(self) -> None:
        self._client.post(f"{ROOT}/weights/release")

    # -- weights in ------------------------------------------------------------------------------------------

    def swap(self, request: SwapRequest) -> SwapResult:
        return _result(self._client.post(f"{ROOT}/swap", asdict(request), timeout=LONG))

    def finish(self) -> SwapResult:
        return _result(self._client.post(f"{ROOT}/swap/finish", timeout=LONG))

    def rollback(self) -> SwapResult:
        return _result(self._client.post(f"{ROOT}/swap/rollback", timeout=LONG))

    # -- KV ----------------------------------------------------------------------------------------------------

    def warm(self, tokens: Sequence[int], session: str | None) -> Mapping[str, Any]:  # Any: JSON
        ask: dict[str, Any] = {"push": False, "pull": True} | ({"session": session} if session else {})  # Any: JSON
        before = self._kv()
        started = time.monotonic()
        said = self._complete(tokens, ask, uuid.uuid4().hex)
        seconds, after = time.monotonic() - started, self._kv()
        return {
            "tokens": len(tokens),
            "here": said.get("here", 0),
            "loaded": after["tokens"] - before["tokens"],
            "lost": after["lost"] - before["lost"],
            "needed": after["needed"] - before["needed"],
            "fetched": after["fetched"] - before["fetched"],
            "seconds": seconds,
        }

    def store(
        self, tokens: Sequence[int], session: str, *, with_tokens: bool = False
    ) -> Mapping[str, Any]:  # Any: JSON
        self._kv()
        name = uuid.uuid4().hex
        started = time.monotonic()
        said = self._complete(tokens, {"push": True, "session": session, "with_tokens": with_tokens}, name)
        if not said.get("stores"):
            raise PartialError(
                f"the engine stores nothing of these {len(tokens)} tokens",
                hint="its log says why; KvctlConnector with push 'never', or fewer tokens than min_tokens",
            )
        while not (found := self._client.get(f"{ROOT}/stored", {"request": name})):
            if self._ctx.cancel.wait(0.05):
                self._ctx.cancel.check("waiting for the engine to store")
        if found.get("problem"):
            raise PartialError(f"the engine did not store {session}", cause=str(found["problem"]))
        return {**found, "store_seconds": found["seconds"], "seconds": time.monotonic() - started}

    def tokens_of(self, request: str) -> list[int]:
        """The tokens of a request of lately, by (a part of) its id. Raises NotFoundError."""
        found: list[int] = self._client.get(f"{ROOT}/tokens", {"request": request})["tokens"]
        return found

    def tokenize(self, text: str) -> list[int]:
        """By the engine's own tokenizer."""
        found: list[int] = self._client.post("/tokenize", {"model": self.info().model, "prompt": text})["tokens"]
        return found

    def _kv(self) -> Mapping[str, Any]:  # Any: JSON
        kv = self.info().details["kv"]
        if not kv or kv["problem"]:
            raise IncompatibleError(
                f"the engine at {self._client.url} neither stores nor loads KV",
                cause=kv.get("problem") or "it runs without KvctlConnector",
                hint="see `kvctl help vllm`",
            )
        found: Mapping[str, Any] = kv  # Any: JSON
        return found

    def _complete(self, tokens: Sequence[int], ask: Mapping[str, Any], name: str) -> Mapping[str, Any]:  # Any: JSON
        body = {
            "model": self.info().model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "request_id": name,
            "kv_transfer_params": {"kvctl": dict(ask)},
        }
        said = self._client.post("/v1/completions", body, timeout=LONG)
        found: Mapping[str, Any] = (said.get("kv_transfer_params") or {}).get("kvctl") or {}  # Any: JSON
        return found

    # -- pace --------------------------------------------------------------------------------------------------

    def samples(self, since: float) -> Samples:
        said = self._client.get(f"{ROOT}/samples", {"since": since})
        return Samples(tuple(Sample(at, gap) for at, gap in said["samples"]), said["until"])

    def close(self) -> None:
        self._client.close()


def _result(said: Mapping[str, Any]) -> SwapResult:  # Any: JSON
    known = SwapResult("", "", None, 0, {}, 0.0, 0)
    return replace(known, **{name: said[name] for name in SwapResult.__dataclass_fields__ if name in said})
