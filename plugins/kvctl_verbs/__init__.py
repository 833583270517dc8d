"""Plug-in: RDMA by verbs. The `native-rdma` transport (client of a storage node) and the node's RDMA engine.

Imports the seams, `core` and, for everything that is HTTP, `kvctl_native`: native-rdma is native-tcp's requests with
another way for the bytes. Verbs come from pyverbs, the connection manager from librdmacm by ctypes; neither is loaded
before an RDMA path is really used.
"""
