"""What kvctl adds to vLLM's workers (`--worker-extension-cls kvctl_vllm.extension.WorkerExtension`), called by name
through `collective_rpc`. Each call returns JSON-like values, and errors as {"kvctl_error": ..}: an exception would end
the engine.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from itertools import takewhile
from typing import Any, Final

from kvctl.core.errors import ConflictError, KvctlError, NotFoundError, UsageError
from kvctl_vllm import laid_out
from kvctl_vllm.connector import WORKERS
from kvctl_vllm.held import held
from kvctl_vllm.loader import tensor_rank
from kvctl_vllm.swapping import Swapping
from kvctl_vllm.unfuse import checkpoint_views, dtype_name, flat_bytes

log = logging.getLogger("vllm.kvctl")
SAMPLES: Final = 1 << 16  # kept; at 20 ms a token that is 20 minutes of one stream


def to_json(error: BaseException) -> dict[str, Any]:  # Any: JSON
    if isinstance(error, KvctlError):
        return {
            "kvctl_error": {
                "code": error.code, "what": error.what, "cause": error.cause, "hint": error.hint,
                "details": error.details,
            }
        }  # fmt: skip
    log.error("kvctl: a call failed", exc_info=error)
    return {"kvctl_error": {"code": "failure", "what": f"{type(error).__name__} in the engine", "cause": str(error)}}


def answered(call: Callable[..., Any]) -> Callable[..., Any]:  # Any: arguments and JSON
    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            return to_json(error)

    return wrapped


class Beside:
    """What the extension keeps beside a worker."""

    def __init__(self, worker: Any) -> None:  # Any: a worker of vLLM
        self.worker = worker
        self.rank = tensor_rank()
        self.swapping = Swapping(worker.model_runner, worker.vllm_config, self.rank)
        self.views: dict[str, Any] = {}  # Any: tensors
        self.viewed = -1
        self.samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self.timing = False
        self._window: tuple[str, mmap.mmap] | None = None

    def window(self, path: str) -> mmap.mmap:
        """The file in shared memory that reads land in. It stays mapped: a mapping of its own for each read costs more
        than the copy, in page faults, and a step waits for both.
        """
        if self._window is None or self._window[0] != path:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self._window = path, mmap.mmap(descriptor, 0)
            finally:
                os.close(descriptor)
        return self._window[1]

    def current(self) -> dict[str, Any]:  # Any: tensors
        if self.viewed != held().generation:
            self.views = checkpoint_views(self.swapping.model, held().names)
            self.viewed = held().generation
        return self.views

    def watch_steps(self) -> None:
        """From now on, note when each step ends that gave a token to a stream which the step before it gave one too."""
        if self.timing:
            return
        self.timing = True
        runner = self.worker.model_runner
        step = runner.execute_model
        before: dict[str, float] = {}

        @wraps(step)
        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:  # Any: vLLM's own
            found = step(scheduler_output, *args, **kwargs)
            ready = time.time()
            streams = [name for name, count in scheduler_output.num_scheduled_tokens.items() if count == 1]
            self.samples.extend((ready, ready - before[name]) for name in streams if name in before)
            before.clear()
            before.update(dict.fromkeys(streams, ready))
            return found

        runner.execute_model = timed


_BESIDE: Final = "_kvctl_beside"


def beside(worker: Any) -> Beside:  # Any: a worker of vLLM
    found: Beside | None = worker.__dict__.get(_BESIDE)
    if found is None:
        found = worker.__dict__[_BESIDE] = Beside(worker)
    return found


class WorkerExtension:
    """Mixed into vLLM's worker class. Any: arguments and answers are JSON."""

    @answered
    def kvctl_info(self) -> dict[str, Any]:
        now, own = held(), beside(self)
        kv: dict[str, Any] = {}
        if WORKERS:
            kv = {**WORKERS[0].counts.to_json(), "problem": WORKERS[0].news().problem, "resting": WORKERS[0].resting}
        return {
            "source": now.source or str(own.worker.vllm_config.model_config.model),
            "digest": now.digest,
            "generation": now.generation,
            "ranks": own.rank[1],
            "kept": own.swapping.kept,
            "kv": kv,
            "memory": laid_out.memory(),
        }

    # -- weights out -----------------------------------------------------------------------------------------

    @answered
    def kvctl_weights(self) -> dict[str, Any]:
        now = held()
        rows = [
            [name, dtype_name(view), list(view.shape), view.numel() * view.element_size()]
            for name, view in beside(self).current().items()
        ]
        return {"generation": now.generation, "digest": now.digest, "tensors": rows}

    @answered
    def kvctl_read(self, generation: int, parts: list[tuple[str, int, int]], path: str) -> dict[str, Any]:
        """Copy bytes of tensors (name, offset, length) into a file in shared memory, one after the other; that is all
        that a step may have to wait for.
        """
        own = beside(self)
        if held().generation != generation:
            raise ConflictError(f"the engine holds generation {held().generation} of weights, not {generation}")
        window, at = own.window(path), 0
        for name, offset, length in parts:
            if name not in own.current():
                raise NotFoundError(f"the engine has no tensor {name}")
            data = flat_bytes(own.current()[name].detach())
            if offset < 0 or length < 0 or offset + length > data.numel():
                raise UsageError(f"{name} has {data.numel()} bytes, not {offset} + {length}")
            window[at : at + length] = memoryview(data[offset : offset + length].cpu().numpy())
            at += length
        return {"bytes": at}

    # -- weights in ------------------------------------------------------------------------------------------

    @answered
    def kvctl_swap(self, step: str, **values: Any) -> dict[str, Any]:
        """One step of `Swapping`, by its name."""
        swapping = beside(self).swapping
        if values.pop("fail", False) and step != "apply":
            raise KvctlError(f"rehearsed failure at {step}")
        if step == "apply" and values.pop("fail_late", False):
            values["fail"] = "apply"
        steps: dict[str, Callable[..., Any]] = {
            "check": swapping.check, "stage": swapping.stage, "staged": swapping.staged, "save": swapping.save,
            "apply": swapping.apply, "verify": swapping.verify, "back": swapping.back, "done": swapping.done,
        }  # fmt: skip
        return steps[step](**values) or {}

    # -- KV and pace -----------------------------------------------------------------------------------------

    @answered
    def kvctl_stored(self, request: str) -> dict[str, Any]:
        """What became of storing the request whose id contains this; {} while it is not known."""
        return WORKERS[0].outcome(request) if WORKERS else {"problem": "the engine runs without KvctlConnector"}

    @answered
    def kvctl_tokens(self, request: str) -> dict[str, Any]:
        """The tokens of a request of lately whose id contains this."""
        found = WORKERS[0].tokens_of(request) if WORKERS else None
        if found is None:
            raise NotFoundError(
                f"the engine remembers no request {request}", hint="only the last ones that ended are remembered"
            )
        return {"tokens": found}

    @answered
    def kvctl_samples(self, since: float) -> dict[str, Any]:
        own = beside(self)
        own.watch_steps()
        until = time.time()
        # from the newest on: what was told before is not looked at again, however much is kept
        fresh = list(takewhile(lambda item: item[0] > since, reversed(own.samples)))
        return {"until": until, "samples": [list(item) for item in reversed(fresh)]}
