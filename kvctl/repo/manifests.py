"""What every manifest has in common, whatever it describes. Pure.

A manifest is a JSON object with a `schema`, and with a top-level `chunks`: a list of `[name, size]` that holds
every chunk it needs, once each; its other fields refer to chunks by name or by their place in that list. gc,
check, repair and rebalance know nothing else of manifests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvctl.core.errors import FormatError
from kvctl.repo.chunks import ChunkRef
from kvctl.repo.layout import MODELS, SESSIONS

# Manifests live below these.
PREFIXES: Final = (MODELS, SESSIONS)


def parse(data: bytes, where: str) -> dict[str, Any]:  # Any: JSON; the part that owns the schema checks the rest
    """The manifest's document. Raises FormatError for what is no manifest; `where` names the key."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise FormatError(f"manifest {where} is not JSON", cause=str(problem)) from problem
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str):
        raise FormatError(f"{where} is not a manifest", cause="no schema")
    chunk_refs(document, where)
    return document


def chunk_refs(document: Mapping[str, Any], where: str = "manifest") -> list[ChunkRef]:  # Any: JSON
    """Every chunk the manifest needs. Raises FormatError for a missing or malformed `chunks` list."""
    entries = document.get("chunks")
    if not isinstance(entries, list):
        raise FormatError(f"{where} has no list of chunks")
    refs = []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise FormatError(f"{where} names a chunk wrongly", cause=f"{entry!r}, expected [name, size]")
        size = entry[1]
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise FormatError(f"{where} gives chunk {entry[0]} the size {size!r}")
        refs.append(ChunkRef.parse(entry[0], size))
    return refs


def referenced(document: Mapping[str, Any]) -> Iterator[str]:  # Any: JSON
    """The names of every chunk the manifest needs."""
    for ref in chunk_refs(document):
        yield ref.name
