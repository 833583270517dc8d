"""Sessions of Hugging Face transformers: `push_cache` stores the KV cache of a live model in a repo, `pull_cache`
brings it back in another process. Here are the caches of transformers as sources and sinks of `kvctl.kv`. Imports
`kvctl.kv`, `kvctl.weights` and `kvctl.core`; torch and transformers only when a function is called.
"""

from kvctl_transformers.sessions import PulledCache, describe, pull_cache, push_cache, weights_digest

__all__ = ["PulledCache", "describe", "pull_cache", "push_cache", "weights_digest"]
