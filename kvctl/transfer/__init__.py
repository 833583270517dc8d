"""Many ranges, many members, one report: the executor that keeps every endpoint busy, and what it counted.

Plan and statistics are pure; `execute` owns threads and transports of one run. Imports `transports`, `memory`,
`core`. Knows nothing of weights, KV or repos.
"""
