"""A file that appears under its name only when it is whole and durable, whatever else writes there at the same time."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

from kvctl.memory.files import cannot_write

# Names of what is open already: a rename would replace the name, not what it leads to.
_DESCRIPTORS = ("/dev", "/dev/fd", "/proc/self/fd")


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends without an error; of several writers the last one wins.
    A link stays one, and what is no regular file (a device, a pipe) is written as it is. Raises what `cannot_write`
    says.
    """
    target = os.path.realpath(path)
    temp = os.path.join(os.path.dirname(target), f".kvctl-{secrets.token_hex(8)}.kvctl-tmp")
    try:
        if _is_special(path):
            with open(path, "wb") as file:
                yield file
            return
        try:
            with open(temp, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
    except OSError as error:
        raise cannot_write(path, error) from error


def _is_special(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) or os.path.dirname(os.path.abspath(path)) in _DESCRIPTORS
