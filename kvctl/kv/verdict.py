"""The usable prefix of a stored session, decided before any of its KV is moved: identity, tokens, windows, states and
the tail block, and packs that are missing or damaged. The search is pure; what it must know is read by `reading`.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.manifest import PackRow, SessionManifest
from kvctl.kv.packs import PackHeader
from kvctl.kv.tokens import ROOT, BlockKey

SCHEMA: Final = "kvctl.kv-verdict/1"


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """Of one group: the tokens [first, end) that are wanted, in how many packs."""

    group: int
    kind: str
    first: int
    end: int
    packs: int

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"group": self.group, "kind": self.kind, "first": self.first, "end": self.end, "packs": self.packs}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`usable` of `wanted` tokens, because `reason`. `stored`: tokens of the session. `damaged`: whether a pack that
    is missing or damaged made it shorter. Bytes of KV that will be handed over, and of packs' headers read so far.
    """

    session: str
    generation: int
    stored: int
    wanted: int
    usable: int
    reason: str
    damaged: bool = False
    groups: tuple[GroupVerdict, ...] = ()
    bytes: int = 0
    metadata_bytes: int = 0
    compared: bool = True
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"usable {self.usable:,} of {self.wanted:,} tokens, because {self.reason}"

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": SCHEMA,
            "session": self.session,
            "generation": self.generation,
            "stored_tokens": self.stored,
            "wanted_tokens": self.wanted,
            "usable_tokens": self.usable,
            "reason": self.reason,
            "damaged": self.damaged,
            "groups": [group.to_json() for group in self.groups],
            "bytes": self.bytes,
            "metadata_bytes": self.metadata_bytes,
            "tokens_compared": self.compared,
            "problems": list(self.problems),
        }


@dataclass(slots=True)
class Limit:
    """How far the prefix goes and why not farther."""

    tokens: int
    reason: str
    damaged: bool = False

    def lower(self, tokens: int, reason: str, *, damaged: bool = False) -> None:
        if tokens < self.tokens:
            self.tokens, self.reason, self.damaged = max(0, tokens), reason, damaged


def window_start(group: Group, tokens: int) -> int:
    """The first token of a group that is needed to go on after `tokens` tokens."""
    if group.recurrent:
        return 0
    return max(0, tokens - (group.window - 1)) if group.window is not None else 0


def needed_rows(manifest: SessionManifest, group: int, start: int, end: int) -> list[PackRow]:
    """The packs of a group that hold any of the tokens [start, end)."""
    return [row for row in manifest.packs_of(group) if row.first < end and row.end > start]


@dataclass(slots=True)
class Search:
    """Finds the usable prefix. `bad`: position of a row in the manifest -> why its pack cannot be used; it may grow
    between calls of `usable`. `chain`: the caller's blocks; None when it brought no tokens.
    """

    manifest: SessionManifest
    descriptor: Descriptor
    wanted: int
    chain: Sequence[BlockKey] | None
    headers: Mapping[PackRow, PackHeader]
    bad: dict[PackRow, str] = field(default_factory=dict)

    def usable(self) -> Limit:
        """The longest prefix that everything known so far allows; call it again when more is known."""
        stored = self.manifest.tokens
        limit = Limit(stored, f"the session holds {stored:,} tokens")
        if self.wanted < stored:
            limit.lower(self.wanted, "no more are wanted")
        elif self.wanted == stored:
            limit.reason = "all that are wanted are stored"
        for number, group in enumerate(self.descriptor.groups):
            if group.kind != "sliding" and not group.recurrent:
                self._full(number, limit)
        self._align(limit)
        while limit.tokens and self._shrink(limit):
            self._align(limit)
        return limit

    def _full(self, group: int, limit: Limit) -> None:
        parent = ROOT
        for row in self.manifest.packs_of(group):
            if row.first >= limit.tokens:
                break
            if row in self.bad:
                limit.lower(row.first, self.bad[row], damaged=True)
                break
            header = self.headers.get(row)
            if header is None:
                continue
            found = self._match(row, header, limit)
            if self.chain is None and header.blocks[0].parent != parent:
                limit.lower(row.first, f"the pack at token {row.first} does not follow the one before", damaged=True)
            if not found:
                break
            parent = header.blocks[row.blocks - 1].key

    def _match(self, row: PackRow, header: PackHeader, limit: Limit) -> bool:
        """Compare a pack's blocks with the caller's chain; False where they part."""
        if self.chain is None:
            return True
        size = self.descriptor.block_tokens
        base = row.first // size
        for number, block in enumerate(header.blocks[: row.blocks]):
            if block.start >= limit.tokens:
                return False
            ours = self.chain[base + number] if base + number < len(self.chain) else None
            if ours is None:
                limit.lower(block.start, "no more are wanted")
                return False
            if ours.key != block.key or ours.parent != block.parent:
                if ours.count != block.count and ours is self.chain[-1]:
                    limit.lower(block.start, f"the last {ours.count} tokens are a part of a stored block")
                elif ours.count != block.count:
                    limit.lower(block.start, f"the session ends with a block of {block.count} tokens")
                else:
                    limit.lower(block.start, f"the tokens differ from token {block.start:,} on")
                return False
            if not hmac.compare_digest(ours.token_hmac, block.token_hmac):
                limit.lower(block.start, f"a block at token {block.start:,} is stored under the key of other tokens")
                return False
        return True

    def _align(self, limit: Limit) -> None:
        size = self.descriptor.block_tokens
        if limit.tokens % size and limit.tokens != self.manifest.tokens:
            limit.tokens = limit.tokens // size * size

    def _shrink(self, limit: Limit) -> bool:
        """Apply windows and states once; True when the limit went down."""
        before = limit.tokens
        for number, group in enumerate(self.descriptor.groups):
            if group.recurrent:
                self._state(number, limit)
            elif group.kind == "sliding":
                self._window(number, group, limit)
            if limit.tokens < before:
                return True
        return False

    def _state(self, number: int, limit: Limit) -> None:
        (row,) = self.manifest.packs_of(number)
        if row in self.bad:
            limit.lower(0, self.bad[row], damaged=True)
        elif limit.tokens != row.end:
            why = f"{limit.reason}, and a recurrent state is stored after token {row.end:,} only"
            limit.lower(0, why, damaged=limit.damaged)
        elif self.chain is not None and (header := self.headers.get(row)) is not None:
            ours = self.chain[(row.end - 1) // self.descriptor.block_tokens]
            if ours.key != header.blocks[0].key:
                limit.lower(0, "the recurrent state is one of other tokens")

    def _window(self, number: int, group: Group, limit: Limit) -> None:
        rows = self.manifest.packs_of(number)
        start = window_start(group, limit.tokens)
        if not rows or start < rows[0].first:
            held = rows[0].first if rows else self.manifest.tokens
            why = f"{limit.reason}, and the window of {group.window:,} before that is stored from token {held:,} on"
            limit.lower(0, why, damaged=limit.damaged)
            return
        for row in needed_rows(self.manifest, number, start, limit.tokens):
            if row in self.bad:
                limit.lower(row.first, self.bad[row], damaged=True)
                return
            header = self.headers.get(row)
            if header is not None and not self._match(row, header, limit):
                return

    def wanted_rows(self, tokens: int) -> list[PackRow]:
        """The packs that a prefix of so many tokens needs."""
        found: list[PackRow] = []
        for number, group in enumerate(self.descriptor.groups):
            found += needed_rows(self.manifest, number, window_start(group, tokens), tokens)
        return found
