"""Another name for a file that is open, in a folder that is open: how stores over a file system copy without a byte."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

# what file systems without links, or with too many of this file, say
_NO_LINK: Final = frozenset({errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS})


def link_open(fd: int, folder: int, temp: str, name: str) -> str:
    """Make `name` in `folder` another name of the file behind `fd`, whatever its own means by now; by way of `temp`, so
    that what had the name is replaced in one step. Durable when it returns. Why it cannot have one; empty when it has.
    Raises OSError for all else. Whoever renames in this folder is kept out by the caller.
    """
    try:
        os.link(f"/proc/self/fd/{fd}", temp, dst_dir_fd=folder, follow_symlinks=True)
        os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as problem:
        if problem.errno not in _NO_LINK:
            raise
        return problem.strerror or "no links here"
    finally:
        with contextlib.suppress(OSError):  # renaming one name of a file to another one of it leaves both
            os.unlink(temp, dir_fd=folder)
    os.fsync(folder)
    return ""
