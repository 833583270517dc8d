"""Plug-in: transports over NVIDIA's NIXL: `nixl-posix` and `nixl-gds` (files), `nixl-obj` (S3), `nixl-ucx` (the memory
of another process). Imports the seams and `core` only; what it needs of a file or S3 store it takes by shape
(`kvctl_nixl.places`). Only `library` imports NIXL, and only when a transport is opened: specs and probes stay light.
"""
