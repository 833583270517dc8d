"""Who may do what: tokens, scopes, networks that need none, and the memory of nonces. No I/O."""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kvctl.node.messages import HttpError
from kvctl.node.settings import Network, contains
from kvctl.transports.node_auth import MAX_LIFE, Asked, MasterKey, Rights, Token, covers, parse_token, token_mac

_CHALLENGE: Final = {"www-authenticate": "kvctl-token"}


class Guard:
    """Belongs to the event loop's thread. `started`: Unix seconds; single-use tokens issued before it are refused,
    as their nonces may have been seen by an earlier process of this node.
    """

    def __init__(
        self, keys: Sequence[MasterKey], open_to: Sequence[Network], *, nonces: int, started: float | None = None
    ) -> None:
        self._keys = {key.key_id: key for key in keys}
        self._open_to = tuple(open_to)
        self._limit = nonces
        self._started = time.time() if started is None else started
        # by the minute in which the token expires: then all of them can be forgotten
        self._seen: dict[int, set[str]] = {}
        self._kept = 0
        self._minute = 0
        self._derive = lru_cache(maxsize=1024)(self._derived)
        self._is_open_to = lru_cache(maxsize=1024)(lambda peer: contains(self._open_to, peer))

    def check(self, asked: Asked, peer: str, token: str, *, need: Rights, key: str, folder: bool, once: bool) -> None:
        """Returns when `peer` may do this. `key`: what is touched; with `folder` everything that starts with it.
        `once`: the token must not have been used before. Raises HttpError 401, 403 or 503.
        """
        found = self.allow(asked, peer, token, need=need, key=key, folder=folder)
        if once:
            self.use(found)

    def allow(self, asked: Asked, peer: str, token: str, *, need: Rights, key: str, folder: bool) -> Token | None:
        """As `check`, but for the single use: the token, None for a peer that needs none. Raises HttpError 401, 403."""
        if not token:
            if self._is_open_to(peer):
                return None
            raise HttpError(401, "token_missing", "this node wants a token", headers=_CHALLENGE)
        found = parse_token(token)
        if found is None:
            raise HttpError(401, "token_malformed", "not a token of this version", headers=_CHALLENGE)
        if found.key_id not in self._keys:
            raise HttpError(401, "key_unknown", f"this node has no key {found.key_id}", headers=_CHALLENGE)
        secret = self._derive(found.key_id, found.rights, found.prefix)
        if not hmac.compare_digest(found.mac, token_mac(secret, asked, found.expiry, found.nonce)):
            raise HttpError(401, "token_forged", "the token is not for this request", headers=_CHALLENGE)
        now = time.time()
        if found.expiry <= now:
            late = f"the token expired {now - found.expiry:.0f} s ago by this node's clock"
            raise HttpError(401, "token_expired", late, headers=_CHALLENGE)
        if found.expiry > now + MAX_LIFE:
            ahead = f"the token is good for {found.expiry - now:.0f} s by this node's clock, at most {MAX_LIFE} are"
            raise HttpError(401, "token_too_long", ahead, headers=_CHALLENGE)
        if need == "rw" and found.rights != "rw":
            raise HttpError(403, "scope", "the key is read-only")
        inside = key.startswith(f"{found.prefix}/") if folder and found.prefix else covers(found.prefix, key)
        if not inside:
            raise HttpError(403, "scope", f"the key is good for {found.prefix}/ only")
        return found

    def use(self, token: Token | None) -> None:
        """The one use of a token that `allow` gave. Raises HttpError 401 or 503."""
        if token is None:
            return
        minute = token.expiry // 60
        if token.nonce in self._seen.get(minute, ()):
            raise HttpError(401, "token_replayed", "the token was used before", headers=_CHALLENGE)
        if token.issued < self._started:
            raise HttpError(
                503, "restarted", "the token is older than this process of the node", headers={"retry-after": "1"}
            )
        now = int(time.time()) // 60
        if now > self._minute:
            self._minute = now
            for past in [known for known in self._seen if known < now]:
                self._kept -= len(self._seen.pop(past))
        if minute < self._minute:  # the clock was set back: what was used then has been forgotten
            raise HttpError(401, "token_expired", "the token has expired before", headers=_CHALLENGE)
        if self._kept >= self._limit:
            raise HttpError(503, "busy", "too many tokens in use", headers={"retry-after": "1"})
        self._seen.setdefault(minute, set()).add(token.nonce)
        self._kept += 1

    def _derived(self, key_id: str, rights: Rights, prefix: str) -> bytes:
        return self._keys[key_id].scoped(rights, prefix).secret
