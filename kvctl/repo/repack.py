"""The seam through which gc lets the owner of a format tend what it stored: packs of which little is still used are
made anew, smaller, and each manifest that names one is replaced by an equivalent one, by compare-and-swap.

The repo knows chunks and manifests only; what a pack is, its owner knows (`kvctl.kv.repacking`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvctl.core.errors import ConflictError, NotFoundError
from kvctl.repo.chunks import ChunkRef
from kvctl.repo.pushing import Push

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo

LIVE_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True)
class RepackResult:
    """`packs` made anew, `freed_bytes` that the old ones took more (freed when gc deletes them), `manifests` replaced;
    `swept`: pointers to chunks that are gone, removed.
    """

    packs: int = 0
    freed_bytes: int = 0
    manifests: int = 0
    swept: int = 0


class Repacker(Protocol):
    """Runs inside gc, before it marks, while gc owns the repo's maintenance. `live_ratio`: packs of which less than
    this share is used are made anew. `keep` is called between steps: it renews gc's lock, and raises when gc must end.
    """

    def __call__(self, repo: Repo, live_ratio: float, keep: Callable[[], None]) -> RepackResult: ...


def replace_manifest(repo: Repo, push: Push, key: str, version: str, data: bytes, kept: Sequence[ChunkRef]) -> bool:
    """Put the equivalent manifest `data` in the place of version `version` of `key`, and end the push. `kept`: its
    chunks that this push did not write. False, and nothing changed, when somebody else replaced or removed it, or one
    of its chunks cannot be relied on.
    """
    if push.adopt(kept) != {ref.name for ref in kept}:
        return False
    with contextlib.suppress(ConflictError, NotFoundError):
        push.commit(key, data, if_absent=False, if_version=version)
        return True
    return False
