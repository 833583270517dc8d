"""Times in a repo's documents. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def parse_moment(text: object) -> datetime:
    """The time of an RFC 3339 text, UTC. Raises ValueError, also for one without a zone: it cannot be compared."""
    moment = datetime.fromisoformat(str(text))
    if moment.tzinfo is None:
        raise ValueError(f"{text} names no time zone")
    return moment.astimezone(UTC)
