"""AWS Signature Version 4 in request headers, lean: the derived key is cached, a request costs three hashes.

Specification: docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html. Only `host` and the
`x-amz-*` headers are signed: proxies may touch the rest, and what we check in the answer does not depend on it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import quote

UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
_STAMP: Final = "%Y%m%dT%H%M%SZ"
EMPTY_PAYLOAD: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Credentials:
    """An access key with its secret; `token` for temporary ones. Never shown."""

    access_key: str
    secret_key: str
    token: str | None = None

    def __repr__(self) -> str:
        return "Credentials(***)"


def encode_path(path: str) -> str:
    """`path` as S3 wants it in the request line and in the signature: UTF-8, everything but unreserved and '/'."""
    return quote(path, safe="/-._~")


class Signer:
    """Signs requests for one region. Not thread-safe: one per connection."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._cached: tuple[str, str, bytes] = ("", "", b"")

    def headers(
        self,
        method: str,
        host: str,
        path: str,
        credentials: Credentials,
        *,
        query: str = "",
        payload: str = EMPTY_PAYLOAD,
        more: Sequence[tuple[str, str]] = (),
        now: datetime | None = None,
    ) -> list[tuple[str, str]]:
        """The headers to add to a request whose `path` and `query` are encoded (and sorted) already; `more` among them:
        other `x-amz-*` ones.
        """
        stamp = now.strftime(_STAMP) if now is not None else time.strftime(_STAMP, time.gmtime())
        day = stamp[:8]
        signed = [("host", host), ("x-amz-content-sha256", payload), ("x-amz-date", stamp)]
        if credentials.token:
            signed.append(("x-amz-security-token", credentials.token))
        if more:
            signed = [signed[0], *sorted([*signed[1:], *more])]
        names = ";".join(name for name, _ in signed)
        lines = "".join(f"{name}:{value}\n" for name, value in signed)
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}"
        scope = f"{day}/{self._region}/s3/aws4_request"
        to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(self._key(credentials.secret_key, day), to_sign.encode(), "sha256").hex()
        authorization = (
            f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, "
            f"Signature={signature}"
        )
        return [*signed[1:], ("authorization", authorization)]

    def _key(self, secret: str, day: str) -> bytes:
        if self._cached[:2] != (secret, day):
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._cached = (secret, day, key)
        return self._cached[2]
