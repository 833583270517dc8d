"""From boto3's exceptions to kvctl's errors."""

from __future__ import annotations

from typing import Final

import botocore.exceptions as boto_errors
from botocore.parsers import ResponseParserError

from kvctl.core.errors import (
    AuthError,
    ConfigError,
    EnvError,
    IncompatibleError,
    KvctlError,
    MemberDownError,
    TransientError,
)
from kvctl_s3.errors import Doing, from_status, no_credentials, redact

_UNSENT: Final = (boto_errors.EndpointConnectionError, boto_errors.ConnectTimeoutError)


def from_boto(problem: Exception, url: str, key: str, doing: Doing, endpoint: str) -> KvctlError:
    """The kvctl error for what a boto3 call raised."""
    if isinstance(problem, boto_errors.ClientError):
        return _from_answer(problem, url, key, doing)
    said = redact(str(problem))
    name = f"{url}: {key}" if key else url
    if isinstance(problem, boto_errors.NoCredentialsError):
        return no_credentials(url)
    if isinstance(problem, boto_errors.SSLError):
        return EnvError(
            f"{endpoint}: TLS failed",
            cause=said,
            hint="name the server's CA with ca_bundle=FILE (or AWS_CA_BUNDLE), or check http:// against https://",
        )
    if isinstance(problem, (*_UNSENT, boto_errors.ConnectionError, boto_errors.HTTPClientError)):
        hint = "is the server running, and the address right?"
        return MemberDownError(f"{endpoint}: the connection failed ({f'{doing} {key}'.strip()})", cause=said, hint=hint)
    if isinstance(problem, ResponseParserError):
        return IncompatibleError(f"{name}: an answer that S3 does not give", cause=said[:200])
    if isinstance(problem, (boto_errors.ParamValidationError, boto_errors.InvalidRegionError)):
        return ConfigError(f"{name}: the request cannot be made", cause=said)
    if isinstance(problem, boto_errors.IncompleteReadError):
        return TransientError(f"{name}: the answer ended early", cause=said)
    if "redential" in type(problem).__name__ or "Token" in type(problem).__name__:
        return AuthError(f"{url}: the credentials cannot be used", cause=said, hint="log in again")
    return TransientError(f"{name}: the request failed", cause=said)


def _from_answer(problem: boto_errors.ClientError, url: str, key: str, doing: Doing) -> KvctlError:
    meta = problem.response.get("ResponseMetadata", {})
    error = problem.response.get("Error", {})
    code = str(error.get("Code", ""))
    headers = meta.get("HTTPHeaders", {})
    return from_status(
        url,
        key,
        int(meta.get("HTTPStatusCode", 0)),
        "" if code.isdigit() else code,
        str(error.get("Message", "")),
        doing=doing,
        region=headers.get("x-amz-bucket-region") or error.get("Region"),  # type: ignore[arg-type] # botocore adds it
    )
