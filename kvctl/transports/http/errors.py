"""From HTTP status codes and broken connections to kvctl's errors. Pure. No secret gets into a message."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import Final, Literal

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

_SECRETS: Final = re.compile(
    r"((?:x-amz-)?(?:signature|credential|security-token|secret[a-z_-]*|authorization|awsaccesskeyid)\"?\s*[=:]\s*)"
    r"[^&\s\"',;<]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """`text` without query strings and anything that looks like a signature or key."""
    return _SECRETS.sub(r"\1***", re.sub(r"\?[^\s'\"<>]*", "?***", text))


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is no success. `where` is the store's URL or an endpoint, `key` the object's or empty; `code` and
    `message` as the server gave them; the sizes are what was expected and what the server has.
    """

    where: str
    key: str
    status: int
    code: str = ""
    message: str = ""
    doing: Doing = "read"
    object_size: int | None = None
    actual_size: int | None = None

    @property
    def name(self) -> str:
        return f"{self.where}: {self.key}" if self.key else self.where

    def error(
        self, kind: type[KvctlError], what: str, hint: str | None = None, *, details: dict[str, object] | None = None
    ) -> KvctlError:
        """An error of `kind` with the answer as its cause."""
        said = " ".join(part for part in (f"HTTP {self.status}", self.code) if part)
        cause = redact(f"{said}: {self.message}" if self.message else said)
        known: dict[str, object] = {"key": self.key, "status": self.status, "code": self.code}
        return kind(what, cause=cause, hint=hint, details=known | (details or {}))


@dataclass(frozen=True, slots=True)
class Wording:
    """How messages call a server, what they say of a busy one, and the hints that differ between kinds of servers.
    `denied` has a place for what was being done.
    """

    server: str
    busy: str
    denied: str
    slower: str
    full: str
    strange: str
    tls: str

    def from_status(self, refusal: Refusal, status: int) -> KvctlError:
        """The error for an answer whose meaning is that of `status`, which may say more than the one it came with."""
        name, error, doing = refusal.name, refusal.error, refusal.doing
        if status in {401, 403}:
            return error(AuthError, f"{name}: access denied", self.denied.format(doing))
        if status == 404:
            return error(NotFoundError, f"{name}: no such object", "check the address, and that the upload is finished")
        if status == 412 and doing == "read":
            again = "run it again to load the new version"
            return error(VersionChangedError, f"{name} changed while loading", again)
        if status == 412:
            return error(ConflictError, f"{name}: another writer was first")
        if status == 416:
            return _too_short(refusal)
        if status in {429, 503}:
            return error(ThrottledError, f"{name}: {self.busy}", self.slower)
        if status in {413, 507}:
            return error(CapacityError, f"{name}: {self.server} has no space for it", self.full)
        if status in {405, 501}:
            return error(IncompatibleError, f"{name}: {self.server} does not offer this ({doing})")
        if status >= 500:
            return error(TransientError, f"{name}: {self.server} failed")
        if status in {408, 409, 425}:
            return error(TransientError, f"{name}: {self.server} could not finish the request")
        if 200 <= status < 300:
            return error(IncompatibleError, f"{name}: an answer that {self.server} must not give", self.strange)
        hint = "check the key and the address"
        return error(UsageError, f"{name}: {self.server} refuses the request", hint)

    def from_connection(self, endpoint: str, problem: Exception, *, doing: str) -> KvctlError:
        """The error for a connection that cannot be made, broke, or went silent."""
        reason = redact(getattr(problem, "strerror", None) or str(problem) or type(problem).__name__)
        if isinstance(problem, ssl.SSLError) and not isinstance(problem, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return EnvError(f"{endpoint}: TLS failed", cause=reason, hint=self.tls)
        if isinstance(problem, (TimeoutError, BlockingIOError)):
            hint = f"check the network and the load of {self.server}; timeout=SECONDS allows more"
            return MemberDownError(f"{endpoint}: no answer in time ({doing})", cause="timed out", hint=hint)
        hint = f"is {self.server} running, and the address right?"
        return MemberDownError(f"{endpoint}: the connection failed ({doing})", cause=reason, hint=hint)


def _too_short(refusal: Refusal) -> KvctlError:
    has, wanted = refusal.actual_size, refusal.object_size
    sizes = f": it has {has} bytes" if has is not None else ""
    if wanted is not None:
        sizes += f", expected {wanted}"
    return refusal.error(
        SizeMismatchError,
        f"{refusal.name} is shorter than it must be{sizes}",
        "the object is cut off, or was replaced meanwhile: upload it again",
        details={"actual_size": has, "expected_size": wanted},
    )
