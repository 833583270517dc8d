"""Specs of the S3 store and transport. Imports nothing heavy."""

from __future__ import annotations

from kvctl.transports.registry import Option, StoreSpec, TransportSpec

STORE = StoreSpec(
    "s3",
    "a bucket of any S3 server, or a prefix in it",
    "kvctl_s3.store:open_store",
    options=(
        Option("region", "the bucket's region", "AWS_REGION, the profile's, us-east-1"),
        Option("profile", "a profile of the AWS config files", "AWS_PROFILE"),
        Option("anonymous", "true: unsigned requests, for public buckets", "false"),
        Option("addressing", "path, virtual (bucket in the host name) or auto", "auto: virtual only at AWS"),
        Option("ca_bundle", "a PEM file of the CAs that the server's certificate is checked against", "AWS_CA_BUNDLE"),
        Option("conditional_put", "true, false, or auto: tried once with a small object", "auto"),
        Option("connect_timeout", "seconds to connect", "5"),
        Option("timeout", "seconds without a byte before a request is given up", "30"),
    ),
)
TRANSPORT = TransportSpec(
    "s3",
    "signed ranged requests, bodies received straight into memory",
    "kvctl_s3.transport:open_transport",
    schemes=("s3",),
    lacks="kvctl.transports.http.pump:lacking",
    options=(
        Option("threads", "connections per endpoint", "4"),
        Option("payload", "unsigned, or signed: uploads carry their SHA-256 (slow)", "unsigned"),
        Option("receive_buffer", "bytes of socket buffer, 0: the kernel tunes it", "0"),
        Option("compiled", "false: reads in Python, not by the compiled reader", "true where that was built"),
    ),
)
