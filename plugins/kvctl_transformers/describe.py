"""Which model this is: its compatibility descriptor, from its folder or from the live model's own config."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvctl.core.context import Context
from kvctl.core.errors import UsageError
from kvctl.kv.identity import Descriptor, Lora, describe_model
from kvctl.kv.tokens import domain_secret

if TYPE_CHECKING:
    import torch

Model: TypeAlias = Any  # a PreTrainedModel of any release
Ids: TypeAlias = "Sequence[int] | array[int] | torch.Tensor"

_SMALL: Final = 64 << 20  # a tokenizer.json of many languages has tens of MB
_NAMES: Final = (
    *("config.json", "tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"),
    *("merges.txt", "added_tokens.json", "special_tokens_map.json"),
)


def weights_digest(address: str) -> str:
    """The model digest of a folder or URL of safetensors. Reads all of it: keep the result, or take it from
    `kvctl models digest`. Raises what loading raises.
    """
    from kvctl.weights.models import digest_model

    found, _ = digest_model(address, None, None, None, Context())
    return found.digest


def describe(
    model: Model,
    *,
    weights: str,
    dtype: str,
    folder: str | os.PathLike[str] | None = None,
    lora: Sequence[Lora] = (),
    salt: bytes | None = None,
    key: bytes | None = None,
    tenant: str = "",
) -> Descriptor:
    """The descriptor of this run of `model`. `weights`: its model digest (see `weights_digest`), never its name.
    `dtype`: logical dtype of the KV ("BF16"). `folder`: where config.json and the tokenizer lie (default: where the
    model was loaded from; where that is no folder, the live config, without a tokenizer). `salt` is kept as an HMAC
    under `key` and `tenant`. Raises UsageError, IncompatibleError.
    """
    place = os.fspath(folder) if folder is not None else str(getattr(model.config, "_name_or_path", "") or "")
    files: dict[str, bytes] = {}
    if os.path.isfile(os.path.join(place, "config.json")):
        files = _small_files(place)
    elif folder is not None:
        raise UsageError(f"{place} has no config.json", hint="name the folder that the model was loaded from")
    else:
        files = {"config.json": model.config.to_json_string(use_diff=False).encode()}
    return describe_model(
        files,
        weights,
        dtype=dtype,
        lora=lora,
        salt=salt,
        secret=domain_secret(key, tenant),
        where=place or type(model).__name__,
    )


def _small_files(folder: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in _NAMES:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.path.getsize(path) <= _SMALL:
            with open(path, "rb") as file:
                found[name] = file.read()
    return found


def token_array(tokens: Ids) -> array[int]:
    """Token ids of one sequence: a list, or a tensor of shape [n] or [1, n]. Raises UsageError."""
    listed: Any = tokens  # a tensor, which this module does not import, or numbers
    if hasattr(listed, "reshape"):
        if len(listed.shape) > 1 and listed.shape[0] != 1:
            raise UsageError(f"tokens of a batch of {listed.shape[0]}", hint="a session is one sequence")
        listed = listed.reshape(-1).tolist()
    try:
        return array("I", listed)
    except (OverflowError, TypeError) as problem:
        raise UsageError("tokens are ids from 0 to 2^32 - 1", cause=str(problem)) from None
