"""Specs of the transports. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

from kvctl.transports.registry import Option, TransportSpec

_OPTIONS: Final = (
    Option("threads", "requests in flight per endpoint", "8"),
    Option(
        "memory",
        "arena: what a load lands in is registered once; window: and each request gets a memory window of it; op: each "
        "range is registered alone, for its request",
        "arena",
    ),
    Option("devices", "RDMA devices or their addresses, comma-separated", "all that are usable"),
    Option("peers", "networks that may connect besides the endpoint's own address, comma-separated", "none"),
)
_REQUIREMENTS: Final = "an RDMA device (RoCE, InfiniBand, Soft-RoCE) on both ends; pyverbs; librdmacm"
_INSTALL: Final = "see `kvctl help rdma`"

NATIVE = TransportSpec(
    "native-rdma",
    "a storage node writes straight into this host's memory, and reads out of it",
    "kvctl_verbs.opening:open_native",
    schemes=("node", "peer"),
    rank=30,
    options=(
        *_OPTIONS,
        Option("dialect", "scal: the header x-scal-rdma; s3: x-rdma-info", "scal"),
        Option("path", "v1: /v1/KEY; plain: /KEY, as later clients of the public protocol have it", "v1"),
    ),
    requirements=_REQUIREMENTS,
    install_hint=_INSTALL,
    probe="kvctl_verbs.probe:probe",
    serves="kvctl_verbs.talk:serves",
)
# No S3 server says whether it can, so this one runs only when asked for by name: its rank is below every other's.
S3 = TransportSpec(
    "s3-rdma",
    "an S3 server that knows x-rdma-info moves the bytes by RDMA; runs only when asked for",
    "kvctl_verbs.opening:open_s3",
    schemes=("s3",),
    rank=-1,
    options=_OPTIONS,
    requirements=_REQUIREMENTS,
    install_hint=_INSTALL,
    probe="kvctl_verbs.probe:probe",
)
