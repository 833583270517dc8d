"""Specs of the S3 store and transport. Imports nothing heavy."""

from __future__ import annotations

from kvctl.transports.registry import StoreSpec, TransportSpec

STORE = StoreSpec("s3", "a bucket of any S3 server, or a prefix in it", "kvctl_s3.store:open_store")
TRANSPORT = TransportSpec(
    "s3",
    "signed ranged requests, bodies received straight into memory",
    "kvctl_s3.transport:open_transport",
    schemes=("s3",),
)
