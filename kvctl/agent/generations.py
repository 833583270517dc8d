"""What a slot is made of: generations with their files, states and holders. Values, and what may be asked of them."""

from __future__ import annotations

import enum
import re
import time
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.errors import IncompatibleError, UsageError

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
HAVE: Final = ".have"  # the last file of a generation: for each run of its load, the XXH3 of what has landed, or 0
HAVE_ENTRY: Final = 8  # bytes, little endian


class State(enum.Enum):
    LOADING = "loading"
    STAGED = "staged"
    READY = "ready"
    PREVIOUS = "previous"
    DRAINING = "draining"
    FREED = "freed"


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A file of a generation: `size` bytes, of which the first `header` are a safetensors header (0: a side file)."""

    name: str
    size: int
    header: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, or loads: a connection of a process. `label` is what it says it is."""

    ident: int
    pid: int
    label: str = ""


@dataclass(slots=True, eq=False)
class Generation:
    """One set of weights in memory. `ident` is unique in the life of the agent and of any other. `fingerprint` names
    the source and the slice exactly. `handles`: whatever the memory is known by, freed by the owner of the slots.
    """

    slot: str
    number: int
    ident: str
    fingerprint: str
    source: str
    files: tuple[SlotFile, ...]
    loader: Holder | None
    facts: dict[str, object] = field(default_factory=dict)
    state: State = State.LOADING
    leases: dict[int, tuple[Holder, int]] = field(default_factory=dict)  # by holder: how many
    handles: tuple[int, ...] = ()
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    peer_read: float = float("-inf")

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def lease_count(self) -> int:
        return sum(count for _, count in self.leases.values())


@dataclass(frozen=True, slots=True)
class Reserve:
    """What a loader asks for. `swap`: beside the generation that serves (else a slot that holds other weights is
    refused). `evict_first`: free that one before, where both do not fit. `evict`: free other slots that nobody uses,
    the longest unused first.
    """

    slot: str
    fingerprint: str
    source: str
    files: tuple[SlotFile, ...]
    facts: dict[str, object] = field(default_factory=dict)
    swap: bool = False
    evict_first: bool = False
    evict: bool = False


def check_name(name: str) -> None:
    """Raises UsageError for what cannot name a slot."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a slot", hint="letters, digits, '.', '_' and '-', 128 at most")


def check_same_shape(old: dict[str, tuple[str, tuple[int, ...]]], new: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Name -> (dtype, shape). Raises IncompatibleError that names the first difference."""
    if old == new:
        return
    missing, extra = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    if missing or extra:
        what = f"tensor {missing[0]} is missing" if missing else f"tensor {extra[0]} is not in the serving weights"
        cause = f"{len(missing)} missing, {len(extra)} extra"
    else:
        name = next(name for name in sorted(old) if old[name] != new[name])
        what = (
            f"tensor {name} is {new[name][0]} {list(new[name][1])}, the serving one {old[name][0]} {list(old[name][1])}"
        )
        cause = f"{sum(old[n] != new[n] for n in old)} tensors differ"
    raise IncompatibleError(
        f"the new weights do not fit the slot: {what}", cause=cause, hint="load them into a slot of their own"
    )
