"""The ranges of packs that a layout needs, and what becomes of the bytes: verified, decoded, put where they belong.

Most bytes are read straight into the receiver's memory and verified there; what must be decoded or cut goes through
staging (`kvctl.kv.pieces`). What is fetched beyond what is needed is the rest of fragments at the ends, and the padding
between fragments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import xxhash

from kvctl.core.errors import IncompatibleError, IntegrityError, KvctlError, MemberDownError, NotFoundError
from kvctl.kv.codecs import NONE
from kvctl.kv.identity import Group
from kvctl.kv.landing import place_fragment
from kvctl.kv.manifest import PackRow
from kvctl.kv.packs import Fragment, PackHeader, decode_fragment, verify_fragment
from kvctl.kv.pieces import STAGED, Piece, Want, longest_of, plan
from kvctl.kv.reading import StoredSession
from kvctl.kv.seams import LayerKv, Layout, Slot
from kvctl.kv.views import TokenView
from kvctl.transfer.tasks import Place, StageClock, Task


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


class _Room:
    """The receiver's memory for one group: its slots by layer, their views (K and V of each in turn)."""

    def __init__(self, group: int, slots: Sequence[tuple[Slot, LayerKv]]) -> None:
        self.group = group
        self.slots = {slot.layer: (slot, kv) for slot, kv in slots}
        self.views = [view for _, kv in slots for view in (kv.k, kv.v)]
        self.layers = tuple(slot.layer for slot, _ in slots)
        self.slot = slots[0][0]  # heads and tokens are those of all


class _Part:
    """A piece of one pack on its way. `parts`: what its steps became, while it is under way."""

    __slots__ = ("header", "key", "parts", "piece", "room", "row", "shifts")

    def __init__(self, row: PackRow, header: PackHeader, piece: Piece, room: _Room, shifts: tuple[int, int]) -> None:
        self.row = row
        self.header = header
        self.piece = piece
        self.room = room
        self.shifts = shifts  # bytes from the layout's first token to the pack's, in a row of keys and of values
        self.key = (row, piece.offset)
        self.parts: list[memoryview | int] = []

    def spread(self) -> list[memoryview | int]:
        views, shifts, piece = self.room.views, self.shifts, self.piece
        if piece.straight is not None and min(shifts) >= 0:  # below 0: the pack begins before the layout does
            moved = {view: views[view][shifts[view & 1] :] for view in set(piece.views)}
            self.parts = [moved[view][place] for view, place in zip(piece.views, piece.slices, strict=True)]
            return self.parts
        self.parts = [
            nbytes if view == STAGED else views[view][at + shifts[view & 1] : at + shifts[view & 1] + nbytes]
            for _, view, at, nbytes in piece.steps
        ]
        return self.parts


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
        self._tokens = layout.tokens
        self._longest = longest_of(layout.nbytes)
        pairs = list(zip(layout.slots, views, strict=True))
        self._rooms = [
            _Room(group, [pair for pair in pairs if pair[0].group == group])
            for group in sorted({slot.group for slot in layout.slots})
        ]
        self._clock = clock
        self._ready = ready
        self._landed: set[tuple[PackRow, int]] = set()
        self._suspect: dict[tuple[PackRow, int], str] = {}
        self._layers = sorted({slot.layer for slot in layout.slots})
        self._left: dict[int, set[tuple[PackRow, int]]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._pieces: list[_Part] = []
        self.packs = 0

    @property
    def needed(self) -> int:
        """Bytes, as stored, that the prefix needs."""
        return sum(part.piece.needed for part in self._pieces)

    def shrink(self, tokens: int) -> None:
        """Fetch no more than the first `tokens` tokens; the layout stays."""
        self._tokens = tokens

    def tasks(self) -> list[Task]:
        """Reads of what has not landed yet. Raises MemberDownError when a pack's members are all down."""
        self._pieces = sorted(
            self._cut(), key=lambda part: (part.piece.layers[0] if self._ready else 0, part.row.first)
        )
        left = [part for part in self._pieces if part.key not in self._landed]
        if self._ready is not None:
            self._left = {layer: set() for layer in self._layers}
            for part in left:
                for layer in part.piece.layers:
                    self._left[layer].add(part.key)
            with self._lock:
                self._hand_over()
        places = {row: self._places(row) for row in {part.row for part in left}}
        return [self._task(part, places[part.row]) for part in left]

    def _cut(self) -> Iterator[_Part]:
        session, size = self._session, self._session.descriptor.block_tokens
        rows: set[PackRow] = set()
        for room in self._rooms:
            slot = room.slot
            recurrent = session.descriptor.groups[room.group].recurrent
            start = self._tokens - 1 if recurrent else slot.start
            for row in session.manifest.packs_of(room.group):
                if row.first >= self._tokens or row.end <= start:
                    continue
                rows.add(row)
                header = session.headers[row]
                begin = row.first // size * size
                # the pack may go on with blocks of another session's chain
                low, high = max(row.first, start) - begin, min(row.end, self._tokens) - begin
                if recurrent:
                    low, high, begin = 0, 1, slot.start
                shift = begin - slot.start
                shifts = (shift * slot.k_row, shift * slot.v_row)
                want = Want(
                    room.layers, slot.first_head, slot.heads, low, high, slot.end - slot.start,
                    self._ready is not None, self._longest,
                )  # fmt: skip
                for piece in plan(header, want):
                    yield _Part(row, header, piece, room, shifts)
        self.packs = len(rows)

    def _places(self, row: PackRow) -> tuple[Place, ...]:
        ref = self._session.ref(row)
        members = self._session.repo.locate(ref.digest)
        places = tuple(Place(member.index, ref.key) for member in members if member.down is None)
        if not places:
            raise MemberDownError(
                f"pack {ref.name} cannot be read: member {members[0].name} is down",
                cause=str(members[0].down),
                hint="bring it back, or see `kvctl repo status`",
            )
        return places

    def _task(self, part: _Part, places: tuple[Place, ...]) -> Task:
        def on_bytes(_: Task, staged: memoryview) -> None:
            self._land(part, staged)

        return Task(
            places,
            part.piece.offset,
            part.piece.length,
            object_size=part.header.pack_size,
            on_bytes=on_bytes,
            priority=part.piece.layers[0] if self._ready else 0,
            spread=part.spread,
            at_once=self._ready is None,  # a receiver that is given layers may take its time
        )

    def _land(self, part: _Part, staged: memoryview) -> None:
        """Verify a range where it landed, and put what was staged where it belongs. On a finisher thread."""
        try:
            with self._clock.timed("verify"):
                self._verify(part, staged)
            if staged:
                with self._clock.timed("copy"):
                    self._copy(part, staged)
        except IntegrityError as error:
            with self._lock:
                self._suspect[part.key] = str(error)
            raise
        part.parts = []
        self._session.keep()
        with self._lock:
            self._suspect.pop(part.key, None)
            self._landed.add(part.key)
            if self._ready is not None:
                for layer in part.piece.layers:
                    self._left[layer].discard(part.key)
                self._hand_over()

    def _verify(self, part: _Part, staged: memoryview) -> None:
        fragments = part.header.fragments
        checksums, digest = fragments.checksums, xxhash.xxh3_64_intdigest
        straight = part.piece.straight
        if straight is not None and [*map(digest, part.parts)] == [*checksums[straight]]:  # type: ignore[arg-type] # views
            return  # without a step of Python for each fragment; what is wrong is found below
        at = 0
        for step, place in zip(part.piece.steps, part.parts, strict=True):
            if isinstance(place, int):
                view, at = staged[at : at + place], at + place
            else:
                view = place
            if step.fragment >= 0 and digest(view) != checksums[step.fragment]:
                verify_fragment(part.header, fragments[step.fragment], view)

    def _hand_over(self) -> None:
        if self._ready is None:
            return
        while self._next < len(self._layers) and not self._left[self._layers[self._next]]:
            self._ready(self._layers[self._next])
            self._next += 1

    def _copy(self, part: _Part, staged: memoryview) -> None:
        header, at = part.header, 0
        for step in part.piece.steps:
            if step.view != STAGED:
                continue
            stored, at = staged[at : at + step.nbytes], at + step.nbytes
            if step.fragment < 0:
                continue
            fragment = header.fragments[step.fragment]
            slot, kv = part.room.slots[fragment.place.layer]
            target = TokenView(
                kv.k if fragment.place.part == "k" else kv.v, slot.start, slot.end - slot.start, slot.first_head
            )
            end = min(part.row.end, self._tokens)
            place_fragment(header, fragment, self._raw(header, fragment, stored), target, end=end)

    def _raw(self, header: PackHeader, fragment: Fragment, stored: memoryview) -> memoryview:
        if fragment.codec == NONE:
            return stored
        raw = self._room_for(fragment.place.raw)
        decode_fragment(header, fragment, stored, raw)
        return raw

    def _room_for(self, nbytes: int) -> memoryview:
        known: memoryview | None = getattr(self._scratch, "view", None)
        if known is None or len(known) < nbytes:
            known = self._scratch.view = memoryview(bytearray(nbytes))
        return known[:nbytes]

    def damaged(self) -> dict[PackRow, str]:
        """After a run that failed: the packs that cannot be read whole from anywhere, and why."""
        found = {row: self._why(row, "damaged", error) for (row, _), error in self._suspect.items()}
        self._suspect.clear()
        for row in {part.row for part in self._pieces if part.key not in self._landed}:
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
