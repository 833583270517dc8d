"""From what a storage node or the way to it says to kvctl's errors. Pure. No secret gets into a message."""

from __future__ import annotations

import json
from typing import Final

from kvctl.core.errors import AuthError, KvctlError
from kvctl.transports.http.errors import Doing, Refusal, Wording

__all__ = ["Doing", "from_connection", "from_status", "parse_error_body"]

_KEY_HINT: Final = "name the key that `kvctl node token` made with key_file=FILE (or KVCTL_NODE_KEY_FILE)"
_WORDING: Final = Wording(
    server="the node",
    busy="the node is busy",
    denied="the right to {} here is missing",
    slower="lower the number of connections, or raise its limit",
    full="free space on the node",
    strange="is there a storage node?",
    tls="name the node's CA with ca_bundle=FILE, or check whether it was started with --tls-cert",
)


def parse_error_body(body: bytes) -> tuple[str, str]:
    """(code, message); empty where the body is something else."""
    try:
        found = json.loads(body)
    except ValueError:
        return "", ""
    if not isinstance(found, dict):
        return "", ""
    return str(found.get("code", ""))[:100], str(found.get("message", ""))[:500]


def from_status(
    where: str,
    key: str,
    status: int,
    code: str = "",
    message: str = "",
    *,
    doing: Doing = "read",
    object_size: int | None = None,
    actual_size: int | None = None,
) -> KvctlError:
    """The error for an answer of the node. `where` is the store's URL; the sizes are what was expected and what the
    node has.
    """
    refusal = Refusal(where, key, status, code, message, doing, object_size, actual_size)
    name = refusal.name
    if code in {"token_expired", "token_too_long"}:
        return refusal.error(AuthError, f"{name}: this host's clock and the node's disagree", "set the clocks (NTP)")
    if code == "token_missing":
        return refusal.error(AuthError, f"{name}: the node wants a token", _KEY_HINT)
    if code == "token_replayed":
        hint = "somebody repeats requests: use TLS"
        return refusal.error(AuthError, f"{name}: the node has seen this request before", hint)
    if code == "key_unknown":
        return refusal.error(AuthError, f"{name}: the key is not of this node", _KEY_HINT)
    if code == "scope":
        return refusal.error(AuthError, f"{name}: the key does not allow to {doing} here", _KEY_HINT)
    return _WORDING.from_status(refusal, status)


def from_connection(endpoint: str, problem: Exception, *, doing: str) -> KvctlError:
    """The error for a connection that cannot be made, broke, or went silent."""
    return _WORDING.from_connection(endpoint, problem, doing=doing)
