"""Who reads what when many agents load the same at once. Pure: names and numbers in, decisions out.

Every run of the load has an order of the agents: the first of them that is alive reads it from the source, the others
take it from whoever has it. First comes each in turn, so that shares are equal; then the others by rendezvous hashing
over run and agent. All agents come to the same order without a word to each other, so each byte is read from the source
once; when one dies, its runs move to the others, evenly, and nothing else does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence


def order(run: int, agents: Sequence[str]) -> list[str]:
    """The agents in the order in which they answer for a run."""
    first = sorted(agents)[run % len(agents)]
    return [first, *sorted(set(agents) - {first}, key=lambda agent: (_score(run, agent), agent))]


def _score(run: int, agent: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{run} {agent}".encode(), digest_size=8).digest(), "big")


class Assignment:
    """The orders of all runs, as one agent (`me`) sees them. `agents` includes `me`."""

    def __init__(self, runs: int, agents: Sequence[str], me: str) -> None:
        self.me = me
        self._orders = [order(run, agents) for run in range(runs)]
        self._preferences: dict[str, list[int]] = {}

    def owner(self, run: int, dead: Collection[str]) -> str:
        """Who reads the run from the source, given who is dead. `me` is always alive."""
        return next(agent for agent in self._orders[run] if agent == self.me or agent not in dead)

    def mine(self, run: int, dead: Collection[str]) -> bool:
        return self.owner(run, dead) == self.me

    def preference(self, peer: str) -> list[int]:
        """All runs in the order in which `me` asks `peer` for them: those for which it is the nearest to answer first,
        and each agent in another order, so that peers are asked for different things.
        """
        if peer not in self._preferences:
            mixed = f"{self.me}<{peer}"
            self._preferences[peer] = sorted(
                range(len(self._orders)), key=lambda run: (self._orders[run].index(peer), _score(run, mixed))
            )
        return self._preferences[peer]
