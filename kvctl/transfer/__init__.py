"""Many ranges, many members, one report: the executor that keeps every endpoint busy, and what it counted.

Plan and statistics are pure (`tasks`, `report`, `summary`). `execute` owns threads and transports of one run; what it
does next is in `choosing`, `handing` and `ending`, over the state in `running`, of which nobody else knows. Imports
`transports`, `memory`, `core`. Knows nothing of weights, KV or repos.
"""
