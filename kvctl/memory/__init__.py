"""Buffers: the memory that bytes land in, what allocating it costs, and who frees it.

Host, pinned and shared memory here; CUDA in `kvctl.memory.cuda`, the only module of the core that may import
torch. Imports `kvctl.core` only. Whoever allocates a buffer frees it; a transport keeps no reference to a
region after the operation's completion.
"""
