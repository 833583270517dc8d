"""`kvctl transports new`: a working plug-in package out of the templates beside this file. Imports `core` and `memory`.

A template is the file it becomes with `@@name@@` for a value; `.in` keeps tools from taking it for code.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvctl import __version__
from kvctl.core.errors import UsageError
from kvctl.memory.files import cannot_write

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_SLOT: Final = re.compile(r"@@(\w+)@@")


def write_plugin(name: str, folder: str, *, scheme: str | None = None) -> list[str]:
    """Write the package for the store and transport `name`, or for a transport of an existing `scheme`, into `folder`,
    which must be new or empty; the paths that were written. Raises UsageError, and what `cannot_write` says: nothing is
    left then.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a plug-in", hint="small letters, digits and single '-', a letter first: foo-fast"
        )
    package = f"kvctl_{name.replace('-', '_')}"
    values = {
        "name": name,
        "dist": f"kvctl-{name}",
        "package": package,
        "class": "".join(part.capitalize() for part in name.split("-")),
        "version": __version__,
        "scheme": scheme or name,
        "fallback": "str(tmp_path)" if scheme == "file" else '""',
        "test_hint": "" if scheme in {None, "file"} else f"; KVCTL_TEST_URL={scheme}://.. names the place",
    }
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UsageError(f"{folder} is there already", hint="name a new or empty folder with --into")
    new, path = not os.path.exists(folder), ""
    written: list[str] = []
    try:
        for relative, text in _templates("store" if scheme is None else "transport", package):
            path = os.path.join(folder, relative)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                file.write(filled(text, values))
            written.append(path)
    except OSError as error:
        _take_back(folder, [*written, path], new=new)
        raise cannot_write(folder, error) from error
    return written


def _take_back(folder: str, paths: Sequence[str], *, new: bool) -> None:
    """Half a package would stand in the way of a whole one."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
    for place, _, _ in os.walk(folder, topdown=False):
        if new or place != folder:
            with contextlib.suppress(OSError):
                os.rmdir(place)


def filled(text: str, values: Mapping[str, str]) -> str:
    """The template with its values."""
    return _SLOT.sub(lambda match: values[match[1]], text)


def _templates(kind: str, package: str) -> Iterator[tuple[str, str]]:
    """(path in the package's folder, template)."""
    root = importlib.resources.files("kvctl.cli.scaffold").joinpath(kind)
    for folder, place in (("", ""), ("src", f"src/{package}"), ("tests", "tests")):
        for entry in sorted(root.joinpath(folder).iterdir(), key=lambda item: item.name):
            if entry.is_file() and entry.name.endswith(".in"):
                yield os.path.join(place, entry.name.removesuffix(".in")), entry.read_text(encoding="utf-8")
    yield f"src/{package}/py.typed", ""
