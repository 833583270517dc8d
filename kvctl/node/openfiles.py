"""Objects kept open for a moment: many requests for ranges of one object walk to it and format its headers once.

An entry is used only while the key still names the same file, unchanged (one `stat` per request tells), and for
`_SECONDS` at most: then the folders are walked again, with all that `Tree.open` checks. So a deleted file's space
is held a moment longer than its last reader.
"""

from __future__ import annotations

import os
import time
from typing import Final

from kvctl.node.answers import headers_of
from kvctl.node.messages import header_lines
from kvctl.node.tree import Stat, Tree

_SECONDS: Final = 1.0
_MOST: Final = 256


class OpenFile:
    """`lines`, `etag`: what an answer says of the whole object, and of a part, as header lines. `warm`: where windows
    start that were found in the page cache while this entry lived. `release` once for each `OpenFiles.take`.
    """

    __slots__ = ("_gone", "_users", "etag", "fd", "identity", "lines", "stat", "until", "warm")

    def __init__(self, fd: int, stat: Stat, identity: tuple[int, ...], until: float) -> None:
        self.fd = fd
        self.stat = stat
        self.identity = identity
        self.until = until
        self.lines = header_lines(headers_of(stat))
        self.etag = header_lines(headers_of(stat, ranges=False, times=False))
        self.warm: set[int] = set()
        self._users = 0
        self._gone = False

    def hold(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        self._close()

    def drop(self) -> None:
        """No more users will come."""
        self._gone = True
        self._close()

    def _close(self) -> None:
        if self._gone and not self._users and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class OpenFiles:
    """Belongs to the event loop's thread."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._files: dict[str, OpenFile] = {}

    def take(self, key: str) -> OpenFile:
        """The object, open; the caller releases it. Raises KvctlError."""
        found = self._files.get(key)
        if found is not None:
            if time.monotonic() < found.until and self._tree.identity(key) == found.identity:
                found.hold()
                return found
            del self._files[key]
            found.drop()
        found = self._open(key)
        if len(self._files) >= _MOST:
            self._files.pop(next(iter(self._files))).drop()
        self._files[key] = found
        found.hold()
        return found

    def _open(self, key: str) -> OpenFile:
        fd, stat, identity = self._tree.open_identified(key)
        return OpenFile(fd, stat, identity, time.monotonic() + _SECONDS)

    def sweep(self) -> None:
        """Close what is not used any more."""
        now = time.monotonic()
        for key in [key for key, file in self._files.items() if file.until <= now]:
            self._files.pop(key).drop()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].drop()
