"""Keys of a repo and the rules for names in them. Pure.

    member.json                            which member of which repo this store is
    repo.json                              see `kvctl.repo.format`
    chunks/<aa>/<digest>.<incarnation>
    models/<name>/<version>.json           manifests
    state/<kind>/<name>.json               small, mutable, conditional
    leases/<id>.json, leases/<id>/<n>.json     what a reader needs (see `kvctl.repo.leases`)
    gc/intents/<id>.json, ../<id>/<n>.json     what a writer is about to name
    gc/condemned.json, gc/owner.json, gc/tombstones/<key>.json
    locks/<key>/<ticket>                   only on stores without conditional put (see `kvctl.repo.locking`)

Names are served literally: bytes that a key cannot carry everywhere are percent-encoded as in a URL.
"""

from __future__ import annotations

import unicodedata
from typing import Final
from urllib.parse import quote, unquote

from blake3 import blake3

from kvctl.core.errors import UsageError
from kvctl.transports.keys import TEMP_SUFFIX

REPO: Final = "repo.json"
MEMBER: Final = "member.json"
CHUNKS: Final = "chunks/"
MODELS: Final = "models/"
SESSIONS: Final = "sessions/"
STATE: Final = "state/"
LEASES: Final = "leases/"
INTENTS: Final = "gc/intents/"
CONDEMNED: Final = "gc/condemned.json"
OWNER: Final = "gc/owner.json"
TOMBSTONES: Final = "gc/tombstones/"
LOCKS: Final = "locks/"

# Every key below these is metadata: a home member, copies on the others.
METADATA: Final = (MODELS, SESSIONS, "ns/", "index/", STATE)
# All that a repo keeps in folders: what lies below these is the repo's, to read, to sweep and to erase.
OURS: Final = (*METADATA, CHUNKS, LEASES, "gc/", LOCKS)

# A file name takes 255 bytes; the rest is for '.json' and the suffixes of files being written.
_LONGEST = 200


def is_ours(key: str) -> bool:
    """Whether the key, or one that begins like it (an upload's, a temp file's), is a repo's. Others may keep objects
    beside a repo.
    """
    return key.startswith((*OURS, REPO, MEMBER))


def check_name(what: str, name: str) -> str:
    """`name`, if it can name a model, a version or a label. Raises UsageError; `what` says of what kind it is.

    A name may hold '/' between its parts ('org/model'), spaces and any printable unicode.
    """
    refusal = _refusal(name)
    if refusal:
        raise UsageError(
            f"{name!r} cannot be the name of a {what}: {refusal}",
            hint="use letters, digits, '.', '_', '-', spaces or '/' between parts",
        )
    return name


def _refusal(name: str) -> str:
    if not name:
        return "it is empty"
    if name.startswith("-"):
        return "it starts with '-' and would read as an option"
    if name.startswith(("/", "\\", "~")):
        return "it is an absolute path"
    for character in name:
        category = unicodedata.category(character)
        if category in {"Cc", "Cs", "Zl", "Zp"}:
            return f"it holds the control character U+{ord(character):04X}"
    if name != name.strip():
        return "it starts or ends with a space"
    if "@" in name or "\\" in name:
        return "it holds '@' or a backslash"
    parts = name.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        return "a part of it is empty, '.' or '..'"
    if parts[-1].endswith(TEMP_SUFFIX):
        return f"{TEMP_SUFFIX} is for files being written"
    if len(quote_part(name)) > _LONGEST:
        return f"it takes {len(quote_part(name))} bytes, at most {_LONGEST} fit"
    return ""


def quote_part(text: str) -> str:
    """One part of a key for any text: A-Z a-z 0-9 _ . - ~ stay, the rest becomes %XX of its UTF-8."""
    return quote(text, safe="")


def short_part(text: str) -> str:
    """Like `quote_part`, never longer than a file name may be: what is too long ends in a digest of it."""
    part = quote_part(text)
    if len(part) <= _LONGEST:
        return part
    return f"{part[: _LONGEST - 40]}~{blake3(text.encode()).hexdigest(16)}"


def unquote_part(part: str) -> str:
    return unquote(part)


def model_key(name: str, version: str) -> str:
    """Raises UsageError for names that `check_name` refuses."""
    return f"{model_prefix(name)}{quote_part(check_name('version', version))}.json"


def model_prefix(name: str) -> str:
    """The prefix of all versions of a model."""
    return f"{MODELS}{quote_part(check_name('model', name))}/"


def parse_model_key(key: str) -> tuple[str, str] | None:
    """(name, version) of a model's manifest key; None for any other key."""
    parts = key.split("/")
    if len(parts) != 3 or f"{parts[0]}/" != MODELS or not parts[2].endswith(".json"):
        return None
    return unquote_part(parts[1]), unquote_part(parts[2].removesuffix(".json"))


def state_key(kind: str, name: str) -> str:
    """`kind` is ours ('latest', 'pins', 'labels'); `name` is any name of a model or session. Raises UsageError."""
    return f"{STATE}{kind}/{quote_part(check_name(kind, name))}.json"


def tombstone_key(key: str) -> str:
    return f"{TOMBSTONES}{short_part(key)}.json"
