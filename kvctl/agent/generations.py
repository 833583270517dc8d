"""What a slot is made of: generations with their files, states and holders. Values, and what may be asked of them."""

from __future__ import annotations

import enum
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvctl.core.errors import IncompatibleError, UsageError

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
HAVE: Final = ".have"  # the last file of a generation: for each run of its load, the XXH3 of what has landed, or 0
HAVE_ENTRY: Final = 8  # bytes, little endian
HOST: Final = "cpu"


class State(enum.Enum):
    LOADING = "loading"
    STAGED = "staged"
    READY = "ready"
    PREVIOUS = "previous"
    DRAINING = "draining"
    FREED = "freed"


@dataclass(frozen=True, slots=True)
class Space:
    """`nbytes` of the device `ident` (`kvctl.memory.shareable`), where a file's data section begins at `start`."""

    ident: str
    nbytes: int
    start: int


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A file of a generation: `size` bytes, of which the first `header` are a safetensors header (0: a side file).
    `space`: where its data section is, if that is on a device.
    """

    name: str
    size: int
    header: int = 0
    space: Space | None = None

    @property
    def host_bytes(self) -> int:
        return self.size if self.space is None else self.header

    @property
    def nbytes(self) -> int:
        """What it takes, wherever."""
        return self.host_bytes + (self.space.nbytes if self.space is not None else 0)

    def to_json(self) -> list[object]:
        """As messages have it."""
        space = self.space
        return [self.name, self.size, self.header, None if space is None else [space.ident, space.nbytes, space.start]]

    @classmethod
    def from_json(cls, item: Sequence[Any]) -> SlotFile:  # Any: JSON
        """The inverse. Raises ValueError and TypeError for nonsense."""
        name, size, header, *rest = item
        found = cls(str(name), int(size), int(header))
        if not rest or rest[0] is None:
            return found
        ident, nbytes, start = rest[0]
        space = Space(str(ident), int(nbytes), int(start))
        if not 0 < found.header <= found.size or not 0 <= space.start <= space.nbytes - (found.size - found.header):
            raise ValueError(f"{space} has no room for {found}")
        return replace(found, space=space)


def needs(files: Iterable[SlotFile]) -> Counter[str]:
    """Bytes by place: host memory, and the devices by ident."""
    found: Counter[str] = Counter()
    for file in files:
        found[HOST] += file.host_bytes
        if file.space is not None:
            found[file.space.ident] += file.space.nbytes
    return found


def devices_of(files: Iterable[SlotFile]) -> tuple[str, ...]:
    """The idents of the devices that the files are on; none: host memory."""
    return tuple(dict.fromkeys(file.space.ident for file in files if file.space is not None))


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, or loads: a connection of a process. `label` is what it says it is."""

    ident: int
    pid: int
    label: str = ""


@dataclass(slots=True, eq=False)
class Generation:
    """One set of weights in memory. `ident` is unique in the life of the agent and of any other. `fingerprint` names
    the source and the slice exactly. `handles`: whatever the memory is known by, freed by the owner of the slots: one
    for each file, then one for each space.
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
        return sum(file.nbytes for file in self.files)

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
