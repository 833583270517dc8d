"""A stored prefix of a transcript, whoever pushed it, copied to another repo as a session of its own: how a cache in
front of a repo takes what was found behind it. Packs travel as they are, verified by digest; only what is missing
moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.kv.access import adopt_key, check_key, secret_of
from kvctl.kv.copying import Copying, CopySession, open_ends
from kvctl.kv.index import Node, PackUse, make_nodes
from kvctl.kv.names import SessionName
from kvctl.kv.prefix import Want, find_prefix, open_prefix
from kvctl.kv.tokens import chain, token_bytes, token_hmac
from kvctl.repo.pushing import Push
from kvctl.repo.repo import Repo
from kvctl.transfer.report import Report
from kvctl.transfer.summary import Stopwatch, cpu_share

PROMOTED: Final = "kvctl-promoted"  # a label; its value is the id of the repo that the copy is of


def prefix_name(secret: bytes, want: Want, tokens: int) -> SessionName:
    """What a session without a name is called: after its tokens. `secret`: of the tenant."""
    return SessionName(want.tenant, f"auto-{token_hmac(secret, want.tokens[:tokens]).hex()[:16]}")


def copy_prefix(
    source: tuple[StoreConfig, ...],
    target: tuple[StoreConfig, ...],
    want: Want,
    ctx: Context,
    admit: Callable[[int, int], bool],
    *,
    max_rate: int | None = None,
) -> Report | None:
    """Copy the longest prefix of what is wanted that `source` has. `admit(bytes, tokens)` is asked before a byte moves.
    None when it said no, or when `target` has as much already. Both repos key their blocks under `want.key`. Raises
    what reading the source and pushing to the target raise; nothing is visible before the manifest.
    """
    watch = Stopwatch()
    with Repo.open(source, ctx) as origin, Repo.open(target, ctx) as taker:
        found = find_prefix(origin, want, ctx)
        check_key(taker, want.key)
        if not found.tokens or find_prefix(taker, want, ctx, above=found.tokens).tokens >= found.tokens:
            return None
        secret = secret_of(origin, want.key, want.tenant)
        want = replace(want, tokens=want.tokens[: found.tokens])
        with open_prefix(origin, want, found, ctx) as session:
            if not admit(sum(ref.size for ref in session.refs), found.tokens):
                return None
            session.read_headers(session.manifest.packs)
            codecs = {next(iter(header.fragments)).codec for header in session.headers.values()}
            session.manifest = replace(session.manifest, codecs=tuple(sorted(codecs)))
            name = prefix_name(secret, want, found.tokens)
            adopt_key(taker, want.key if origin.format.key_id is not None else None, want.tenant)
            report = Report("kv cp", f"{found.tokens} tokens in repo {origin.id[:8]}")
            request = CopySession(source, str(name), target, labels={PROMOTED: origin.id}, max_rate=max_rate)
            with open_ends(request, origin, taker) as ends, Push.begin(taker, f"kv cp {name}", ctx) as push:
                copying = _Promotion(request, session, taker, ends, push, name, secret, None, report, ctx)
                copying.want = want
                try:
                    copying.run(watch)
                finally:
                    copying.close()
    watch.stop(report)
    report.stages["cpu"] = cpu_share(report.cpu_s, report.seconds)
    return report


class _Promotion(Copying):
    """The prefix may end where the source has no index node: the nodes are made from the tokens."""

    want: Want

    def nodes(self, uses: Sequence[PackUse]) -> list[Node]:
        want, descriptor = self.want, self.want.descriptor
        blocks = chain(self.secret, descriptor.digest, want.tokens, descriptor.block_tokens, want.extras)
        return make_nodes(self.secret, blocks, token_bytes(want.tokens), uses, descriptor)
