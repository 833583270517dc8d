"""Slots: who holds which memory. A slot has a current generation, maybe the one before it and one being loaded;
readers hold leases on a generation, and what nobody needs any more is freed. Knows no socket and no memfd.

    LOADING -> STAGED (sealed, can be read by name) -> READY (current) -> PREVIOUS (kept for a rollback)
    -> DRAINING (freed with its last lease) -> FREED

Every byte of every generation that is not freed counts against the budget of host memory, or of the device that it is
on, before it is allocated.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvctl.agent.generations import (
    HOST,
    Generation,
    Holder,
    Reserve,
    SlotFile,
    State,
    check_name,
    devices_of,
    needs,
)
from kvctl.agent.memory import dup_all
from kvctl.core.errors import CapacityError, ConflictError, NotFoundError, UsageError
from kvctl.core.units import format_size

LINGER: Final = 5.0  # seconds that a generation outlives the last read of a peer, which holds no lease


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Bytes of a device that slots may take. `name`: what the device is called here."""

    name: str
    nbytes: int


@dataclass(slots=True)
class _Slot:
    name: str
    current: Generation | None = None
    previous: Generation | None = None
    loading: Generation | None = None
    draining: list[Generation] = field(default_factory=list)

    def all(self) -> Iterator[Generation]:
        yield from (item for item in (self.current, self.previous, self.loading) if item is not None)
        yield from self.draining


class Slots:
    """Thread-safe. `budget`: bytes of host memory; `devices`: those of devices, by ident. `free(generation)` gives its
    memory back; called once for each, under the lock. `clock`: monotonic seconds. `available()`: bytes of host memory
    that the machine still has.
    """

    def __init__(
        self,
        budget: int,
        free: Callable[[Generation], None],
        *,
        devices: Mapping[str, DeviceBudget] | None = None,
        available: Callable[[], int] = lambda: 1 << 62,
        clock: Callable[[], float] = time.monotonic,
        linger: float = LINGER,
    ) -> None:
        self.budget = budget
        self.devices = dict(devices or {})
        self._free = free
        self._available = available
        self._clock = clock
        self._linger = linger
        self._slots: dict[str, _Slot] = {}
        self._numbers: dict[str, int] = {}  # of generations so far, also of slots that are gone
        self.lock = threading.RLock()  # hold it to look at handles: they are not closed meanwhile

    # -- loading -------------------------------------------------------------------------------------------

    def reserve(self, ask: Reserve, holder: Holder) -> Generation | None:
        """A generation to fill; None when the slot serves exactly this already. Raises UsageError, ConflictError (it is
        being loaded), CapacityError (refused before the first byte).
        """
        check_name(ask.slot)
        with self.lock:
            slot = self._slots.get(ask.slot)
            if slot is not None and slot.loading is not None:
                loader = slot.loading.loader
                raise ConflictError(
                    f"slot {ask.slot} is being loaded",
                    cause=f"by process {loader.pid}" if loader else None,
                    hint="wait for it, or end it",
                )
            current = slot.current if slot is not None else None
            same = current is not None and current.fingerprint == ask.fingerprint
            if current is not None and (same or ask.swap) and devices_of(current.files) != devices_of(ask.files):
                raise UsageError(
                    f"slot {ask.slot} is on {self.where(current.files)}, not on {self.where(ask.files)}",
                    hint=f"load into another slot, or `kvctl agent unload {ask.slot}` first",
                )
            if same:
                return None
            if current is not None and not ask.swap:
                raise UsageError(
                    f"slot {ask.slot} holds other weights ({current.source})",
                    hint=f"replace them with `kvctl swap slot:{ask.slot}`, or `kvctl agent unload {ask.slot}` first",
                )
            if current is None and ask.swap:
                raise NotFoundError(f"slot {ask.slot} holds nothing to swap", hint=f"load it: --into slot:{ask.slot}")
            self._make_room(ask)
            slot = self._slots.setdefault(ask.slot, _Slot(ask.slot))
            number = self._numbers[ask.slot] = self._numbers.get(ask.slot, 0) + 1
            made = Generation(
                ask.slot, number, f"g{number}-{secrets.token_hex(6)}", ask.fingerprint, ask.source,
                ask.files, holder, dict(ask.facts), used=self._clock(),
            )  # fmt: skip
            slot.loading = made
            return made

    def stage(self, made: Generation) -> None:
        """Its bytes are there and can change no more; it serves only those who ask for it by name."""
        with self.lock:
            self._loading(made)
            made.state = State.STAGED

    def _loading(self, made: Generation) -> _Slot:
        slot = self._slots.get(made.slot)
        if slot is None or slot.loading is not made:
            raise ConflictError(f"generation {made.ident} of slot {made.slot} is not being loaded")
        return slot

    def commit(self, made: Generation, *, keep_previous: bool = False) -> None:
        """It serves from now on. The one before is kept, or freed with its last lease."""
        with self.lock:
            slot = self._loading(made)
            if made.state is not State.STAGED:
                raise ConflictError(f"generation {made.ident} of slot {made.slot} is not complete")
            slot.loading = None
            made.loader = None
            made.state = State.READY
            before, slot.current = slot.current, made
            if before is not None:
                if slot.previous is not None:
                    self._drain(slot, slot.previous)
                slot.previous = None
                if keep_previous:
                    before.state = State.PREVIOUS
                    slot.previous = before
                else:
                    self._drain(slot, before)
            self.sweep()

    def abandon(self, made: Generation) -> None:
        """Its loader failed or died: what landed is freed."""
        with self.lock:
            slot = self._slots.get(made.slot)
            if slot is None or slot.loading is not made:
                return
            slot.loading = None
            self._drain(slot, made)
            self.sweep()

    def rollback(self, name: str) -> Generation:
        """The kept generation serves again, and the one that served is kept. Raises NotFoundError."""
        with self.lock:
            slot = self._known(name)
            if slot.previous is None or slot.current is None:
                raise NotFoundError(
                    f"slot {name} has no generation to go back to", hint="a swap keeps one with --keep-previous"
                )
            slot.current, slot.previous = slot.previous, slot.current
            slot.current.state, slot.previous.state = State.READY, State.PREVIOUS
            return slot.current

    def unload(self, name: str, *, force: bool = False, previous_only: bool = False) -> int:
        """Free the slot, bytes. Raises NotFoundError, ConflictError while it is loaded for the first time, or while
        somebody uses it, unless `force`: then what is mapped lives on in its users only.
        """
        with self.lock:
            slot = self._known(name)
            wanted = [item for item in (None if previous_only else slot.current, slot.previous) if item is not None]
            if not wanted and previous_only:
                raise NotFoundError(f"slot {name} keeps no previous generation", hint="see `kvctl agent ls`")
            if not wanted and slot.loading is not None:
                loader = slot.loading.loader
                raise ConflictError(
                    f"slot {name} is being loaded",
                    cause=f"by process {loader.pid}" if loader else None,
                    hint="end that process: what landed is freed with it",
                )
            held = [holder for item in wanted for holder, _ in item.leases.values()]
            if held and not force:
                raise ConflictError(
                    f"slot {name} is in use",
                    cause=", ".join(f"{holder.label or 'process'} {holder.pid}" for holder in held),
                    hint="end its users, or --force: what they have mapped stays theirs",
                )
            freed = sum(item.nbytes for item in wanted)
            for item in wanted:
                if force:
                    item.leases.clear()
                self._drain(slot, item)
            slot.previous = None
            if not previous_only:
                slot.current = None
            self.sweep(at_once=True)
            return freed

    # -- leases --------------------------------------------------------------------------------------------

    def acquire(self, name: str, holder: Holder, ident: str | None = None) -> Generation:
        """A lease on the current generation, or on the one called `ident`. Raises NotFoundError."""
        with self.lock:
            slot = self._known(name)
            found = slot.current
            if ident is not None:
                found = next((g for g in slot.all() if g.ident == ident and g.state is not State.LOADING), None)
            if found is None:
                raise NotFoundError(
                    f"slot {name} has no generation {ident}" if ident else f"slot {name} is still being loaded",
                    hint="see `kvctl agent ls`",
                )
            _, count = found.leases.get(holder.ident, (holder, 0))
            found.leases[holder.ident] = (holder, count + 1)
            found.used = self._clock()
            return found

    def release(self, holder: Holder, generation: Generation | None = None) -> None:
        """Give up one lease, or, when the holder is gone, all that it has; and what it was loading."""
        with self.lock:
            for slot in list(self._slots.values()):
                for item in list(slot.all()):
                    if generation is None:
                        item.leases.pop(holder.ident, None)
                        if item.loader is not None and item.loader.ident == holder.ident:
                            self.abandon(item)
                    elif item is generation and holder.ident in item.leases:
                        _, count = item.leases[holder.ident]
                        if count > 1:
                            item.leases[holder.ident] = (holder, count - 1)
                        else:
                            del item.leases[holder.ident]
            self.sweep()

    def acquire_fds(self, name: str, holder: Holder, ident: str | None = None) -> tuple[Generation, list[int]]:
        """A lease, and descriptors of our own of the generation's files, which the caller closes."""
        with self.lock:
            found = self.acquire(name, holder, ident)
            return found, dup_all(found.handles)

    # -- looking -------------------------------------------------------------------------------------------

    def find(self, name: str, ident: str | None = None) -> Generation:
        """The current generation, or the one called `ident` (by a peer that reads it), also one being loaded.
        Raises NotFoundError.
        """
        with self.lock:
            slot = self._known(name)
            for item in slot.all():
                if item is slot.current if ident is None else ident in {item.ident, item.fingerprint}:
                    return item
            raise NotFoundError(f"slot {name} has no such generation", hint="see `kvctl agent ls`")

    def lend(self, name: str, ident: str | None, file: str) -> tuple[Generation, int, SlotFile]:
        """A descriptor of one file of what `find` finds, for a peer, who holds no lease; the caller closes it.
        Raises NotFoundError.
        """
        with self.lock:
            found = self.find(name, ident)
            for known, fd in zip(found.files, found.handles, strict=False):
                if known.name == file and known.space is None:
                    found.peer_read = found.used = self._clock()
                    return found, os.dup(fd), known
        raise NotFoundError(f"slot {name} has no file {file}")

    def check_known(self, name: str) -> None:
        """Raises NotFoundError when no slot has this name."""
        with self.lock:
            self._known(name)

    @property
    def used_bytes(self) -> int:
        """Of host memory."""
        return self.used()[HOST]

    def used(self) -> Counter[str]:
        """Bytes by place: host memory, and the devices by ident."""
        with self.lock:
            return needs(file for item in self.generations() for file in item.files)

    def where(self, files: Sequence[SlotFile]) -> str:
        """'cpu', or the name of the device that files are on, of several 'cuda:A-B'."""
        names = [self.devices[ident].name if ident in self.devices else ident for ident in devices_of(files)]
        if not names:
            return HOST
        return names[0] if len(names) == 1 else f"{names[0]}-{names[-1].rpartition(':')[2]}"

    def generations(self) -> Sequence[Generation]:
        """All that is not freed, by slot and number."""
        with self.lock:
            found = [item for slot in self._slots.values() for item in slot.all()]
        return sorted(found, key=lambda item: (item.slot, item.number))

    # -- freeing -------------------------------------------------------------------------------------------

    def sweep(self, *, at_once: bool = False) -> None:
        """Free what drains and has no lease left; what peers have just read waits a little, unless `at_once`."""
        with self.lock:
            now = self._clock()
            for slot in list(self._slots.values()):
                for item in list(slot.draining):
                    if not item.leases and (at_once or now - item.peer_read >= self._linger):
                        slot.draining.remove(item)
                        item.state = State.FREED
                        self._free(item)
                if next(slot.all(), None) is None:
                    del self._slots[slot.name]

    def _drain(self, slot: _Slot, item: Generation) -> None:
        item.state = State.DRAINING
        slot.draining.append(item)

    def _known(self, name: str) -> _Slot:
        slot = self._slots.get(name)
        if slot is None:
            known = ", ".join(sorted(self._slots)) or "none"
            raise NotFoundError(f"no slot is called {name}", cause=f"slots here: {known}")
        return slot

    def _make_room(self, ask: Reserve) -> None:
        self.sweep()
        wanted = needs(ask.files)
        lacking = self._lacking(wanted)
        if not lacking:
            return
        slot = self._slots.get(ask.slot)
        if ask.evict_first and slot is not None:
            held = [item for item in (slot.current, slot.previous) if item is not None and item.leases]
            if held:
                holders = [f"{holder.label or 'process'} {holder.pid}" for holder, _ in held[0].leases.values()]
                raise ConflictError(
                    f"slot {ask.slot} is in use, so it cannot be freed first", cause=", ".join(holders),
                    hint="end its users, or raise the agent's --memory",
                )  # fmt: skip
            self._check_most(ask, wanted, {ask.slot})
            self.unload(ask.slot)
            lacking = self._lacking(wanted)
        if ask.evict:
            for item in sorted(self.generations(), key=lambda found: found.used):
                if not lacking:
                    break
                helps = any(needs(item.files)[place] for place in lacking)
                if item.slot != ask.slot and item.state is State.READY and not item.leases and helps:
                    self.unload(item.slot)
                    lacking = self._lacking(wanted)
        if lacking:
            raise self._full(ask, wanted, lacking[0])

    def _budget(self, place: str) -> int:
        if place == HOST:
            return self.budget
        return self.devices[place].nbytes if place in self.devices else 0

    def _lacking(self, wanted: Mapping[str, int]) -> list[str]:
        """The places where it does not fit."""
        used = self.used()
        found = [place for place, nbytes in wanted.items() if used[place] + nbytes > self._budget(place)]
        if HOST not in found and wanted[HOST] > self._available():
            found.append(HOST)
        return found

    def _check_most(self, ask: Reserve, wanted: Mapping[str, int], gone: set[str]) -> None:
        """Nothing is freed for what does not fit even then."""
        stays = [i for i in self.generations() if i.slot not in gone or i.state is State.DRAINING]
        left = needs(file for item in stays for file in item.files)
        for place, nbytes in wanted.items():
            if left[place] + nbytes > self._budget(place):
                raise self._full(ask, wanted, place)

    def _full(self, ask: Reserve, wanted: Mapping[str, int], place: str) -> CapacityError:
        needed, used, budget = wanted[place], self.used()[place], self._budget(place)
        details: dict[str, object] = {"needed": needed, "used": used, "budget": budget}
        cause = f"it needs {format_size(needed)}, {format_size(used)} of {format_size(budget)} are taken"
        what, more = "the agent's memory", "raise the agent's --memory"
        if place == HOST:
            details["available"] = available = self._available()
            if needed > available:
                cause = f"it needs {format_size(needed)}, the machine has {format_size(available)} left"
        else:
            name = self.devices[place].name if place in self.devices else place
            details["device"] = name
            what, more = f"the agent's memory of {name}", "raise its --device-memory"
            if place not in self.devices:
                cause, more = "it has none of that device", "start it with --device-memory DEVICE=SIZE"
        hint = more if not budget else f"unload a slot, --evict frees what nobody uses, or {more}"
        return CapacityError(
            f"slot {ask.slot} does not fit into {what}",
            cause=cause,
            hint=f"--evict-first frees the serving generation before; or {hint}" if ask.swap else hint,
            details=details,
        )
