"""Memory of one process for another: a `Source` publishes buffers under names, a `PeerStore` lists and describes them,
the transport `nixl-ucx` moves their bytes by NIXL's UCX back end.

Names, sizes, versions and NIXL's metadata go over a plain TCP connection of our own (`frames`, `link`): NIXL's listener
always binds every address, and its helper for descriptors unpickles what it is sent.
"""
