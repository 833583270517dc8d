"""What the KV of this engine means: the descriptor of its run, per adapter and salt."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvctl.core.context import Context
from kvctl.core.errors import IncompatibleError, KvctlError, NotFoundError
from kvctl.kv.identity import Descriptor, Lora, describe_model, lora_scale
from kvctl.kv.tokens import domain_secret
from kvctl.weights.identify import SMALL_FILES
from kvctl.weights.models import digest_model

DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
LARGEST: Final = 64 << 20  # bytes of a small file


@dataclass(frozen=True, slots=True)
class _Adapter:
    """A LoRA, and what its folder looked like when it was read; no `files`: it has changed since."""

    lora: Lora
    files: tuple[tuple[str, int, int, int], ...]


@dataclass(slots=True)
class Identity:
    """Of one engine. `files`: its model's small files. `dtype`: logical dtype of its KV."""

    files: Mapping[str, bytes]
    dtype: str
    where: str
    _known: dict[object, Descriptor] = field(default_factory=dict)
    _adapters: dict[str, _Adapter] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def descriptor(
        self,
        weights: str,
        *,
        adapter: str | None = None,
        salt: str | None = None,
        key: bytes | None = None,
        tenant: str = "",
    ) -> Descriptor:
        """`weights`: model digest. `adapter`: folder of a LoRA, which is read once. Raises IncompatibleError, also for
        a folder that has changed since, and what reading the adapter raises.
        """
        lora = () if adapter is None else (self._lora(adapter),)
        asked = (weights, lora, salt, tenant)
        with self._lock:
            found = self._known.get(asked)
        if found is None:
            found = describe_model(
                self.files,
                weights,
                dtype=self.dtype,
                lora=lora,
                salt=None if salt is None else salt.encode(),
                secret=domain_secret(key, tenant),
                where=self.where,
            )
            with self._lock:
                if len(self._known) > 256:
                    self._known.clear()  # salts may be many
                self._known[asked] = found
        return found

    def _lora(self, folder: str) -> Lora:
        files = _files_of(folder)
        with self._lock:
            known = self._adapters.get(folder)
            if known is not None and known.files != files:
                known = self._adapters[folder] = _Adapter(known.lora, ())  # for good, even if the old files come back
        if known is None:
            digest, _ = digest_model(folder, None, None, None, Context())
            with open(os.path.join(folder, "adapter_config.json"), "rb") as file:
                known = _Adapter(Lora(digest.digest, lora_scale(file.read(), folder)), files)
            with self._lock:
                self._adapters[folder] = known
        if not known.files:
            raise IncompatibleError(
                f"the adapter in {folder} was changed while the engine ran: its KV is neither stored nor loaded",
                cause="vLLM names what it computed after the folder, so that may be of either",
                hint="load a changed adapter from a folder of its own, or restart the engine",
            )
        return known.lora


def _files_of(folder: str) -> tuple[tuple[str, int, int, int], ...]:
    """Name, inode, size and time of change of each file. Raises NotFoundError."""
    found = []
    try:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            about = entry.stat()
            found.append((entry.name, about.st_ino, about.st_size, about.st_mtime_ns))
    except OSError as error:
        raise NotFoundError(
            f"the adapter in {folder} cannot be read", cause=str(error), hint="load adapters from a folder"
        ) from error
    return tuple(found)


def identify(vllm_config: Any) -> Identity:  # Any: VllmConfig of any release
    """Raises IncompatibleError for KV that is stored otherwise than its numbers mean."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if str(cache.cache_dtype) not in {"auto", str(model.dtype).removeprefix("torch.")}:
        raise IncompatibleError(
            f"KV of cache dtype {cache.cache_dtype} is not stored",
            cause="its scales would have to be a part of its identity",
            hint="use --kv-cache-dtype auto, or leave KvctlConnector out",
        )
    dtype = DTYPES.get(str(model.dtype).removeprefix("torch."))
    if dtype is None:
        raise IncompatibleError(f"KV of dtype {model.dtype} is not stored")
    folder, tokenizer = str(model.model), str(model.tokenizer or model.model)
    files = small_files(tokenizer)
    files.update(small_files(folder) if folder != tokenizer else {})
    if "config.json" not in files:
        # a model of a hub: its config as transformers read it
        files["config.json"] = json.dumps(json.loads(model.hf_config.to_json_string(use_diff=False))).encode()
    return Identity(files, dtype, folder)


def small_files(folder: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in SMALL_FILES:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.path.getsize(path) <= LARGEST:
            with open(path, "rb") as file:
                found[name] = file.read()
    return found


def digest_folder(folder: str) -> str | None:
    """The model digest of a folder of safetensors, for engines whose own loader read it; None where it is none. Reads
    all of it.
    """
    if not os.path.isdir(folder):
        return None
    try:
        found, _ = digest_model(folder, None, None, None, Context())
    except KvctlError:
        return None
    return found.digest
