"""The slots' rules, driven at random: bytes are counted exactly, nothing leased is freed, nothing is freed twice."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvctl.agent.generations import Generation, Holder, Reserve, SlotFile, Space, State, check_name, check_same_shape
from kvctl.agent.slots import DeviceBudget, Slots
from kvctl.core.errors import ConflictError, IncompatibleError, KvctlError, NotFoundError, UsageError

NAMES = st.sampled_from(["a", "b"])
HOLDERS = st.integers(1, 4).map(lambda number: Holder(number, 1000 + number))
BUDGET = 100


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.freed: list[str] = []
        self.now = 0.0
        devices = {"GPU-1": DeviceBudget("cuda:0", BUDGET)}
        self.slots = Slots(BUDGET, self.free, devices=devices, clock=lambda: self.now, linger=5.0)
        self.made: list[tuple[Generation, Holder]] = []
        self.leases: list[tuple[Generation, Holder]] = []

    def free(self, item: Generation) -> None:
        assert not item.leases
        assert item.ident not in self.freed
        self.freed.append(item.ident)

    @rule(name=NAMES, size=st.integers(0, 60), print_=st.integers(0, 3), holder=HOLDERS, swap=st.booleans(),
          first=st.booleans(), evict=st.booleans(), there=st.booleans())  # fmt: skip
    def reserve(
        self, name: str, size: int, print_: int, holder: Holder, swap: bool, first: bool, evict: bool, there: bool
    ) -> None:
        """`there`: all but a header of one byte is on a device."""
        file = SlotFile("f", size + 1, 1, Space("GPU-1", size, 0)) if there else SlotFile("f", size)
        ask = Reserve(name, str(print_), "s", (file,), {}, swap, first, evict)
        with contextlib.suppress(KvctlError):
            made = self.slots.reserve(ask, holder)
            if made is not None:
                self.made.append((made, holder))

    @rule(keep=st.booleans(), fail=st.booleans())
    def finish(self, keep: bool, fail: bool) -> None:
        if not self.made:
            return
        item, _ = self.made.pop()
        if fail:
            self.slots.abandon(item)
            return
        if item.state is State.LOADING:
            self.slots.stage(item)
            self.slots.commit(item, keep_previous=keep)
            assert self.slots.find(item.slot) is item

    @rule(name=NAMES, holder=HOLDERS)
    def acquire(self, name: str, holder: Holder) -> None:
        with contextlib.suppress(KvctlError):
            self.leases.append((self.slots.acquire(name, holder), holder))

    @rule()
    def release(self) -> None:
        if self.leases:
            item, holder = self.leases.pop()
            self.slots.release(holder, item)

    @rule(holder=HOLDERS)
    def die(self, holder: Holder) -> None:
        self.slots.release(holder)
        self.leases = [entry for entry in self.leases if entry[1] != holder]
        self.made = [entry for entry in self.made if entry[1] != holder]

    @rule(name=NAMES)
    def rollback(self, name: str) -> None:
        with contextlib.suppress(KvctlError):
            before = self.slots.find(name)
            assert self.slots.rollback(name) is not before

    @rule(name=NAMES, previous=st.booleans())
    def unload(self, name: str, previous: bool) -> None:
        with contextlib.suppress(KvctlError):
            self.slots.unload(name, previous_only=previous)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.slots.sweep()

    @invariant()
    def bytes_are_within_the_budget(self) -> None:
        assert self.slots.used_bytes <= BUDGET
        assert self.slots.used()["GPU-1"] <= BUDGET
        assert self.slots.used().total() == sum(item.nbytes for item in self.slots.generations())

    @invariant()
    def what_is_leased_is_there(self) -> None:
        alive = {item.ident for item in self.slots.generations()}
        assert all(item.ident in alive for item, _ in self.leases)
        assert not alive & set(self.freed)

    @invariant()
    def one_generation_serves(self) -> None:
        for name in ("a", "b"):
            ready = [g for g in self.slots.generations() if g.slot == name and g.state is State.READY]
            assert len(ready) <= 1

    def teardown(self) -> None:
        for number in range(1, 5):
            self.slots.release(Holder(number, 0))
        for name in ("a", "b"):
            with contextlib.suppress(KvctlError):
                self.slots.unload(name)
        self.now += 10
        self.slots.sweep()
        assert self.slots.used_bytes == 0


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_generation_that_a_peer_has_just_read_outlives_its_swap_for_a_moment() -> None:
    now = [0.0]
    freed: list[str] = []
    slots = Slots(100, lambda item: freed.append(item.ident), clock=lambda: now[0], linger=5.0)
    holder = Holder(1, 1)
    for number in ("1", "2"):
        made = slots.reserve(Reserve("s", number, "", (SlotFile("f", 10),), swap=number == "2"), holder)
        assert made is not None
        if number == "2":
            slots.find("s").peer_read = now[0]
        slots.stage(made)
        slots.commit(made)
    assert freed == []
    now[0] = 6.0
    slots.sweep()
    assert len(freed) == 1


@pytest.mark.parametrize("name", ["", "-x", "a/b", "..", "a b", "x" * 200, ".x"])
def test_names_that_no_slot_can_have_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"a": ("F32", (2,))}, "tensor b is missing"),
        ({"a": ("F32", (2,)), "b": ("F32", (3,)), "c": ("F32", ())}, "tensor c is not in the serving weights"),
        ({"a": ("F32", (2,)), "b": ("BF16", (3,))}, r"tensor b is BF16 \[3\], the serving one F32 \[3\]"),
    ],
)
def test_other_shapes_are_named(new: dict[str, tuple[str, tuple[int, ...]]], words: str) -> None:
    with pytest.raises(IncompatibleError, match=words):
        check_same_shape({"a": ("F32", (2,)), "b": ("F32", (3,))}, new)


def test_a_slot_that_has_nothing_to_free_says_so() -> None:
    slots = Slots(BUDGET, lambda _: None)
    holder = Holder(1, 4711)
    made = slots.reserve(Reserve("a", "1", "s", (SlotFile("f", 5),), {}, False, False, False), holder)
    assert made is not None
    for force in (False, True):
        with pytest.raises(ConflictError, match="is being loaded") as caught:
            slots.unload("a", force=force)
        assert "4711" in (caught.value.cause or "")
    slots.stage(made)
    slots.commit(made)
    with pytest.raises(NotFoundError, match="no previous generation"):
        slots.unload("a", previous_only=True)
    assert slots.unload("a") == 5
