"""Writes kvctl/cli/data/smollm2-32-tokens.safetensors, the KV bundle that `kvctl demo` pushes: all 30 layers of
SmolLM2-135M-Instruct in BF16 after 32 tokens of TEXT, with their ids.

    .venv/bin/python scripts/make_demo_bundle.py FOLDER

FOLDER: the model, as `kvctl demo --llm` makes it (or plugins/kvctl_transformers/examples/smollm2.py). Its weights
digest becomes part of the bundle's identity. On another machine the KV's last bits may differ, as its arithmetic does.
"""

from __future__ import annotations

import sys
from pathlib import Path

TEXT = (
    "A conversation's KV cache is the memory of what a language model has read. It is expensive to compute and cheap "
    "to keep, if it can be found again, checked, and moved to wherever the conversation goes on."
)
TOKENS = 32
TARGET = Path(__file__).resolve().parent.parent / "kvctl" / "cli" / "data" / "smollm2-32-tokens.safetensors"


def main(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    from kvctl.kv.bundle import write_bundle
    from kvctl_transformers import describe, weights_digest
    from kvctl_transformers.describe import token_array
    from kvctl_transformers.export import Exported, cache_layers

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape[1] == TOKENS, f"the text has {ids.shape[1]} tokens"
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    meaning = describe(model, weights=weights_digest(folder), dtype="BF16", folder=folder)
    kv = Exported(cache_layers(cache), meaning, TOKENS)
    producer = {"model": "SmolLM2-135M-Instruct", "engine": "transformers", "made by": "scripts/make_demo_bundle.py"}
    size = write_bundle(str(TARGET), meaning, TOKENS, kv.layers, token_ids=token_array(ids), producer=producer)
    print(f"{TARGET}: {size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
