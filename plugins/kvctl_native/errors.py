"""From what a storage node or the way to it says to kvctl's errors. Pure. No secret gets into a message."""

from __future__ import annotations

import json
import ssl
from typing import Literal

from kvctl.core.errors import (
    AuthError,
    CapacityError,
    ConflictError,
    EnvError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    NotFoundError,
    SizeMismatchError,
    ThrottledError,
    TransientError,
    UsageError,
    VersionChangedError,
)

Doing = Literal["read", "write", "delete", "list"]

_KEY_HINT = "name the key that `kvctl node token` made with key_file=FILE (or KVCTL_NODE_KEY_FILE)"


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
    name = f"{where}: {key}" if key else where
    said = " ".join(part for part in (f"HTTP {status}", code) if part)
    cause = f"{said}: {message}" if message else said
    details: dict[str, object] = {"key": key, "status": status, "code": code}

    def make(kind: type[KvctlError], what: str, hint: str | None = None) -> KvctlError:
        return kind(what, cause=cause, hint=hint, details=details)

    if code in {"token_expired", "token_too_long"}:
        return make(AuthError, f"{name}: this host's clock and the node's disagree", "set the clocks (NTP)")
    if code == "token_missing":
        return make(AuthError, f"{name}: the node wants a token", _KEY_HINT)
    if code == "token_replayed":
        return make(AuthError, f"{name}: the node has seen this request before", "somebody repeats requests: use TLS")
    if code == "key_unknown":
        return make(AuthError, f"{name}: the key is not of this node", _KEY_HINT)
    if code == "scope":
        return make(AuthError, f"{name}: the key does not allow to {doing} here", _KEY_HINT)
    if status in {401, 403}:
        return make(AuthError, f"{name}: access denied", f"the right to {doing} here is missing")
    if status == 404:
        return make(NotFoundError, f"{name}: no such object", "check the address, and that the upload is finished")
    if status == 412:
        if doing == "read":
            return make(VersionChangedError, f"{name} changed while loading", "run it again to load the new version")
        return make(ConflictError, f"{name}: another writer was first")
    if status == 416:
        sizes = f": it has {actual_size} bytes" if actual_size is not None else ""
        if object_size is not None:
            sizes += f", expected {object_size}"
        details |= {"actual_size": actual_size, "expected_size": object_size}
        hint = "the object is cut off, or was replaced meanwhile: upload it again"
        return make(SizeMismatchError, f"{name} is shorter than it must be{sizes}", hint)
    if status in {429, 503}:
        return make(ThrottledError, f"{name}: the node is busy", "lower the number of connections, or raise its limit")
    if status in {413, 507}:
        return make(CapacityError, f"{name}: the node has no space for it", "free space on the node")
    if status == 501:
        return make(IncompatibleError, f"{name}: the node does not offer this ({doing})")
    if status in {408, 409, 425} or status >= 500:
        return make(TransientError, f"{name}: the node failed")
    if 200 <= status < 300:
        return make(IncompatibleError, f"{name}: an answer that a node does not give", "is there a storage node?")
    return make(UsageError, f"{name}: the node refuses the request", "check the key and the address")


def from_connection(endpoint: str, problem: Exception, *, doing: str) -> KvctlError:
    """The error for a connection that cannot be made, broke, or went silent."""
    reason = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
    if isinstance(problem, ssl.SSLError) and not isinstance(problem, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return EnvError(
            f"{endpoint}: TLS failed",
            cause=reason,
            hint="name the node's CA with ca_bundle=FILE, or check whether it was started with --tls-cert",
        )
    if isinstance(problem, (TimeoutError, BlockingIOError)):
        hint = "check the network and the node's load; timeout=SECONDS allows more"
        return MemberDownError(f"{endpoint}: no answer in time ({doing})", cause="timed out", hint=hint)
    hint = "is the node running, and the address right?"
    return MemberDownError(f"{endpoint}: the connection failed ({doing})", cause=reason, hint=hint)
