"""From what an S3 server or the way to it says to kvctl's errors. Pure. No secret gets into a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from xml.etree import ElementTree as ET

from kvctl.core.errors import AuthError, ConfigError, KvctlError, NotFoundError
from kvctl.transports.http.errors import Doing, Refusal, Wording, redact

__all__ = ["Doing", "from_connection", "from_status", "no_credentials", "parse_error_body", "redact"]

# Codes: docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and those that MinIO, Ceph, SeaweedFS add.
_EXPIRED: Final = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_KEYS: Final = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "MissingSecurityHeader"}
_ELSEWHERE: Final = {"PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed",
                     "IllegalLocationConstraintException", "MovedPermanently"}  # fmt: skip
# Codes that say more than the status that they come with: what their own would be.
_MEANS: Final = {
    "AccessDenied": 403, "NoSuchKey": 404, "PreconditionFailed": 412, "InvalidRange": 416, "InternalError": 500,
    **dict.fromkeys(("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests",
                     "SlowDownRead", "SlowDownWrite", "ServiceUnavailable"), 503),
    **dict.fromkeys(("InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
                     "StorageFull", "EntityTooLarge", "InsufficientCapacity"), 507),
    **dict.fromkeys(("RequestTimeout", "IncompleteBody", "BadDigest", "OperationAborted",
                     "ConditionalRequestConflict"), 408),
    **dict.fromkeys(("NotImplemented", "MethodNotAllowed", "XNotImplemented"), 501),
}  # fmt: skip
_WORDING: Final = Wording(
    server="the server",
    busy="the server asks to slow down",
    denied="the credentials lack the right to {} here",
    slower="lower the number of requests in flight",
    full="free space, or raise the quota",
    strange="is this endpoint an S3 server?",
    tls="name the server's CA with ca_bundle=FILE (or AWS_CA_BUNDLE), or check http:// against https://",
)


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
    refusal = Refusal(where, key, status, code, message, doing, object_size, actual_size)
    name, error = refusal.name, refusal.error
    if code in _EXPIRED:
        hint = "renew them (for example `aws sso login`)"
        return error(AuthError, f"{name}: the credentials have expired", hint)
    if code in _ELSEWHERE or status in {301, 302, 307, 308}:
        hint = f"use region={region}" if region else "set the bucket's region, or its endpoint"
        return error(ConfigError, f"{name}: the bucket lives in another region or at another endpoint", hint)
    if code == "RequestTimeTooSkewed":
        return error(AuthError, f"{name}: this host's clock is wrong", "set the clock (NTP)")
    if code in _WRONG_KEYS:
        return error(AuthError, f"{name}: the server does not accept the credentials", "check access key and secret")
    if code == "NoSuchBucket":
        return error(NotFoundError, f"{where}: the bucket does not exist", "check the bucket's name and the endpoint")
    if code == "NoSuchUpload":
        return error(NotFoundError, f"{name}: no such unfinished upload")
    return _WORDING.from_status(refusal, _MEANS.get(code, status))


def from_connection(endpoint: str, problem: Exception, *, doing: str = "talking to") -> KvctlError:
    """The error for a connection that cannot be made, broke, or went silent."""
    return _WORDING.from_connection(endpoint, problem, doing=doing)


def no_credentials(url: str) -> AuthError:
    return AuthError(
        f"{url}: no credentials found",
        hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or anonymous=true for public buckets",
    )
