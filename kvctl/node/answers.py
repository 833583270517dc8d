"""What a request's headers mean for an object, and what an answer says of one. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from kvctl.node.messages import HttpError, Request, http_date, parse_range, parse_version
from kvctl.node.rdma_seam import Dialect
from kvctl.node.tree import Stat
from kvctl.transports.node_auth import RDMA_HEADERS

PAGE: Final = 1000  # objects of one list at most


def rdma_token(request: Request) -> tuple[str, Dialect]:
    """The token and its dialect; an empty one where there is none. Raises HttpError for both dialects at once."""
    scal, s3 = request.get(RDMA_HEADERS[0]), request.get(RDMA_HEADERS[1])
    if scal and s3:
        raise HttpError(400, "rdma", "two RDMA tokens")
    return (s3, "s3") if s3 else (scal, "scal")


def part(request: Request, key: str, found: Stat) -> tuple[int, int, int, dict[str, str]]:
    """(status, offset, length, headers) of the answer to a GET. Raises HttpError 400, 412 or 416."""
    check_version(request, key, found)
    span = parse_range(request.get("range"), found.size)
    if span is None:
        return 200, 0, found.size, headers_of(found)
    offset, length = span
    headers = headers_of(found, ranges=False, times=False)
    headers["content-range"] = f"bytes {offset}-{offset + length - 1}/{found.size}"
    return 206, offset, length, headers


def check_version(request: Request, key: str, found: Stat) -> None:
    wanted = request.get("if-match")
    if wanted and wanted != "*" and parse_version(wanted, "If-Match") != found.version:
        raise HttpError(412, "conflict", f"{key} is at another version", headers={"etag": f'"{found.version}"'})


def headers_of(found: Stat, *, ranges: bool = True, times: bool = True) -> dict[str, str]:
    """What an answer says of an object. RFC 9110 wants no more than the ETag with a part of one."""
    headers = {"etag": f'"{found.version}"'}
    if times:
        headers["last-modified"] = http_date(found.modified_ns // 1_000_000_000)
    if ranges:
        headers |= {"accept-ranges": "bytes", "content-type": "application/octet-stream"}
    return headers


def iso_time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="microseconds")


def parse_limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= PAGE:
        raise HttpError(400, "query", f"limit is a number from 1 to {PAGE}")
    return int(text)
