"""Where things live: rendezvous hashing over member ids. Pure.

The score of a member for a key is XXH3-64 (seed 0) of `member-id NUL key` in UTF-8; members are tried from the
highest score down, equal scores by id. So a key's places depend on nothing but the ids of the members and the
key: adding or removing a member moves only what it gains or held.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def score(member: str, key: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{member}\0{key}".encode())


def rank(members: Iterable[str], key: str) -> list[str]:
    """All members, best first."""
    return sorted(members, key=lambda member: (-score(member, key), member))


def places(members: Iterable[str], key: str, replicas: int) -> list[str]:
    """The members that hold `key`: `replicas` different ones, or all where there are fewer."""
    return rank(members, key)[:replicas]


def home(members: Iterable[str], key: str) -> str:
    """The member whose conditional put is the commit of metadata key `key`."""
    return min(members, key=lambda member: (-score(member, key), member))
