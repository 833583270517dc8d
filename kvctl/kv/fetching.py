"""The ranges of packs that a layout needs, and what becomes of the bytes: verified, decoded, put where they belong.

A range is a run of whole fragments (the unit of checksum and codec), split at layers when layers are delivered one by
one. What is fetched beyond what is needed is the rest of fragments at the ends, and the padding between fragments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvctl.core.errors import IncompatibleError, IntegrityError, KvctlError, MemberDownError, NotFoundError
from kvctl.core.units import MIB
from kvctl.kv.codecs import NONE
from kvctl.kv.identity import Group
from kvctl.kv.manifest import PackRow
from kvctl.kv.packs import Fragment, PackHeader, decode_fragment, ranges, verify_fragment
from kvctl.kv.reading import StoredSession
from kvctl.kv.seams import LayerKv, Layout, Slot
from kvctl.transfer.tasks import Place, StageClock, Task

PIECE: Final = 8 * MIB  # a range is no longer than this, unless one fragment is


def choose_heads(group: Group, rank: int, size: int) -> tuple[int, int]:
    """(first, count) of the KV heads of a tensor-parallel rank; replicated where ranks outnumber heads, or where the
    group has no heads to divide. Raises IncompatibleError when they do not divide.
    """
    if group.kind in {"mla", "indexer", "recurrent"} or size == 1:
        return 0, group.kv_heads
    larger, smaller = max(size, group.kv_heads), min(size, group.kv_heads)
    if larger % smaller:
        raise IncompatibleError(
            f"{group.kv_heads} KV heads cannot be divided among {size} ranks",
            cause=f"{larger} is no multiple of {smaller}",
        )
    if group.kv_heads >= size:
        count = group.kv_heads // size
        return rank * count, count
    return rank * group.kv_heads // size, 1


@dataclass(frozen=True, slots=True)
class Piece:
    """One ranged read of a pack: whole fragments that follow each other."""

    row: PackRow
    offset: int
    length: int
    fragments: tuple[Fragment, ...]

    @property
    def layer(self) -> int:
        return self.fragments[0].place.layer


class Fetch:
    """What one layout needs of one session. `ready(layer)` is called once per layer, in order, when it is complete."""

    def __init__(
        self,
        session: StoredSession,
        layout: Layout,
        views: Sequence[LayerKv],
        clock: StageClock,
        ready: Callable[[int], None] | None,
    ) -> None:
        self._session = session
        self._layout = layout
        self._tokens = layout.tokens
        self._slots: dict[tuple[int, int], tuple[Slot, LayerKv]] = {
            (slot.group, slot.layer): (slot, view) for slot, view in zip(layout.slots, views, strict=True)
        }
        self._clock = clock
        self._ready = ready
        self._landed: set[tuple[PackRow, int]] = set()
        self._suspect: dict[tuple[PackRow, int], str] = {}
        self._left: dict[int, set[tuple[PackRow, int]]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._need: dict[tuple[PackRow, int], int] = {}
        self._spans: dict[tuple[PackRow, int], dict[int, tuple[int, int]]] = {}
        self._pieces: list[Piece] = []
        self.packs = 0

    @property
    def needed(self) -> int:
        """Bytes, as stored, that the prefix needs."""
        return sum(self._need[piece.row, piece.offset] for piece in self._pieces)

    def shrink(self, tokens: int) -> None:
        """Fetch no more than the first `tokens` tokens; the layout stays."""
        self._tokens = tokens
        self._spans.clear()

    def tasks(self) -> list[Task]:
        """Reads of what has not landed yet. Raises MemberDownError when a pack's members are all down."""
        self._pieces = sorted(self._cut(), key=lambda piece: (piece.layer if self._ready else 0, piece.row.first))
        layers = sorted({layer for _, layer in self._slots})
        self._left = {layer: set() for layer in layers}
        for piece in self._pieces:
            if (piece.row, piece.offset) not in self._landed:
                for fragment in piece.fragments:
                    self._left[fragment.place.layer].add((piece.row, piece.offset))
        with self._lock:
            self._hand_over()
        return [self._task(piece) for piece in self._pieces if (piece.row, piece.offset) not in self._landed]

    def _cut(self) -> Iterator[Piece]:
        session, size = self._session, self._session.descriptor.block_tokens
        rows: set[PackRow] = set()
        for number in sorted({slot.group for slot in self._layout.slots}):
            slots = [slot for slot in self._layout.slots if slot.group == number]
            first = slots[0]
            layers = [slot.layer for slot in slots]
            heads = (first.first_head, first.first_head + first.heads)
            recurrent = session.descriptor.groups[number].recurrent
            start = self._tokens - 1 if recurrent else first.start
            for row in session.manifest.packs_of(number):
                if row.first >= self._tokens or row.end <= start:
                    continue
                begin = row.first // size * size
                block = 0 if recurrent else max(0, (start - begin) // size)
                end = 1 if recurrent else -(-(min(self._tokens, row.end) - begin) // size)
                rows.add(row)
                for span in ranges(session.headers[row], layers, heads, block, end - block):
                    yield from self._split(row, span.fragments)
        self.packs = len(rows)

    def _split(self, row: PackRow, fragments: Sequence[Fragment]) -> Iterator[Piece]:
        run: list[Fragment] = []
        for fragment in fragments:
            if run and (
                fragment.end - run[0].offset > PIECE or (self._ready and fragment.place.layer != run[0].place.layer)
            ):
                yield self._piece(row, run)
                run = []
            run.append(fragment)
        yield self._piece(row, run)

    def _piece(self, row: PackRow, run: Sequence[Fragment]) -> Piece:
        piece = Piece(row, run[0].offset, run[-1].end - run[0].offset, tuple(run))
        header = self._session.headers[row]
        if header.geometry.group.recurrent:
            self._need[row, piece.offset] = piece.length
            return piece
        spans = self._spans_of(header, row)
        slot, _ = self._slots[row.group, piece.layer]
        first, end = slot.first_head, slot.first_head + slot.heads
        size = header.geometry.block_tokens
        need = 0
        for item in run:
            place = item.place
            low, high = spans[place.block]
            if high - low == (place.end_block - place.block) * size and first <= place.head and place.end_head <= end:
                need += item.stored
            else:
                heads = min(place.end_head, end) - max(place.head, first)
                whole = (place.end_block - place.block) * size * (place.end_head - place.head)
                need += item.stored * max(0, high - low) * heads // whole
        self._need[row, piece.offset] = need
        return piece

    def _spans_of(self, header: PackHeader, row: PackRow) -> dict[int, tuple[int, int]]:
        """First and end token that the layout takes of each run of blocks of a pack, by the run's first block."""
        start = next(slot.start for (group, _), (slot, _) in self._slots.items() if group == row.group)
        known = self._spans.get((row, start))
        if known is None:
            step, blocks = header.geometry.run_blocks, header.blocks
            limit = min(row.end, self._tokens)  # the pack may go on with blocks of another session's chain
            known = self._spans[row, start] = {
                block: (max(blocks[block].start, start), min(blocks[min(block + step, len(blocks)) - 1].end, limit))
                for block in range(0, len(blocks), step)
            }
        return known

    def _task(self, piece: Piece) -> Task:
        ref = self._session.ref(piece.row)
        members = self._session.repo.locate(ref.digest)
        places = tuple(Place(member.index, ref.key) for member in members if member.down is None)
        if not places:
            raise MemberDownError(
                f"pack {ref.name} cannot be read: member {members[0].name} is down",
                cause=str(members[0].down),
                hint="bring it back, or see `kvctl repo status`",
            )

        def on_bytes(_: Task, view: memoryview) -> None:
            self._land(piece, view)

        return Task(
            places,
            piece.offset,
            piece.length,
            object_size=ref.size,
            on_bytes=on_bytes,
            priority=piece.layer if self._ready else 0,
        )

    def _land(self, piece: Piece, view: memoryview) -> None:
        """Verify a range and put it where it belongs. On a finisher thread."""
        where = (piece.row, piece.offset)
        header = self._session.headers[piece.row]
        base = piece.offset
        try:
            with self._clock.timed("verify"):
                digest = xxhash.xxh3_64_intdigest
                for fragment in piece.fragments:
                    at = fragment.offset - base
                    stored = view[at : at + fragment.stored]
                    if digest(stored) != fragment.checksum:
                        verify_fragment(header, fragment, stored)
            with self._clock.timed("copy"):
                self._copy(header, piece, view)
        except IntegrityError as error:
            with self._lock:
                self._suspect[where] = str(error)
            raise
        with self._lock:
            self._suspect.pop(where, None)
            self._landed.add(where)
            for fragment in piece.fragments:
                self._left[fragment.place.layer].discard(where)
            self._hand_over()

    def _hand_over(self) -> None:
        if self._ready is None:
            return
        layers = list(self._left)
        while self._next < len(layers) and not self._left[layers[self._next]]:
            self._ready(layers[self._next])
            self._next += 1

    def _copy(self, header: PackHeader, piece: Piece, view: memoryview) -> None:
        """Runs of one head that follow each other in the pack and in the layout are one copy."""
        row, base = piece.row, piece.offset
        if header.geometry.group.recurrent:
            for fragment in piece.fragments:
                _, kv = self._slots[row.group, fragment.place.layer]
                at = fragment.offset - base
                kv.k[:] = self._raw(header, fragment, view[at : at + fragment.stored])
            return
        spans = self._spans_of(header, row)
        blocks = header.blocks
        out = memoryview(b"")
        layer, part = -1, ""
        begin = end = to = 0  # of a copy that may still grow: [begin, end) of the view, to out[to:]
        for fragment in piece.fragments:
            place = fragment.place
            if place.layer != layer or place.part != part:
                if end > begin:
                    out[to : to + end - begin] = view[begin:end]
                layer, part = place.layer, place.part
                slot, kv = self._slots[row.group, layer]
                out, width = (kv.k, slot.k_row) if part == "k" else (kv.v, slot.v_row)
                first, last, held = slot.first_head, slot.first_head + slot.heads, (slot.end - slot.start) * width
                begin = end = 0
            low, high = spans[place.block]
            if high <= low:
                continue
            length = (high - low) * width
            source = (low - blocks[place.block].start) * width
            target = (low - slot.start) * width
            if fragment.codec == NONE and place.end_head - place.head == 1:
                if not first <= place.head < last:
                    continue
                source += fragment.offset - base
                target += (place.head - first) * held
                if source == end and target == to + end - begin:
                    end += length
                    continue
                if end > begin:
                    out[to : to + end - begin] = view[begin:end]
                begin, end, to = source, source + length, target
                continue
            at = fragment.offset - base
            raw = self._raw(header, fragment, view[at : at + fragment.stored])
            each = place.raw // (place.end_head - place.head)
            for head in range(max(place.head, first), min(place.end_head, last)):
                here = (head - place.head) * each + source
                there = (head - first) * held + target
                out[there : there + length] = raw[here : here + length]
        if end > begin:
            out[to : to + end - begin] = view[begin:end]

    def _raw(self, header: PackHeader, fragment: Fragment, stored: memoryview) -> memoryview:
        if fragment.codec == NONE:
            return stored
        raw = self._room(fragment.place.raw)
        decode_fragment(header, fragment, stored, raw)
        return raw

    def _room(self, nbytes: int) -> memoryview:
        known: memoryview | None = getattr(self._scratch, "view", None)
        if known is None or len(known) < nbytes:
            known = self._scratch.view = memoryview(bytearray(nbytes))
        return known[:nbytes]

    def damaged(self) -> dict[PackRow, str]:
        """After a run that failed: the packs that cannot be read whole from anywhere, and why."""
        found = {row: self._why(row, "damaged", error) for (row, _), error in self._suspect.items()}
        self._suspect.clear()
        for row in {piece.row for piece in self._pieces if (piece.row, piece.offset) not in self._landed}:
            if row not in found and (problem := self._missing(row)):
                found[row] = self._why(row, "missing", problem)
        return found

    def _why(self, row: PackRow, what: str, problem: str) -> str:
        return f"the pack of group {row.group} at token {row.first:,} is {what} ({problem})"

    def _missing(self, row: PackRow) -> str:
        """Why no member has the pack in its size; '' when one has, or may have."""
        ref = self._session.ref(row)
        problem = "no member has it"
        for member in self._session.repo.locate(ref.digest):
            try:
                size = member.store.stat(ref.key).size
            except NotFoundError:
                continue
            except KvctlError:
                return ""
            if size == ref.size:
                return ""
            problem = f"{member.name} has {size} of its {ref.size} bytes"
        return problem
