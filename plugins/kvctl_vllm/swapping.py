"""Other weights into a running engine, in one worker: staged beside the steps, applied while it is paused, compared
with what the engine holds then, and taken back from a copy when anything was wrong.

Host memory while a swap runs: the new weights, and a copy of the old ones (kept on with `keep`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from kvctl.core.context import Context
from kvctl.core.errors import ConflictError, IncompatibleError, IntegrityError, KvctlError, NotFoundError
from kvctl.core.events import NullProgress
from kvctl.kv.geometry import groups_of
from kvctl.kv.identity import rope_digest, tokenizer_digest
from kvctl.transfer.report import Report
from kvctl.weights.digests import TensorDigest, TensorHasher, model_digest
from kvctl.weights.identify import identify_model
from kvctl.weights.load import plan_load
from kvctl.weights.request import LoadRequest
from kvctl_vllm import places
from kvctl_vllm.held import Held, held, now_holds, restore
from kvctl_vllm.identity import small_files
from kvctl_vllm.tensors import Weights
from kvctl_vllm.unfuse import checkpoint_views, dtype_name, flat_bytes

log = logging.getLogger("vllm.kvctl")
HASHERS: Final = 2


class _Counted(NullProgress):
    def __init__(self) -> None:
        self.bytes = 0

    def advance(self, nbytes: int) -> None:
        self.bytes += nbytes


@dataclass(slots=True)
class _Staged:
    """New weights in host memory. `expected`: model digest of them in the engine's dtypes."""

    source: str
    request: LoadRequest
    total: int
    names: tuple[str, ...]
    progress: _Counted = field(default_factory=_Counted)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    digest: str | None = None
    expected: str = ""
    report: Report | None = None
    error: KvctlError | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Old:
    """The weights before a swap, as the kernels have them."""

    held: Held
    parameters: dict[str, torch.Tensor]


class Swapping:
    """One swap at a time. `runner`: the worker's model runner, of any release of vLLM (Any). `fail_at`: name of a step
    that shall fail, for rehearsals.
    """

    def __init__(self, runner: Any, vllm_config: Any, rank: tuple[int, int]) -> None:
        self._runner = runner
        self._config = vllm_config
        self._rank = rank
        self._staged: _Staged | None = None
        self._old: _Old | None = None
        self._open = False  # new weights were applied, and it is not settled yet whether they stay

    @property
    def model(self) -> Any:  # Any: a model of vLLM
        return self._runner.get_model()

    # -- before anything is paused -----------------------------------------------------------------------------

    def check(self, address: str, repo: str | None) -> dict[str, Any]:  # Any: JSON
        """Whether the weights fit this engine, from headers alone. Raises IncompatibleError and what reading raises."""
        if self._rank[1] > 1:
            raise IncompatibleError(
                "a swap of an engine with several ranks is not there yet", hint="restart it instead"
            )
        if self._open:  # a swap that was not taken back
            _settle(self.model, self._config)
        settings = places.config(self._extra().get("config"))
        request = places.weights_request(settings, address, repo or self._extra().get("repo"))
        context = Context(config=settings)
        plan = plan_load(request, context)
        views = checkpoint_views(self.model, held().names)
        ours = {name: tuple(view.shape) for name, view in views.items()}
        theirs = {tensor.name: tensor.shape for tensor in plan.tensors}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                have = "nothing" if name not in ours else f"shape {list(ours[name])}"
                new = "nothing" if name not in theirs else f"shape {list(theirs[name])}"
                raise IncompatibleError(
                    f"the weights of {address} do not fit the engine's model",
                    cause=f"{name}: the engine has {have}, the weights have {new}",
                    hint="start an engine for that model instead",
                )
        self._check_files(address, request, context)
        self._staged = _Staged(address, request, plan.needed_bytes, tuple(tensor.name for tensor in plan.tensors))
        return {"bytes": plan.needed_bytes, "tensors": len(plan.tensors)}

    def _check_files(self, address: str, request: LoadRequest, context: Context) -> None:
        """config.json and the tokenizer beside the new weights, where there are any: the engine keeps its own."""
        try:
            known = identify_model(request.address, request.repo, request.version, context)
        except NotFoundError:
            return
        import json

        ours = small_files(str(self._config.model_config.tokenizer)) | small_files(self._first_model())
        for name, meaning in (
            ("config.json", lambda files: rope_digest(json.loads(files["config.json"]))),
            ("config.json", lambda files: groups_of(json.loads(files["config.json"]))),
            ("tokenizer.json", tokenizer_digest),
        ):
            if name in ours and name in known.files and meaning(ours) != meaning(known.files):
                raise IncompatibleError(
                    f"the weights of {address} are of another model",
                    cause=f"their {name} does not mean what the engine's does",
                    hint="start an engine for that model instead",
                )

    def _extra(self) -> Mapping[str, Any]:  # Any: JSON
        extra = self._config.load_config.model_loader_extra_config
        return extra if isinstance(extra, Mapping) and self._config.load_config.load_format == "kvctl" else {}

    def _first_model(self) -> str:
        return str(self._extra().get("_kvctl_model", self._config.model_config.model))

    def stage(self) -> None:
        """Begin to load the checked weights into host memory, beside the steps."""
        staged = self._need_staged()
        threading.Thread(target=self._stage, args=(staged,), name="kvctl-swap", daemon=True).start()

    def staged(self) -> dict[str, Any]:  # Any: JSON
        """How far it is. Raises what went wrong."""
        staged = self._need_staged()
        if staged.error is not None:
            self._staged = None
            raise staged.error
        return {"done": staged.done.is_set(), "bytes": staged.progress.bytes, "total": staged.total}

    def _stage(self, staged: _Staged) -> None:
        try:
            settings = places.config(self._extra().get("config"))
            weights = Weights(staged.request, replace(Context(config=settings), progress=staged.progress))
            for name, tensor in weights:
                staged.tensors[name] = tensor
            staged.digest, staged.report = weights.digest, weights.report
            dtypes = {name: view.dtype for name, view in checkpoint_views(self.model, held().names).items()}
            staged.expected = digest_of({name: tensor.to(dtypes[name]) for name, tensor in staged.tensors.items()})
        except KvctlError as error:
            staged.error = error
        except BaseException as error:
            log.exception("kvctl: staging the weights of %s failed", staged.source)
            staged.error = KvctlError(f"staging the weights of {staged.source} failed", cause=str(error))
        staged.done.set()

    def _need_staged(self) -> _Staged:
        if self._staged is None:
            raise ConflictError("no swap is under way in this engine")
        return self._staged

    # -- while it is paused --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Copy the weights of now; but not those of a swap that failed, and could not be taken back: then the copy from
        before it is what to go back to, still.
        """
        if self._open and self._old is not None:
            return
        self._old = _Old(held(), {name: tensor.detach().clone() for name, tensor in self._state()})

    def apply(self, fail: str = "") -> None:
        """The staged weights into the engine, in place. Raises KvctlError; call `back` then."""
        staged = self._need_staged()
        self._open = True
        now_holds("", None, held().names)  # whoever reads the weights of before gets no byte of these
        try:
            self._runner.reload_weights(weights_iterator=_feed(staged.tensors, fail))
        except KvctlError:
            raise
        except Exception as error:
            raise KvctlError("the engine did not take the weights", cause=str(error)) from error
        now_holds(staged.source, staged.digest, staged.names)

    def verify(self) -> dict[str, Any]:  # Any: JSON
        """Compare the digest of what the engine holds with that of what was loaded. Raises IntegrityError."""
        staged = self._need_staged()
        views = checkpoint_views(self.model, staged.names)
        got = digest_of(views)
        if got != staged.expected:
            raise IntegrityError(
                "the engine does not hold the weights that were loaded",
                cause=f"digest {got}, expected {staged.expected}",
            )
        return {"digest": staged.digest, "bytes": sum(view.numel() * view.element_size() for view in views.values())}

    def back(self) -> None:
        """The old weights again, whatever happened to the new ones; they can be asked for again until `done`. Raises
        KvctlError when that does not work.
        """
        if self._old is None:
            raise NotFoundError("there are no weights to go back to", hint="swap with --keep-previous to keep them")
        _settle(self.model, self._config)
        now = dict(self._state())
        with torch.no_grad():
            for name, tensor in self._old.parameters.items():
                if name not in now or now[name].shape != tensor.shape or now[name].is_meta:
                    raise KvctlError(f"the engine lost its parameter {name}", hint="restart it")
                now[name].copy_(tensor)
        restore(self._old.held)
        self._open = False

    def done(self, *, keep: bool) -> None:
        """The swap is over, one way or the other: let go of what it needed, but (`keep`) for the old weights."""
        self._staged, self._open = None, False
        if not keep:
            self._old = None

    @property
    def kept(self) -> str | None:
        """The address of the weights that `back` goes back to."""
        return None if self._old is None else self._old.held.source

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model
        yield from model.named_parameters()
        yield from model.named_buffers()


def _feed(tensors: Mapping[str, torch.Tensor], fail: str) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (name, tensor) in enumerate(tensors.items()):
        if fail and number == len(tensors) // 2:
            raise KvctlError(f"rehearsed failure at {fail}")
        yield name, tensor


def _settle(model: Any, vllm_config: Any) -> None:  # Any: vLLM's own
    """After a reload that broke off: every layer has its parameters again, whatever is in them."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize: Callable[..., None] = finalize_layerwise_reload
    with torch.no_grad():
        finalize(model, vllm_config.model_config)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The model digest of these tensors as they are."""

    def one(item: tuple[str, torch.Tensor]) -> TensorDigest:
        name, tensor = item
        data = flat_bytes(tensor.detach().cpu())
        hasher = TensorHasher(dtype_name(tensor), tuple(tensor.shape), data.numel())
        hasher.update(memoryview(data.numpy()))
        return TensorDigest(name, dtype_name(tensor), tuple(tensor.shape), hasher.digest())

    with ThreadPoolExecutor(HASHERS, "kvctl-hash") as pool:
        return model_digest(list(pool.map(one, tensors.items())))
