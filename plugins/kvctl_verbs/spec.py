"""Spec of the transport. Imports nothing heavy."""

from __future__ import annotations

from kvctl.transports.registry import Option, TransportSpec

TRANSPORT = TransportSpec(
    "native-rdma",
    "a storage node writes straight into this host's memory, and reads out of it",
    "kvctl_verbs.transport:open_transport",
    schemes=("node",),
    rank=30,
    options=(
        Option("threads", "requests in flight per endpoint", "8"),
        Option(
            "memory", "arena: what a load lands in is registered once; op: each range alone, for its request", "arena"
        ),
        Option("devices", "RDMA devices or their addresses, comma-separated", "all that are usable"),
        Option("peers", "CIDRs that may connect besides the endpoint's own address, comma-separated", "none"),
        Option("dialect", "scal: the header x-scal-rdma; s3: x-rdma-info", "scal"),
        Option("path", "v1: /v1/KEY; plain: /KEY, as later clients of the public protocol have it", "v1"),
    ),
    requirements="an RDMA device (RoCE, InfiniBand, Soft-RoCE) on both ends; pyverbs; librdmacm",
    install_hint="see `kvctl help rdma`",
    probe="kvctl_verbs.probe:probe",
)
