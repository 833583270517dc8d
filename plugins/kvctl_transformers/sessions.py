"""`push_cache` and `pull_cache`: a live model's KV cache into a repo, and back into a cache in any other process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context
from kvctl.core.errors import PartialError, UsageError
from kvctl.kv.identity import Lora
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import MemorySource
from kvctl.kv.tokens import parse_key
from kvctl.transfer.report import Report
from kvctl_transformers.describe import Ids, Model, describe, token_array, weights_digest
from kvctl_transformers.export import Exported, cache_layers, cache_length, dtype_name, first_tensor
from kvctl_transformers.restore import CacheSink

__all__ = ["PulledCache", "describe", "pull_cache", "push_cache", "weights_digest"]

Repo = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class PulledCache:
    """`cache`: what the model's `past_key_values` takes. `tokens`: how many tokens of the transcript it holds (0: none
    was usable, the cache is empty); the model has to be run on the others. `report`: kvctl.report/1, its verdict in
    `extra`. `problem`: what was damaged, when that made it shorter.
    """

    cache: Any  # a DynamicCache of any release
    tokens: int
    report: Mapping[str, Any]  # Any: JSON
    problem: PartialError | None = None


def push_cache(
    model: Model,
    cache: Any,  # a DynamicCache of any release
    tokens: Ids,
    *,
    repo: Repo,
    session: str,
    weights: str,
    folder: str | os.PathLike[str] | None = None,
    with_tokens: bool = False,
    codec: str = "none",
    labels: Mapping[str, str] | None = None,
    lora: Sequence[Lora] = (),
    salt: bytes | None = None,
    key_file: str | None = None,
    ctx: Context | None = None,
    **options: Any,  # Any: further fields of PushSession
) -> Report:
    """Store `cache`, which `model` computed for `tokens`, as the next generation of `session` ("TENANT/NAME").

    `tokens`: at least as many as the cache has seen; those beyond it are left out. `repo`: store URLs or paths of the
    members. `weights`, `folder`, `lora`, `salt`: see `describe`. `key_file`: the repo's kv_key_file. Nothing is copied
    but what is not contiguous, or not on the CPU. Raises the errors of `kvctl.core.errors`.
    """
    layers = cache_layers(cache)
    length = cache_length(layers)
    ids = token_array(tokens)
    if len(ids) < length:
        raise UsageError(
            f"the cache has seen {length} tokens, and {len(ids)} were given", hint="give the whole transcript"
        )
    dtype = dtype_name(first_tensor(layers))
    tenant, key = session.partition("/")[0].rpartition(":")[2], _read_key(key_file)
    descriptor = describe(
        model, weights=weights, dtype=dtype, folder=folder, lora=lora, salt=salt, key=key, tenant=tenant
    )
    exported = Exported(layers, descriptor, length)
    source = MemorySource(descriptor, ids[:length], exported.layers, producer=_producer(model))
    request = PushSession(
        repo=_members(repo),
        address=session,
        source=source,
        key=key,
        with_tokens=with_tokens,
        codec=codec,
        labels=dict(labels or {}),
        **options,
    )
    return push_session(request, ctx or Context())


def pull_cache(
    model: Model,
    tokens: Ids | None = None,
    *,
    repo: Repo,
    session: str,
    weights: str,
    dtype: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    lora: Sequence[Lora] = (),
    salt: bytes | None = None,
    key_file: str | None = None,
    ctx: Context | None = None,
    **options: Any,  # Any: further fields of PullSession
) -> PulledCache:
    """The cache of `session` ("TENANT/NAME[@GENERATION]") for as many of `tokens` as it holds.

    `tokens` None: all of it, if the session was pushed with its tokens. `dtype`: logical dtype of the KV (default: the
    model's own). Refused (IncompatibleError) when the session is of other weights, tokenizer, adapters or geometry.
    """
    key = _read_key(key_file)
    tenant = session.partition("/")[0].rpartition(":")[2]
    descriptor = describe(
        model,
        weights=weights,
        dtype=dtype or dtype_name(next(model.parameters())),
        folder=folder,
        lora=lora,
        salt=salt,
        key=key,
        tenant=tenant,
    )
    sink = CacheSink()
    request = PullSession(
        repo=_members(repo),
        address=session,
        sink=sink,
        key=key,
        descriptor=descriptor,
        tokens=None if tokens is None else token_array(tokens),
        **options,
    )
    problem: PartialError | None = None
    try:
        report = pull_session(request, ctx or Context()).to_json()
    except PartialError as error:
        if not error.details.get("delivered"):
            raise
        problem, report = error, cast("dict[str, Any]", error.details["report"])  # Any: JSON
    return PulledCache(sink.to_cache(model.config, str(model.device)), sink.usable, report, problem)


def _members(repo: Repo) -> tuple[StoreConfig, ...]:
    named = [repo] if isinstance(repo, str) else list(repo)
    return tuple(parse_store(text) for part in named for text in part.split(","))


def _read_key(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return parse_key(file.read(), path)


def _producer(model: Model) -> dict[str, str]:
    import transformers

    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return {"engine": f"transformers {transformers.__version__}", "model": os.path.basename(name.rstrip("/"))}
