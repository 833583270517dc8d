"""Objects and temp files of a directory, in order of key, a page at a time. Blocking calls, no HTTP."""

from __future__ import annotations

import contextlib
import os
import stat as stat_module
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvctl.core.errors import KvctlError, UsageError
from kvctl.node.tree import Stat, Tree, error_from, stat_of
from kvctl.transports.keys import TEMP_SUFFIX, check_key


@dataclass(frozen=True, slots=True)
class Upload:
    """A temp file: `ident` is its path in the directory, `started` in Unix nanoseconds."""

    ident: str
    key: str
    started_ns: int


def page(tree: Tree, prefix: str, after: str, limit: int) -> tuple[list[tuple[str, Stat]], bool]:
    """Up to `limit` objects behind the key `after` (empty: from the start), and whether there are more."""
    folder = prefix.rpartition("/")[0]
    if folder:
        check_key(folder)
    if "\0" in prefix:
        raise UsageError("NUL in a prefix")
    found = list(islice(_objects(tree, folder, prefix, after), limit + 1))
    return found[:limit], len(found) > limit


def uploads(tree: Tree, prefix: str) -> list[Upload]:
    """Temp files of writers, alive or dead, whose key starts with `prefix`."""
    found = []
    for path, _, names, folder in os.fwalk(tree.root, follow_symlinks=False):
        base = os.path.relpath(path, tree.root)
        for name in names:
            if not name.endswith(TEMP_SUFFIX):
                continue
            ident = name if base == "." else f"{base}/{name}"
            key = ident.removesuffix(TEMP_SUFFIX)
            if key.startswith(prefix) and _is_text(ident):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    found.append(Upload(ident, key, status.st_mtime_ns))
    return sorted(found, key=lambda upload: upload.ident)


def _objects(tree: Tree, folder: str, prefix: str, after: str) -> Iterator[tuple[str, Stat]]:
    try:
        with tree._folder(folder.split("/") if folder else []) as fd:
            with os.scandir(fd) as entries:
                # order of keys: a folder sorts as 'name/', which '-' and '.' precede and letters follow
                names = sorted(
                    ((f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name), entry.is_symlink())
                    for entry in entries
                    if not entry.name.endswith(TEMP_SUFFIX) and _is_text(entry.name)
                )
            start = f"{folder}/" if folder else ""
            for name, is_link in names:
                key = start + name
                if name.endswith("/"):
                    wanted = key.startswith(prefix) or prefix.startswith(key)
                    if wanted and (key >= after or after.startswith(key)):
                        yield from _objects(tree, key[:-1], prefix, after)
                elif key > after and key.startswith(prefix):
                    found = _linked(tree, key) if is_link else _plain(name, fd)
                    if found is not None:
                        yield key, found
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as problem:
        raise error_from(problem, folder or "/") from None


def _plain(name: str, folder: int) -> Stat | None:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return stat_of(status) if stat_module.S_ISREG(status.st_mode) else None


def _linked(tree: Tree, key: str) -> Stat | None:
    """What a link leads to, when a GET would serve it."""
    try:
        return tree.stat(key)
    except KvctlError:
        return None


def _is_text(name: str) -> bool:
    """Names that are no UTF-8 cannot be keys."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
