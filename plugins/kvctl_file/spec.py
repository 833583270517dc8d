"""Specs of the file store and transport. Imports nothing heavy."""

from __future__ import annotations

from kvctl.transports.registry import Option, StoreSpec, TransportSpec

STORE = StoreSpec(
    "file",
    "a directory of a local or shared file system",
    "kvctl_file.store:open_store",
)
TRANSPORT = TransportSpec(
    "file",
    "preadv and pwritev straight between files and memory",
    "kvctl_file.transport:open_transport",
    schemes=("file",),
    options=(
        Option(
            "direct",
            "true: O_DIRECT for reads and writes, bypassing the page cache",
            "false",
            unusable="kvctl_file.direct:unusable",
        ),
        Option("threads", "reading threads; raise it for network file systems", "one per core, 2 to 8; direct: 4 to 8"),
    ),
)
