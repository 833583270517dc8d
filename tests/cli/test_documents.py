"""How documents look to people: bytes have units, counts have none."""

from __future__ import annotations

from kvctl.cli.documents import cell, render


def test_bytes_have_units_and_counts_have_none() -> None:
    assert cell("written", 3) == "3 B"
    assert cell("new_bytes", 2048) == "2 KiB"
    assert cell("stripe_size", 1 << 20) == "1 MiB"
    assert [cell(key, 3) for key in ("blocks_written", "packs_written", "nodes_written", "tokens")] == ["3"] * 4
    assert render({"tp": {"size": 4, "sharded_bytes": 2048}}).split() == [
        "tp:",
        "size",
        "4",
        "sharded",
        "bytes",
        "2",
        "KiB",
    ]
