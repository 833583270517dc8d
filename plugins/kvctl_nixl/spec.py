"""Specs of the NIXL transports. Imports nothing heavy."""

from __future__ import annotations

from kvctl.transports.registry import Option, StoreSpec, TransportSpec

_HINT = "pip install 'kvctl[nixl]'"

POSIX = TransportSpec(
    "nixl-posix",
    "NIXL's POSIX back end: files by io_uring",
    "kvctl_nixl.posix:open_transport",
    schemes=("file",),
    rank=5,
    options=(
        Option("api", "uring, or aio where the kernel forbids io_uring", "uring"),
        Option("direct", "true: O_DIRECT, bypassing the page cache", "false"),
        Option("threads", "reading threads, an agent each", "one per core, 2 to 8; direct: 4 to 8"),
        Option("chunk", "direct: bytes of one read in flight", "1 MiB"),
        Option("queue", "entries of the kernel's queue, per thread", "256"),
    ),
    requirements="nixl-cu12 or nixl-cu13 1.5.1, numpy; io_uring or Linux AIO",
    install_hint=_HINT,
    probe="kvctl_nixl.probes:probe_nixl",
)
GDS = TransportSpec(
    "nixl-gds",
    "NIXL's GDS back end: files straight into GPU memory",
    "kvctl_nixl.gds:open_transport",
    schemes=("file",),
    memory_kinds=frozenset({"cuda"}),
    rank=40,
    options=(
        Option("backend", "gds (batches) or gds_mt (threads)", "gds"),
        Option("threads", "operations at once, an agent each", "1"),
        Option("request", "gds: bytes of one cuFile request", "4 MiB"),
        Option("compat", "true: let cuFile bounce through host memory where it cannot do better", "false"),
        Option("build", "cu12, cu13 or auto: which build of NIXL", "auto"),
    ),
    requirements="nixl-cu12 or nixl-cu13 1.5.1, numpy; an NVIDIA GPU, libcudart, libcufile, nvidia-fs",
    install_hint=_HINT,
    probe="kvctl_nixl.probes:probe_gds",
    serves="kvctl_nixl.gds:serves",
)
OBJ = TransportSpec(
    "nixl-obj",
    "NIXL's OBJ back end: S3 by the AWS SDK, or by RDMA where an engine for the server is installed",
    "kvctl_nixl.obj:open_transport",
    schemes=("s3",),
    rank=5,
    options=(
        Option("threads", "requests in flight per endpoint", "4"),
        Option("deadline", "seconds that one transfer (at most 64 MiB) may take before it is given up", "300"),
        Option("build", "cu12, cu13 or auto: which build of NIXL", "auto: cu13 for accelerated engines, else cu12"),
        Option("accelerated", "true: an RDMA engine (nixl-cu13, libcuobjclient)", "false"),
        Option("type", "the RDMA engine: dell, scality_ai_connector, ..", "the plain one"),
        Option("crtMinLimit", "bytes from which the SDK's CRT client is used", "never"),
        Option("backend.NAME", "any other parameter of NIXL's OBJ back end, unseen", ""),
    ),
    requirements="nixl-cu12 1.5.1, numpy",
    install_hint=_HINT,
    probe="kvctl_nixl.probes:probe_nixl",
)
UCX = TransportSpec(
    "nixl-ucx",
    "NIXL's UCX back end: the memory of a peer process, by RDMA, shared memory or TCP",
    "kvctl_nixl.ucx:open_transport",
    schemes=("ucx",),
    rank=30,
    options=(
        Option(
            "mode", "push: the source writes; pull: this process reads", "auto: pull where InfiniBand is, else push"
        ),
        Option("threads", "operations in flight", "4"),
        Option("deadline", "seconds that one transfer (at most 64 MiB) may take before it is given up", "60"),
    ),
    requirements="nixl-cu12 or nixl-cu13 1.5.1, numpy, on both sides",
    install_hint=_HINT,
    probe="kvctl_nixl.probes:probe_nixl",
)
PEER = StoreSpec(
    "ucx",
    "memory that another process publishes (kvctl_nixl.peer), read-only",
    "kvctl_nixl.peer.store:open_store",
    options=(
        Option("key_file", "file with the key that the source shares", "KVCTL_PEER_KEY_FILE, else none"),
        Option("timeout", "seconds without an answer before a question is given up", "30"),
    ),
    install_hint=_HINT,
)
