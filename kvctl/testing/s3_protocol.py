"""The parts of S3's protocol that the faulty server speaks: signatures checked, XML written and read. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

_AUTHORIZATION: Final = re.compile(
    r"^AWS4-HMAC-SHA256 Credential=(?P<key>[^/,]+)/(?P<scope>(?P<day>\d{8})/(?P<region>[^/]+)/s3/aws4_request), ?"
    r"SignedHeaders=(?P<names>[^,]+), ?Signature=(?P<signature>[0-9a-f]{64})$"
)


@dataclass(frozen=True, slots=True)
class Stored:
    """One object. `etag` without quotes."""

    data: bytes
    etag: str
    modified: datetime


class RefusalError(Exception):
    """An answer other than success: HTTP status and S3's code."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(status, code, message)
        self.status = status
        self.code = code
        self.message = message


def check_signature(
    method: str,
    target: str,
    headers: Mapping[str, str],
    *,
    access_key: str,
    secret_key: str,
    session_token: str | None,
    region: str,
) -> None:
    """Verifies a Signature Version 4 in the headers (names in lower case) in full. Raises RefusalError."""
    match = _AUTHORIZATION.match(headers.get("authorization", ""))
    if match is None:
        raise RefusalError(403, "AccessDenied", "Anonymous access is forbidden")
    if match["key"] != access_key:
        raise RefusalError(403, "InvalidAccessKeyId", "The access key id does not exist")
    if headers.get("x-amz-security-token") != session_token:
        raise RefusalError(403, "InvalidToken", "The provided token is malformed or otherwise invalid")
    if match["region"] != region:
        raise RefusalError(
            400, "AuthorizationHeaderMalformed", f"the region '{match['region']}' is wrong; expecting '{region}'"
        )
    path, _, query = target.partition("?")
    pairs = sorted(part if "=" in part else f"{part}=" for part in query.split("&") if part)
    names = match["names"].split(";")
    if unsigned := sorted(name for name in headers if name.startswith("x-amz-") and name not in names):
        raise RefusalError(403, "AccessDenied", f"There were headers present which were not signed: {unsigned}")
    lines = "".join(f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names)
    payload = headers.get("x-amz-content-sha256", "")
    canonical = "\n".join([method, quote(unquote(path), safe="/-._~"), "&".join(pairs), lines, match["names"], payload])
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{headers.get('x-amz-date', '')}\n{match['scope']}\n{hashed}"
    key = f"AWS4{secret_key}".encode()
    for part in match["scope"].split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    if hmac.digest(key, to_sign.encode(), "sha256").hex() != match["signature"]:
        raise RefusalError(403, "SignatureDoesNotMatch", "The signature does not match")


def parse_range(text: str | None, size: int) -> tuple[int, int] | None:
    """[start, end) of a `Range` header; None where there is none. Raises RefusalError (416)."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", text or "")
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    start = int(first)
    if start >= size:
        raise RefusalError(416, "InvalidRange", "The requested range is not satisfiable")
    return start, min(size, int(last) + 1 if last else size)


def error_document(refusal: RefusalError, extra: Mapping[str, str] | None = None) -> bytes:
    more = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in (extra or {}).items())
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{escape(refusal.code)}</Code>'
        f"<Message>{escape(refusal.message or refusal.code)}</Message>{more}</Error>"
    ).encode()


def list_document(
    bucket: str, prefix: str, page: Sequence[tuple[str, Stored]], *, following: str | None, page_size: int
) -> bytes:
    """A page of ListObjectsV2; keys are URL-encoded, as clients ask for."""
    contents = "".join(
        f"<Contents><Key>{quote(key, safe='/')}</Key>"
        f"<LastModified>{item.modified:%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
        f"<ETag>&quot;{item.etag}&quot;</ETag><Size>{len(item.data)}</Size>"
        f"<StorageClass>STANDARD</StorageClass></Contents>"
        for key, item in page
    )
    token = f"<NextContinuationToken>{quote(following, safe='')}</NextContinuationToken>" if following else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><Prefix>{quote(prefix, safe='/')}</Prefix><EncodingType>url</EncodingType>"
        f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{page_size}</MaxKeys>"
        f"<IsTruncated>{'true' if following else 'false'}</IsTruncated>{token}{contents}</ListBucketResult>"
    ).encode()


def parse_delete(body: bytes) -> list[str]:
    """The keys of a DeleteObjects request. Raises RefusalError."""
    try:
        root = ET.fromstring(body)  # noqa: S314 - a test server, on loopback
    except ET.ParseError as problem:
        raise RefusalError(400, "MalformedXML", str(problem)) from problem
    return [item.text or "" for item in root.iter() if item.tag.rpartition("}")[2] == "Key"]


def delete_document(keys: Iterable[str]) -> bytes:
    del keys  # 'Quiet' answers name failures only
    return b'<?xml version="1.0" encoding="UTF-8"?>\n<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>'


def copy_document(made: Stored) -> bytes:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<CopyObjectResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<LastModified>{made.modified:%Y-%m-%dT%H:%M:%S.000Z}</LastModified><ETag>&quot;{made.etag}&quot;</ETag>"
        "</CopyObjectResult>"
    ).encode()
