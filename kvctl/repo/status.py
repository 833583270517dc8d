"""What an operator sees of a repo: members, what is at risk, what cannot be read, how much there is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvctl.repo.layout import MODELS, parse_model_key
from kvctl.repo.marking import Chunk, list_chunks, manifest_refs

if TYPE_CHECKING:
    from kvctl.repo.chunks import ChunkRef
    from kvctl.repo.repo import Repo


@dataclass(slots=True)
class MemberStatus:
    """`objects` and `bytes` are chunks; None when the member is down."""

    id: str
    name: str
    url: str
    up: bool
    reason: str = ""
    objects: int | None = None
    bytes: int | None = None


@dataclass(slots=True)
class StatusResult:
    """`at_risk`: chunks that have a copy, but fewer than `replicas`. `unreadable`: manifests with a chunk that no
    answering member has; `degraded`: those with a chunk at risk.
    """

    id: str
    epoch: int
    phase: str
    replicas: int
    stripe_size: int
    members: list[MemberStatus] = field(default_factory=list)
    manifests: int = 0
    at_risk_chunks: int = 0
    at_risk_bytes: int = 0
    lost_chunks: int = 0
    unreadable: list[str] = field(default_factory=list)
    degraded: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """All members answer, no change of members is under way, every chunk has all of its copies."""
        return all(m.up for m in self.members) and self.phase == "settled" and not self.degraded and not self.unreadable

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": "kvctl.repo-status/1", "healthy": self.healthy, **dataclasses.asdict(self)}


def label_of(key: str) -> str:
    """`NAME@VERSION` for a model's manifest, the key for any other."""
    model = parse_model_key(key)
    return f"{model[0]}@{model[1]}" if model else key


def status(repo: Repo) -> StatusResult:
    """Works with members down; raises MemberDownError when none answers."""
    repo.list_meta(MODELS)  # says so clearly when no member answers
    fmt = repo.format
    result = StatusResult(repo.id, fmt.epoch.number, fmt.phase, fmt.replicas, fmt.stripe_size)
    users = manifest_refs(repo)
    chunks = list_chunks(repo)  # after: what a manifest names was written before it
    for member in repo.members:
        if member.down is not None:
            reason = str(member.down)
            result.members.append(MemberStatus(member.id, member.name, member.config.url, up=False, reason=reason))
            continue
        sizes = [chunk.sizes[member.id] for chunk in chunks.values() if member.id in chunk.sizes]
        result.members.append(
            MemberStatus(member.id, member.name, member.config.url, up=True, objects=len(sizes), bytes=sum(sizes))
        )
    _judge(repo, chunks, users, result)
    return result


def _judge(repo: Repo, chunks: dict[str, Chunk], users: dict[str, list[ChunkRef]], result: StatusResult) -> None:
    at_risk: dict[str, int] = {}
    lost: set[str] = set()
    for key, refs in users.items():
        copies = [_copies(chunks.get(ref.name), ref.size) for ref in refs]
        lost.update(ref.name for ref, count in zip(refs, copies, strict=True) if count == 0)
        short = {ref.name: ref.size for ref, n in zip(refs, copies, strict=True) if 0 < n < repo.format.replicas}
        at_risk.update(short)
        if 0 in copies:
            result.unreadable.append(label_of(key))
        elif short:
            result.degraded.append(label_of(key))
    result.manifests = len(users)
    result.at_risk_chunks, result.at_risk_bytes = len(at_risk), sum(at_risk.values())
    result.lost_chunks = len(lost)


def _copies(chunk: Chunk | None, size: int) -> int:
    return 0 if chunk is None else sum(found == size for found in chunk.sizes.values())


@dataclass(slots=True)
class StatsResult:
    """Bytes. `logical`: what all manifests name, each for itself. `unique`: distinct content of it. `physical`:
    all chunk objects on the members, replicas and garbage included. `garbage`: of those, what no manifest names.
    """

    models: int = 0
    versions: int = 0
    manifests: int = 0
    chunks: int = 0
    objects: int = 0
    logical: int = 0
    unique: int = 0
    physical: int = 0
    garbage: int = 0
    members_down: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": "kvctl.repo-stats/1", **dataclasses.asdict(self)}


def stats(repo: Repo) -> StatsResult:
    """Computed from what is there now; nothing of it is stored anywhere."""
    repo.list_meta(MODELS)
    users = manifest_refs(repo)
    chunks = list_chunks(repo)
    models = [model for key in users if (model := parse_model_key(key))]
    named = {ref.name: ref for refs in users.values() for ref in refs}
    sizes = {ref.digest: ref.size for ref in named.values()}
    return StatsResult(
        models=len({name for name, _ in models}),
        versions=len(models),
        manifests=len(users),
        chunks=len(chunks),
        objects=sum(len(chunk.sizes) for chunk in chunks.values()),
        logical=sum(ref.size for refs in users.values() for ref in refs),
        unique=sum(sizes.values()),
        physical=sum(sum(chunk.sizes.values()) for chunk in chunks.values()),
        garbage=sum(sum(chunk.sizes.values()) for name, chunk in chunks.items() if name not in named),
        members_down=[member.name for member in repo.down],
    )
