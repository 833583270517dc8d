"""What a connection may ask of the agent's KV cache. Documents in, documents out; reads and pushes themselves go
straight to the tiers' repos.
"""

from __future__ import annotations

import base64
import contextlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvctl.agent.kv_cache import KvCache
from kvctl.core.errors import KvctlError, NotFoundError
from kvctl.kv.identity import Descriptor
from kvctl.kv.prefix import Want
from kvctl.kv.tokens import Extra

Document = dict[str, Any]  # Any: JSON
NONE: Final = "the agent holds no KV"


def want_document(want: Want) -> Document:
    """A want as it travels to the agent of the same user; the secret stays out, the agent has its own."""
    return {
        "descriptor": base64.b64encode(want.descriptor.canonical()).decode(),
        "tokens": base64.b64encode(want.tokens.tobytes()).decode(),
        "tenant": want.tenant,
        "extras": [[extra.start, extra.count, extra.kind, extra.digest.hex()] for extra in want.extras],
    }


def parse_want(document: Mapping[str, Any]) -> Want:  # Any: JSON
    """Raises FormatError, ValueError, KeyError."""
    tokens = array("I")
    tokens.frombytes(base64.b64decode(document["tokens"]))
    return Want(
        Descriptor.parse(base64.b64decode(document["descriptor"]), "a client's identity"),
        tokens,
        str(document["tenant"]),
        None,
        tuple(
            Extra(int(start), int(count), str(kind), bytes.fromhex(digest))
            for start, count, kind, digest in document["extras"]
        ),
    )


class KvRequests:
    """The operations of one connection, by name in `ops`; `close` gives up its room."""

    def __init__(self, cache: KvCache | None, holder: int) -> None:
        self._cache = cache
        self._holder = holder
        self.ops: dict[str, Callable[[Document], tuple[Document, Sequence[int]]]] = {
            "kv_tiers": lambda _: (self._known().describe(), ()),
            "kv_places": lambda _: (self._known().places(), ()),
            "kv_room": self._room,
            "kv_stored": self._stored,
            "kv_looked": self._looked,
            "kv_loaded": self._loaded,
        }

    def close(self) -> None:
        if self._cache is not None:
            with contextlib.suppress(KvctlError):  # a tier that cannot be tidied now is when room is made next
                self._cache.release(self._holder)

    def _known(self) -> KvCache:
        if self._cache is None:
            raise NotFoundError(NONE, hint="start it with --kv-memory or --kv-local")
        return self._cache

    def _room(self, document: Document) -> tuple[Document, Sequence[int]]:
        granted = self._known().reserve(
            str(document["tier"]), self._holder, int(document["bytes"]), int(document["tokens"])
        )
        return {"granted": granted}, ()

    def _stored(self, document: Document) -> tuple[Document, Sequence[int]]:
        session = document["session"]
        self._known().stored(
            str(document["tier"]),
            self._holder,
            None if session is None else str(session),
            shared=bool(document["shared"]),
        )
        return {}, ()

    def _looked(self, document: Document) -> tuple[Document, Sequence[int]]:
        hit = document["hit"]
        self._known().looked([str(name) for name in document["asked"]], None if hit is None else str(hit))
        return {}, ()

    def _loaded(self, document: Document) -> tuple[Document, Sequence[int]]:
        want = document["want"]
        self._known().loaded(
            str(document["tier"]),
            int(document["tokens"]),
            int(document["bytes"]),
            [str(name) for name in document["chunks"]],
            None if want is None else parse_want(want),
        )
        return {}, ()
