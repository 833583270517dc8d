"""A fresh process that goes on with what another one pushed: JSON jobs on stdin, results on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any


def go_on(job: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    from kvctl_transformers import pull_cache
    from tests.kv import hf_models

    model = hf_models.load(job["folder"], job["dtype"])
    ids = job["ids"]
    pulled = pull_cache(model, ids[:-1], repo=job["repo"], session=job["session"], weights=job["weights"])
    tokens, logits = hf_models.go_on(model, pulled.cache, ids[-1])
    return {"usable": pulled.tokens, "tokens": tokens, "logits": logits, "report": pulled.report}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    json.dump([go_on(job) for job in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
