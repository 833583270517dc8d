"""Specs of `slot://NAME` (a slot of this host's agent) and `peer://HOST:PORT/SLOT` (of another host's), as sources of
weights. Imports nothing heavy.
"""

from __future__ import annotations

from kvctl.transports.registry import Option, StoreSpec, TransportSpec

SLOT = StoreSpec("slot", "a slot of the agent on this host, read only", "kvctl.agent.slot_store:open_store")
SLOT_TRANSPORT = TransportSpec(
    "slot", "copies out of the memory of this host's agent", "kvctl.agent.slot_store:open_transport", schemes=("slot",)
)
PEER = StoreSpec(
    "peer",
    "a slot of another host's agent (`kvctl agent serve --peers`), read only",
    "kvctl.agent.peer_store:open_store",
    options=(
        Option("key_file", "file with the key that `kvctl node token` made", "KVCTL_NODE_KEY_FILE, else no tokens"),
        Option("tls", "true: HTTPS", "false"),
        Option("ca_bundle", "a PEM file of the CAs that the agent's certificate is checked against", "the system's"),
        Option("connect_timeout", "seconds to connect", "5"),
        Option("timeout", "seconds without a byte before a request is given up", "30"),
    ),
)
