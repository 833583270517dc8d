"""Spec of `store-get`: bulk over a store's own get and put, for plug-ins that bring no transport."""

from __future__ import annotations

from kvctl.transports.registry import TransportSpec

TRANSPORT = TransportSpec(
    "store-get",
    "any store's own get and put; one extra copy",
    "kvctl.transports.store_get:open_transport",
    rank=0,
)
