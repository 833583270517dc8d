"""Specs of `mem://`: objects in this process's memory, for tests and examples. Imports nothing heavy."""

from __future__ import annotations

from kvctl.transports.registry import StoreSpec, TransportSpec

STORE = StoreSpec("mem", "objects in this process's memory (tests)", "kvctl.transports.mem:open_store")
TRANSPORT = TransportSpec(
    "mem", "copies from and to this process's memory", "kvctl.transports.mem:open_transport", schemes=("mem",)
)
