"""What a user measures and proves on their own system: the contracts run live on a store of theirs, and every path
to it against the measured ceiling of its medium. May import weights, kv, repo, transfer and the seams; only the CLI
imports it. Nothing here prints.
"""
