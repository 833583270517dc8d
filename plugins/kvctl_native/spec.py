"""Specs of the storage node's store and transport. Imports nothing heavy."""

from __future__ import annotations

from kvctl.transports.registry import Option, StoreSpec, TransportSpec

STORE = StoreSpec(
    "node",
    "a storage node (`kvctl node serve`), or a prefix on it",
    "kvctl_native.store:open_store",
    options=(
        Option("key_file", "file with the key that `kvctl node token` made", "KVCTL_NODE_KEY_FILE, else no tokens"),
        Option("tls", "true: HTTPS", "false"),
        Option("ca_bundle", "a PEM file of the CAs that the node's certificate is checked against", "the system's"),
        Option("connect_timeout", "seconds to connect", "5"),
        Option("timeout", "seconds without a byte before a request is given up", "30"),
    ),
)
TRANSPORT = TransportSpec(
    "native-tcp",
    "lean ranged requests, bodies received straight into memory",
    "kvctl_native.transport:open_transport",
    schemes=("node", "peer"),
    lacks="kvctl.transports.http.pump:lacking",
    options=(
        Option("threads", "connections per endpoint", "4"),
        Option("receive_buffer", "bytes of socket buffer, 0: the kernel tunes it", "0"),
        Option("compiled", "false: reads in Python, not by the compiled reader", "true where that was built"),
    ),
)
