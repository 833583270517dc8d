"""Files kept between runs: reports and crash logs, under the state directory. Written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

from kvctl.core.errors import EnvError, FormatError, NotFoundError
from kvctl.core.redact import redact, redact_json

KEPT_REPORTS: Final = 200
KEPT_CRASHES: Final = 20


def state_dir(environ: Mapping[str, str], configured: str | None = None) -> str:
    """KVCTL_STATE_DIR, else the configured one, else the platform's state directory. Raises EnvError for a user who has
    no home.
    """
    named = environ.get("KVCTL_STATE_DIR") or configured
    if named:
        return os.path.abspath(os.path.expanduser(named))
    import platformdirs

    try:
        found = platformdirs.user_state_dir("kvctl", appauthor=False)
    except RuntimeError:  # what newer releases say
        found = "~"
    if found.startswith("~"):  # it would become a folder of that name right here
        raise EnvError("there is no home directory to keep reports in", hint="set HOME or KVCTL_STATE_DIR")
    return found


def new_id(kind: str) -> str:
    """Sorts by time: '20261129T222301.042Z-load-weights-1f3a'. Runs may be shorter than a second."""
    now = time.time()
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return f"{moment}.{int(now % 1 * 1000):03}Z-{kind}-{secrets.token_hex(2)}"


def save_report(folder: str, command: str, document: Mapping[str, Any]) -> str:  # Any: JSON
    """The new report's ID. Raises OSError when the state directory cannot be written."""
    ident = new_id(command.replace(" ", "-"))
    _write(
        os.path.join(folder, "reports"), f"{ident}.json", json.dumps(redact_json({**document, "id": ident}), indent=2)
    )
    _trim(os.path.join(folder, "reports"), ".json", KEPT_REPORTS)
    return ident


def load_report(folder: str, ident: str) -> dict[str, Any]:  # Any: JSON
    """The report of an ID, of a part of one that fits only one, or 'last'. Raises NotFoundError."""
    place = os.path.join(folder, "reports")
    known = _names(place, ".json")
    matches = (
        known[-1:] if ident == "last" else [name for name in known if ident == name] or [n for n in known if ident in n]
    )
    if len(matches) != 1:
        what = f"{len(matches)} reports have {ident!r} in their ID" if matches else f"no report {ident!r} is saved"
        latest = ", ".join(reversed(known[-5:])) or "none"
        raise NotFoundError(
            what, cause=f"looked in {place}; latest: {latest}", hint="load-weights and push-weights save one each"
        )
    path = os.path.join(place, f"{matches[0]}.json")
    try:
        with open(path, encoding="utf-8") as file:
            document: dict[str, Any] = json.load(file)
    except OSError as error:
        raise EnvError(f"{path} cannot be read", cause=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no report", cause=str(error)) from error
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str):
        raise FormatError(f"{path} is no report", cause="it names no schema")
    return document


def save_crash(folder: str, text: str) -> tuple[str, str]:
    """ID and path of a crash log."""
    ident = new_id("crash")
    path = _write(os.path.join(folder, "crashes"), f"{ident}.log", redact(text))
    _trim(os.path.join(folder, "crashes"), ".log", KEPT_CRASHES)
    return ident, path


def _write(folder: str, name: str, text: str) -> str:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, name)
    temp = os.path.join(folder, f".{name}.{os.getpid()}")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(temp, path)
    except BaseException:
        os.unlink(temp)
        raise
    return path


def _names(folder: str, suffix: str) -> list[str]:
    try:
        found = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name.removesuffix(suffix) for name in found if name.endswith(suffix) and not name.startswith("."))


def _trim(folder: str, suffix: str, keep: int) -> None:
    for name in _names(folder, suffix)[:-keep]:
        with contextlib.suppress(FileNotFoundError):  # another run may have trimmed it
            os.unlink(os.path.join(folder, name + suffix))
