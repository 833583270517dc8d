"""First process: prefill a long prompt, push its KV, go on.

    python prefill.py MODEL REPO SESSION WEIGHTS TEXT TOKENS RESULT

WEIGHTS is the model digest (`kvctl models digest`). What was generated goes to the file RESULT, for `resume.py`.
"""

from __future__ import annotations

import sys
import time

from kvctl_transformers import push_cache
from kvctl_transformers.examples import common


def main(folder: str, repo: str, session: str, weights: str, text: str, count: str, result: str) -> None:
    import torch

    model, tokenizer = common.load(folder)
    ids = common.prompt(tokenizer, text, int(count))
    started = time.monotonic()
    cache = common.prefill(model, ids[:, :-1])  # the last token starts the answer
    prefilled = time.monotonic()
    print(f"prefill: {ids.shape[1] - 1:,} tokens in {prefilled - started:.2f} s")
    report = push_cache(model, cache, ids, repo=repo, session=session, weights=weights, folder=folder, with_tokens=True)
    print(f"push: {report.written / 1e6:.1f} MB in {report.seconds:.2f} s, generation {report.extra['generation']}")
    tokens, logits = common.go_on(model, cache, ids[:, -1:])
    print(f"it goes on: {tokenizer.decode(tokens)!r}")
    torch.save({"ids": ids, "tokens": tokens, "logits": logits, "prefill_s": prefilled - started}, result)


if __name__ == "__main__":
    main(*sys.argv[1:8])
