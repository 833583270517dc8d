"""Buffers: the memory that bytes land in, what allocating it costs, and who frees it.

Host and shared memory here; GPUs behind the seam of `kvctl.memory.devices`, and CUDA itself in `kvctl.memory.cuda`,
the only module of the core that may import torch. Imports `kvctl.core` only. Whoever allocates a buffer frees it; a
transport keeps no reference to a region after the operation's completion.
"""
