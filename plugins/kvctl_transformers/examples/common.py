"""What the two processes of the example share: the model, the prompt, how they generate."""

from __future__ import annotations

import warnings
from typing import Any

STEPS = 32


def load(folder: str) -> tuple[Any, Any]:  # Any: classes of any release of transformers
    """(model, tokenizer). In F32: on a CPU the fastest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def prompt(tokenizer: Any, path: str, tokens: int) -> Any:  # Any: a tensor [1, tokens]
    """The first tokens of a text file."""
    with open(path, encoding="utf-8") as file:
        ids = tokenizer(file.read(), return_tensors="pt").input_ids
    return ids[:, :tokens]


def prefill(model: Any, ids: Any) -> Any:  # Any: tensors and a cache
    """The cache after all of `ids`."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def go_on(model: Any, cache: Any, last: Any) -> tuple[list[int], Any]:  # Any: tensors and a cache
    """Greedy tokens after `last` ([1, 1]), and their logits [steps, vocabulary]."""
    import torch

    tokens: list[int] = []
    logits = []
    with torch.no_grad():
        for _ in range(STEPS):
            found = model(last, past_key_values=cache, use_cache=True).logits[0, -1]
            last = found.argmax().reshape(1, 1)
            tokens.append(int(last))
            logits.append(found)
    return tokens, torch.stack(logits)
