"""The storage node's server: objects out of one directory, over HTTP, or by RDMA into the reader's memory.

The CLI imports it; it imports `transports` and `core`. Plug-ins that add RDMA are found by entry point
(`kvctl.node.rdma_seam`). `server` owns connections, `service` answers requests, `tree` owns the directory.
"""
