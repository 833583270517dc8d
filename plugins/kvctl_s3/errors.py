"""From what an S3 server or the way to it says to kvctl's errors. Pure. No secret gets into a message."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import Final, Literal
from xml.etree import ElementTree as ET

from kvctl.core.errors import (
    AuthError,
    CapacityError,
    ConfigError,
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

# Codes: docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and those that MinIO, Ceph, SeaweedFS add.
_EXPIRED: Final = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_KEYS: Final = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "MissingSecurityHeader"}
_THROTTLED: Final = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests",
                     "SlowDownRead", "SlowDownWrite", "ServiceUnavailable"}  # fmt: skip
_FULL: Final = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
                "StorageFull", "EntityTooLarge", "InsufficientCapacity"}  # fmt: skip
_ELSEWHERE: Final = {"PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed",
                     "IllegalLocationConstraintException", "MovedPermanently"}  # fmt: skip
_TRY_AGAIN: Final = {"RequestTimeout", "IncompleteBody", "BadDigest", "InternalError", "OperationAborted",
                     "ConditionalRequestConflict"}  # fmt: skip
_NOT_OFFERED: Final = {"NotImplemented", "MethodNotAllowed", "XNotImplemented"}
_SECRETS: Final = re.compile(
    r"((?:x-amz-)?(?:signature|credential|security-token|secret[a-z_-]*|authorization|awsaccesskeyid)\"?\s*[=:]\s*)"
    r"[^&\s\"',;<]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """`text` without query strings and anything that looks like a signature or key."""
    return _SECRETS.sub(r"\1***", re.sub(r"\?[^\s'\"<>]*", "?***", text))


def parse_error_body(body: bytes) -> tuple[str, str, Mapping[str, str]]:
    """(code, message, other fields) of an S3 error document; empty where the body is something else."""
    if len(body) > 65536 or b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        return "", "", {}
    try:
        root = ET.fromstring(body)  # noqa: S314 - bounded, and entities are refused above
    except ET.ParseError:
        return "", "", {}
    fields = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in root}
    return fields.pop("Code", ""), fields.pop("Message", ""), fields


def from_status(
    where: str,
    key: str,
    status: int,
    code: str = "",
    message: str = "",
    *,
    doing: Doing = "read",
    region: str | None = None,
    object_size: int | None = None,
    actual_size: int | None = None,
) -> KvctlError:
    """The error for an answer of the server. `where` is the store's URL or endpoint, `region` the one that the
    server named, the sizes are what was expected and what the server has.
    """
    name = f"{where}: {key}" if key else where
    said = " ".join(part for part in (f"HTTP {status}", code) if part)
    cause = redact(f"{said}: {message}" if message else said)
    details: dict[str, object] = {"key": key, "status": status, "code": code}

    def make(kind: type[KvctlError], what: str, hint: str | None = None) -> KvctlError:
        return kind(what, cause=cause, hint=hint, details=details)

    if code in _EXPIRED:
        return make(AuthError, f"{name}: the credentials have expired", "renew them (for example `aws sso login`)")
    if code in _ELSEWHERE or status in {301, 302, 307, 308}:
        hint = f"use region={region}" if region else "set the bucket's region, or its endpoint"
        return make(ConfigError, f"{name}: the bucket lives in another region or at another endpoint", hint)
    if code == "RequestTimeTooSkewed":
        return make(AuthError, f"{name}: this host's clock is wrong", "set the clock (NTP)")
    if code in _WRONG_KEYS:
        return make(AuthError, f"{name}: the server does not accept the credentials", "check access key and secret")
    if status in {401, 403} or code == "AccessDenied":
        return make(AuthError, f"{name}: access denied", f"the credentials lack the right to {doing} here")
    if code == "NoSuchBucket":
        return make(NotFoundError, f"{where}: the bucket does not exist", "check the bucket's name and the endpoint")
    if code == "NoSuchUpload":
        return make(NotFoundError, f"{name}: no such unfinished upload")
    if status == 404 or code == "NoSuchKey":
        return make(NotFoundError, f"{name}: no such object", "check the address, and that the upload is finished")
    if status == 412 or code == "PreconditionFailed":
        if doing == "read":
            return make(VersionChangedError, f"{name} changed while loading", "run it again to load the new version")
        return make(ConflictError, f"{name}: another writer was first")
    if status == 416 or code == "InvalidRange":
        sizes = f": it has {actual_size} bytes" if actual_size is not None else ""
        if object_size is not None:
            sizes += f", expected {object_size}"
        details |= {"actual_size": actual_size, "expected_size": object_size}
        hint = "the object is cut off, or was replaced meanwhile: upload it again"
        return make(SizeMismatchError, f"{name} is shorter than it must be{sizes}", hint)
    if status in {429, 503} or code in _THROTTLED:
        return make(ThrottledError, f"{name}: the server asks to slow down", "lower the number of requests in flight")
    if status == 507 or code in _FULL:
        return make(CapacityError, f"{name}: the server has no space for it", "free space, or raise the quota")
    if status >= 500 and code not in _NOT_OFFERED and status != 501:
        return make(TransientError, f"{name}: the server failed")
    if status in {408, 409, 425} or code in _TRY_AGAIN:
        return make(TransientError, f"{name}: the server could not finish the request")
    if code in _NOT_OFFERED or status in {405, 501}:
        return make(IncompatibleError, f"{name}: the server does not offer this ({doing})")
    if 200 <= status < 300:
        return make(IncompatibleError, f"{name}: an answer that S3 does not give", "is this endpoint an S3 server?")
    return make(UsageError, f"{name}: the server refuses the request", "check bucket, key and endpoint")


def from_connection(endpoint: str, problem: Exception, *, doing: str = "talking to") -> KvctlError:
    """The error for a connection that cannot be made, broke, or went silent."""
    reason = redact(getattr(problem, "strerror", None) or str(problem) or type(problem).__name__)
    if isinstance(problem, ssl.SSLError) and not isinstance(problem, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return EnvError(
            f"{endpoint}: TLS failed",
            cause=reason,
            hint="name the server's CA with ca_bundle=FILE (or AWS_CA_BUNDLE), or check http:// against https://",
        )
    if isinstance(problem, (TimeoutError, BlockingIOError)):
        hint = "check the network and the server's load; timeout=SECONDS allows more"
        return MemberDownError(f"{endpoint}: no answer in time ({doing})", cause="timed out", hint=hint)
    hint = "is the server running, and the address right?"
    return MemberDownError(f"{endpoint}: the connection failed ({doing})", cause=reason, hint=hint)


def no_credentials(url: str) -> AuthError:
    return AuthError(
        f"{url}: no credentials found",
        hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or anonymous=true for public buckets",
    )
