"""The condemned set: chunk names that gc may delete, published before it does.

`gc/condemned.json` on every member: {seq, names: {name: condemned since}}. It grows by publication, and shrinks
only by names whose objects are gone: a condemned name is never relied on and never written again, so a late
delete harms nothing. A publication counts once every member has it.

A name that turns out to be needed (a writer had declared it before it was condemned) stays in the set, since
`null`: writers go on to avoid it, and its grace period begins when it is found unneeded again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from kvctl.core.errors import ConflictError, FormatError, NotFoundError
from kvctl.repo import metadata
from kvctl.repo.layout import CONDEMNED
from kvctl.repo.moments import parse_moment

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo


@dataclass(frozen=True, slots=True)
class Condemned:
    """`seq` grows with each change; `version` is what a conditional put at the home takes (None: there is no set
    yet; '': it was not asked for, or came from a copy).
    """

    seq: int
    names: Mapping[str, datetime | None]
    version: str | None = None


def read_condemned(repo: Repo, *, versioned: bool = False) -> Condemned:
    """The set as its home shows it, or any copy: each has every publication that was completed."""
    try:
        data, version = metadata.read_versioned(repo, CONDEMNED) if versioned else (metadata.read(repo, CONDEMNED), "")
    except NotFoundError:
        return Condemned(0, {})
    try:
        document = json.loads(data)
        names = {str(name): None if since is None else parse_moment(since) for name, since in document["names"].items()}
        return Condemned(int(document["seq"]), names, version)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise FormatError(f"{CONDEMNED} is malformed", cause=str(problem)) from problem


def publish(repo: Repo, old: Condemned, names: Mapping[str, datetime | None]) -> Condemned:
    """Replace `old` by `names`; on return every member has it. Raises ConflictError when somebody else changed
    the set meanwhile, MemberDownError when a member does not take it.
    """
    seq = old.seq + 1
    document = {
        "schema": "kvctl.condemned/1",
        "seq": seq,
        "names": {name: None if since is None else since.isoformat() for name, since in sorted(names.items())},
    }
    data = json.dumps(document, indent=0).encode()
    if old.version == "":
        raise ConflictError("the condemned set was not read from its home", hint="run it again")
    info = metadata.commit(
        repo, CONDEMNED, data, if_absent=old.version is None, if_version=old.version, all_copies=True
    )
    return Condemned(seq, dict(names), info.version)
