"""How a byte's way into a checkpoint is charged to the pace. Pure.

The rate is of whole bytes: read, hashed and written. Each step is charged its share, so a run that keeps its rate takes
size / rate, however its steps overlap, and a step alone goes at rate / share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PIECE: Final = 4 << 20  # bytes of one step at most
LEAST_READ: Final = 512 << 10
MOST_READ: Final = 16 << 20
_APART: Final = 0.05  # seconds between two reads of an engine: about a step of it, which waits for one of them then


@dataclass(frozen=True, slots=True)
class Shares:
    """They add up to 1."""

    read: float
    hash: float
    write: float


# As the CPU time of a vLLM here: a read is copied four times on its way out of the engine, and its step waits for the
# first of them; hashing is 0.4 s/GB.
COPIED: Final = Shares(read=0.45, hash=0.15, write=0.4)
MAPPED: Final = Shares(read=0.0, hash=0.25, write=0.75)
PUSHED: Final = Shares(read=0.15, hash=0.15, write=0.7)


def read_piece(rate: float, shares: Shares, trip: float) -> int:
    """Bytes of a read at this rate: each costs the engine something however short, and a long one is felt by itself.
    `trip`: seconds that reads take lately. They wait for the engine's step: where steps are slow, less than what is due
    in one would not keep the rate.
    """
    due = rate / max(shares.read, 0.01) * max(_APART, trip)
    return min(MOST_READ, max(LEAST_READ, int(due) >> 16 << 16))
