"""Small mutable documents: pins, labels, LATEST pointers. Changed by compare-and-swap at their home only."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.core.errors import ConflictError, FormatError, NotFoundError
from kvctl.repo import metadata
from kvctl.repo.layout import STATE, state_key, unquote_part

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo

Value = Mapping[str, Any]  # Any: JSON; the part that owns the kind checks it

_TRIES = 50


def read_state(repo: Repo, kind: str, name: str) -> Value | None:
    """The value, None where there is none (or it was cleared)."""
    try:
        return _parse(repo.read_meta(state_key(kind, name)), state_key(kind, name))[1]
    except NotFoundError:
        return None


def update_state(repo: Repo, kind: str, name: str, change: Callable[[Value | None], Value | None]) -> Value | None:
    """Replace the value by `change(value)`, again when somebody else was faster; None clears it. Returns the new
    value. Raises MemberDownError when the home is down, ConflictError after 50 lost races.
    """
    key = state_key(kind, name)
    problem: ConflictError | None = None
    for _ in range(_TRIES):
        home = metadata.require_home(repo, key, "write")
        version: str | None = None
        seq, old = 0, None
        try:
            data, version = metadata.read_versioned(repo, key)
            seq, old = _parse(data, key)
        except NotFoundError:
            pass
        if version == "":
            raise ConflictError(f"{key} was read from a copy: member {home.name} failed", hint="run it again")
        new = change(old)
        if new == old:
            return new
        # the nonce: two writers of the same value must not both take one write for theirs
        document = json.dumps({"seq": seq + 1, "value": new, "nonce": secrets.token_hex(4)}).encode()
        try:
            repo.commit_meta(key, document, if_absent=version is None, if_version=version)
        except ConflictError as error:
            problem = error
            continue
        return new
    raise ConflictError(f"{key} changes too fast", cause=str(problem), hint="run it again")


def list_state(repo: Repo, kind: str) -> dict[str, Value]:
    """Name -> value of every document of a kind that is not cleared."""
    found: dict[str, Value] = {}
    prefix = f"{STATE}{kind}/"
    for item in repo.list_meta(prefix):
        name = unquote_part(item.key.removeprefix(prefix).removesuffix(".json"))
        value = read_state(repo, kind, name)
        if value is not None:
            found[name] = value
    return found


def _parse(data: bytes, key: str) -> tuple[int, Value | None]:
    try:
        document = json.loads(data)
        seq, value = int(document["seq"]), document["value"]
        if value is not None and not isinstance(value, dict):
            raise TypeError("its value is no object")
        return seq, value
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise FormatError(f"{key} is malformed", cause=str(problem)) from problem
