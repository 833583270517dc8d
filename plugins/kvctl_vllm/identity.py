"""What the KV of this engine means: the descriptor of its run, per adapter and salt."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvctl.core.context import Context
from kvctl.core.errors import IncompatibleError, KvctlError
from kvctl.kv.identity import Descriptor, Lora, describe_model, lora_scale
from kvctl.kv.tokens import domain_secret
from kvctl.weights.identify import SMALL_FILES

DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
LARGEST: Final = 64 << 20  # bytes of a small file


@dataclass(slots=True)
class Identity:
    """Of one engine. `files`: its model's small files. `dtype`: logical dtype of its KV."""

    files: Mapping[str, bytes]
    dtype: str
    where: str
    _known: dict[object, Descriptor] = field(default_factory=dict)
    _adapters: dict[str, Lora] = field(default_factory=dict)
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
        """`weights`: model digest. `adapter`: folder of a LoRA, which is read once. Raises IncompatibleError and what
        reading the adapter raises.
        """
        asked = (weights, adapter, salt, tenant)
        with self._lock:
            found = self._known.get(asked)
        if found is None:
            found = describe_model(
                self.files,
                weights,
                dtype=self.dtype,
                lora=() if adapter is None else (self._lora(adapter),),
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
        from kvctl.weights.models import digest_model

        with self._lock:
            found = self._adapters.get(folder)
        if found is None:
            digest, _ = digest_model(folder, None, None, None, Context())
            with open(os.path.join(folder, "adapter_config.json"), "rb") as file:
                found = Lora(digest.digest, lora_scale(file.read(), folder))
            with self._lock:
                self._adapters[folder] = found
        return found


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
    from kvctl.weights.models import digest_model

    if not os.path.isdir(folder):
        return None
    try:
        found, _ = digest_model(folder, None, None, None, Context())
    except KvctlError:
        return None
    return found.digest
