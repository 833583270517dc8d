"""Second process: pull the KV, go on, compare with the first; then compute the same prompt again, for the times.

    python resume.py MODEL REPO SESSION WEIGHTS RESULT TIMES

Ends with 1 when a token or a logit differs. TIMES is a JSON file with what was measured.
"""

from __future__ import annotations

import json
import sys
import time

from kvctl_transformers import pull_cache
from kvctl_transformers.examples import common


def main(folder: str, repo: str, session: str, weights: str, result: str, times: str) -> int:
    import torch

    model, tokenizer = common.load(folder)
    first = torch.load(result, weights_only=True)
    ids = first["ids"]
    started = time.monotonic()
    pulled = pull_cache(model, ids[:, :-1], repo=repo, session=session, weights=weights, folder=folder)
    restored = time.monotonic() - started
    tokens, logits = common.go_on(model, pulled.cache, ids[:, -1:])
    same = tokens == first["tokens"]
    apart = float((logits - first["logits"]).abs().max())
    print(f"pull: {pulled.tokens:,} of {ids.shape[1] - 1:,} tokens, {pulled.report['bytes'] / 1e6:.1f} MB, verified")
    print(f"it goes on: {tokenizer.decode(tokens)!r}")
    print(f"tokens: {'the same' if same else 'different'}; logits: largest difference {apart:g}")
    started = time.monotonic()
    common.prefill(model, ids[:, :-1])
    computed = time.monotonic() - started
    print(f"restore {restored:.2f} s, recompute {computed:.2f} s: {computed / restored:.1f} times faster")
    with open(times, "w", encoding="utf-8") as file:
        json.dump(
            {
                "tokens": pulled.tokens,
                "bytes": pulled.report["bytes"],
                "restore_s": restored,
                "setup_s": pulled.report["setup_s"],
                "recompute_s": computed,
                "tokens_same": same,
                "logits_apart": apart,
            },
            file,
        )
    return 0 if same and apart == 0 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:7]))
