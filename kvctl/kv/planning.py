"""`kv push --dry-run`: how much of a session is stored already, and what a push would write. Writes nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvctl.core.context import Context
from kvctl.kv.access import check_key
from kvctl.kv.geometry import cache_bytes
from kvctl.kv.index import Finder
from kvctl.kv.push import PushSession, named
from kvctl.kv.sessions import highest
from kvctl.kv.tokens import chain, domain_secret, token_bytes
from kvctl.repo.repo import Repo


@dataclass(frozen=True, slots=True)
class PushPlan:
    """`tokens_shared`: of the longest stored prefix. Bytes of KV, once, before any codec; a push may write a little
    more, as it writes whole blocks.
    """

    session: str
    generation: int
    ns: str
    tokens: int
    tokens_shared: int
    bytes: int
    new_bytes: int
    index_requests: int

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": "kvctl.kv-push-plan/1", **dataclasses.asdict(self)}


def plan_push(request: PushSession, ctx: Context) -> PushPlan:
    """Raises what opening the repo raises, and ConfigError or IncompatibleError for the wrong key."""
    session = named(request.address)
    meaning, tokens = request.source.descriptor, request.source.tokens
    with Repo.open(request.repo, ctx) as repo:
        check_key(repo, request.key)
        secret = domain_secret(request.key, session.tenant)
        blocks = chain(secret, meaning.digest, tokens, meaning.block_tokens, request.source.extras)
        stored = Finder(repo, secret, blocks, token_bytes(tokens), meaning).find()
        generation = highest(repo, session) + 1
    whole = cache_bytes(meaning.groups, meaning.dtype, len(tokens))
    shared = cache_bytes(meaning.groups, meaning.dtype, stored.tokens) if stored.tokens else 0
    return PushPlan(
        str(session),
        generation,
        meaning.digest,
        len(tokens),
        stored.tokens,
        whole,
        max(0, whole - shared),
        stored.requests,
    )
