"""The RDMA lab: User-Mode Linux guests whose kernel has Soft-RoCE, over the host's own root file system.

Real verbs with no RDMA hardware, for tests and for looking at things: see `kvctl help rdma` and scripts/rdma-lab.
Knows nothing of kvctl and needs only Python's standard library. tests/lab uses `prepare` and `guests`; nothing in kvctl
imports it.
"""
