"""The pages of ListObjectsV2. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from kvctl.core.errors import IncompatibleError


def parse_list(body: bytes, url: str) -> tuple[list[tuple[str, int, str, datetime]], str]:
    """(key, size, ETag, modified) of each object, and the token of the next page ('' for the last). Raises
    IncompatibleError for what is no such page. Keys come URL-encoded, as we ask for: XML cannot hold all of them.
    """
    try:
        if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
            raise ET.ParseError("a document type")
        root = ET.fromstring(body)  # noqa: S314 - document types, and so entities, are refused above
        space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
        if root.tag != f"{space}ListBucketResult":
            raise ValueError(f"a <{root.tag[len(space) :]}> where a list should be")
        encoded = root.findtext(f"{space}EncodingType") == "url"
        items = []
        for item in root.iterfind(f"{space}Contents"):
            key = item.findtext(f"{space}Key") or ""
            modified = datetime.fromisoformat(item.findtext(f"{space}LastModified") or "").astimezone(UTC)
            size = int(item.findtext(f"{space}Size") or "")
            items.append((unquote_plus(key) if encoded else key, size, item.findtext(f"{space}ETag") or "", modified))
        token = root.findtext(f"{space}NextContinuationToken") or ""
        more = root.findtext(f"{space}IsTruncated") == "true"
        if more and not token:  # a list cut short must never pass for a whole one
            raise ValueError("a page that says there are more, and not where")
    except (ET.ParseError, ValueError) as problem:
        raise IncompatibleError(
            f"{url}: an answer that S3 does not give", cause=str(problem), hint="is this endpoint an S3 server?"
        ) from problem
    return items, token if more else ""
