"""What objects were seen to be, and when: NIXL neither sends a condition nor shows an answer's headers, so size and
version are what a HEAD says before and after. Reads of one object that end together share the HEAD after them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvctl.core.errors import KvctlError
from kvctl.transports.api import ObjectInfo

_MOST: Final = 4096  # objects remembered


@dataclass(frozen=True, slots=True)
class _Seen:
    asked: float
    info: ObjectInfo | None
    error: KvctlError | None


class Witness:
    """Thread-safe. `stat` asks the server; its errors say what is wrong with a key, bucket, credentials or server."""

    def __init__(self, stat: Callable[[str], ObjectInfo]) -> None:
        self._stat = stat
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._asking: set[str] = set()
        self._changed = threading.Condition()

    def recent(self, key: str) -> ObjectInfo | None:
        """What the object last was, without asking."""
        with self._changed:
            seen = self._seen.get(key)
            return seen.info if seen is not None else None

    def since(self, key: str, moment: float) -> tuple[ObjectInfo, int]:
        """What the object was at `moment` (monotonic seconds) or later, and how many requests this call made for it.
        Raises KvctlError.
        """
        with self._changed:
            while True:
                seen = self._seen.get(key)
                if seen is not None and seen.asked >= moment:
                    return _told(seen), 0
                if key not in self._asking:
                    self._asking.add(key)
                    break
                self._changed.wait()
        asked = time.monotonic()
        found = _Seen(asked, None, None)
        try:
            found = _Seen(asked, self._stat(key), None)
        except KvctlError as error:
            found = _Seen(asked, None, error)
        finally:
            with self._changed:
                self._asking.discard(key)
                self._seen[key] = found
                self._seen.move_to_end(key)
                while len(self._seen) > _MOST:
                    self._seen.popitem(last=False)
                self._changed.notify_all()
        return _told(found), 1


def _told(seen: _Seen) -> ObjectInfo:
    if seen.error is not None:
        # each of those who share it gets its own: whoever reports one changes it
        error = seen.error
        raise type(error)(error.what, cause=error.cause, hint=error.hint, details=error.details) from None
    if seen.info is None:
        raise AssertionError("a look that brought neither an object nor an error")
    return seen.info
