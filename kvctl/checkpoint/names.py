"""Where the parts of a checkpoint lie under its name, and their documents. Pure.

NAME/<UTC>-<id>/...                       the folder that any loader opens
NAME/<UTC>-<id>/kvctl-digests.json        the tensors' digests (`load-weights --require-digests`)
NAME/<UTC>-<id>/kvctl-checkpoint.json     written last: from then on it is a checkpoint
NAME/<UTC>-<id>/.kvctl-partial.json       while it is written: what is there already
NAME/LATEST                               the id of the newest one; moved after that
NAME/.kvctl-lock                          who is writing one now
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from kvctl.core.errors import FormatError

SCHEMA: Final = "kvctl.checkpoint/1"
PARTIAL_SCHEMA: Final = "kvctl.checkpoint-partial/1"
MANIFEST: Final = "kvctl-checkpoint.json"
PARTIAL: Final = ".kvctl-partial.json"
DIGESTS: Final = "kvctl-digests.json"
LATEST: Final = "LATEST"
LOCK: Final = ".kvctl-lock"
_STAMP: Final = "%Y%m%dT%H%M%SZ"
_ID: Final = re.compile(r"[1-8][0-9]{7}T[0-9]{6}Z-[0-9a-f]{6}")


def new_id(now: datetime, after: str | None = None) -> str:
    """Sorts by time, and after `after`, whatever the clocks say: in the same second, or before it, the next one."""
    moment = now.astimezone(UTC)
    if after is not None:
        moment = max(moment, datetime.strptime(after[:16], _STAMP).replace(tzinfo=UTC) + timedelta(seconds=1))
    return f"{moment:{_STAMP}}-{secrets.token_hex(3)}"


@lru_cache(maxsize=4096)
def is_id(text: str) -> bool:
    """Whether it is one that `new_id` can have made: its time is one."""
    if _ID.fullmatch(text) is None:
        return False
    try:
        datetime.strptime(text[:16], _STAMP)  # noqa: DTZ007 - only whether it is a time
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a checkpoint. `content`: for weights, of the header and all tensor digests; else of the bytes.
    `version`: the store's, of the object that was written; empty where it is not known.
    """

    size: int
    content: str
    version: str = ""

    def same(self, other: Entry | None) -> bool:
        """Whether both hold the same, wherever they lie."""
        return other is not None and (self.size, self.content) == (other.size, other.content)

    def to_json(self) -> dict[str, int | str]:
        found: dict[str, int | str] = {"bytes": self.size, "content": self.content}
        return {**found, "version": self.version} if self.version else found


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint. `source` is what it was made of, `generation` which one."""

    ident: str
    created: str
    source: str
    generation: str
    digest: str
    files: Mapping[str, Entry]
    facts: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON

    @property
    def nbytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": SCHEMA,
            "id": self.ident,
            "created": self.created,
            "source": self.source,
            "generation": self.generation,
            "digest": self.digest,
            "files": {name: entry.to_json() for name, entry in self.files.items()},
            **self.facts,
        }


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Raises FormatError."""
    try:
        document = json.loads(data)
        if document["schema"] != SCHEMA:
            raise FormatError(f"{where} is no checkpoint of ours", cause=f"its schema is {document['schema']!r}")
        return Manifest(
            str(document["id"]), str(document["created"]), str(document["source"]), str(document["generation"]),
            str(document["digest"]), _entries(document["files"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where} is malformed", cause=str(error)) from error


def partial_json(source: str, plan: str, files: Mapping[str, Entry]) -> bytes:
    """What a checkpoint that is being written has already. `plan`: the names and sizes that it will have."""
    return json.dumps(
        {
            "schema": PARTIAL_SCHEMA,
            "source": source,
            "plan": plan,
            "files": {name: entry.to_json() for name, entry in files.items()},
        }
    ).encode()


def parse_partial(data: bytes) -> tuple[str, str, dict[str, Entry]]:
    """(source, plan, files); raises ValueError for what is not ours."""
    try:
        document = json.loads(data)
        if document["schema"] != PARTIAL_SCHEMA:
            raise ValueError(document["schema"])
        return str(document["source"]), str(document["plan"]), _entries(document["files"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _entries(value: Mapping[str, Mapping[str, Any]]) -> dict[str, Entry]:  # Any: JSON
    return {
        str(name): Entry(int(item["bytes"]), str(item["content"]), str(item.get("version", "")))
        for name, item in value.items()
    }


def to_remove(complete: Sequence[str], keep_last: int, latest: str | None) -> list[str]:
    """Which checkpoints a retention removes, oldest first: all but the newest `keep_last`, never the one that LATEST
    names. Ids sort by time.
    """
    ordered = sorted(complete)
    kept = set(ordered[-keep_last:]) if keep_last > 0 else set()
    return [ident for ident in ordered if ident not in kept and ident != latest]
