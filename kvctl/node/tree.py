"""The node's directory: objects are files, and no key, link or race leads out of it. Blocking calls, no HTTP.

Paths are walked folder by folder from a descriptor of the root with O_NOFOLLOW. A link is followed for reading
only, and only when what it resolves to is inside the root. Files are written nameless (O_TMPFILE), then synced, linked
under a temp name and renamed while the folder is locked (flock): conditions are decided there. So a node that is
killed leaves nothing, or, between the last two steps, a whole file under its temp name: an unfinished upload. Versions
and temp names are those of the `file` plug-in: mtime (ns), inode, size.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat as stat_module
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvctl.core.errors import (
    AuthError,
    CapacityError,
    ConflictError,
    EnvError,
    KvctlError,
    NotFoundError,
    TransientError,
    UsageError,
)
from kvctl.transports.keys import TEMP_SUFFIX, check_key
from kvctl.transports.links import link_open

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block the open
_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NAME_BYTES: Final = 255
_KEY_BYTES: Final = 1024  # as S3


@dataclass(frozen=True, slots=True)
class Stat:
    """An object: size in bytes, version, modification time in Unix nanoseconds."""

    size: int
    version: str
    modified_ns: int


def stat_of(status: os.stat_result) -> Stat:
    version = f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"
    return Stat(status.st_size, version, status.st_mtime_ns)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_name(key: str) -> list[str]:
    """The parts of a key that can be a file here. Raises UsageError."""
    parts = check_key(key).split("/")
    size = len(key.encode())
    if size > _KEY_BYTES:
        raise UsageError(f"a key of {size} bytes", hint=f"at most {_KEY_BYTES}")
    if size > _NAME_BYTES and any(len(part.encode()) > _NAME_BYTES for part in parts):
        raise UsageError(f"{key!r} is not a key here: a part has more than {_NAME_BYTES} bytes")
    if parts[-1].endswith(TEMP_SUFFIX):
        raise UsageError(f"{key!r} is not a key: {TEMP_SUFFIX} is for files being written")
    return parts


def error_from(problem: OSError, key: str) -> KvctlError:
    """The kvctl error for a system error on an object."""
    reason = os.strerror(problem.errno) if problem.errno else str(problem)
    code = problem.errno
    if code in {errno.ENOENT, errno.ENOTDIR}:
        return NotFoundError(f"{key}: no such object")
    if code in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP}:
        return AuthError(f"{key}: the node may not use it", cause=reason)
    if code in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return CapacityError(f"{key}: no space for it", cause=reason)
    if code in {errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}:
        return UsageError(f"{key}: an object and a folder cannot have one name", cause=reason)
    if code in {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
        return TransientError(f"{key}: cannot be read or written now", cause=reason)
    return EnvError(f"{key}: {reason}")


class Tree:
    """Thread-safe."""

    def __init__(self, root: str) -> None:
        """Raises EnvError when `root` is no directory that can be read."""
        self.root = os.path.realpath(root)
        try:
            self._root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as problem:
            raise EnvError(f"cannot serve {root}", cause=problem.strerror, hint="name an existing directory") from None
        self.in_memory = _file_system(os.fstat(self._root).st_dev) in _MEMORY
        self._stamp = threading.Lock()
        self._last_ns = 0

    def close(self) -> None:
        os.close(self._root)

    def open(self, key: str) -> tuple[int, Stat]:
        """A descriptor of the object, which the caller closes. Raises KvctlError."""
        return self.open_identified(key)[:2]

    def open_identified(self, key: str) -> tuple[int, Stat, tuple[int, ...]]:
        """As `open`, and what `identity` says for as long as the key names this file and it is unchanged."""
        parts = check_name(key)
        try:
            fd = self._open_inside(parts)
        except OSError as problem:
            raise error_from(problem, key) from None
        status = os.fstat(fd)
        if not stat_module.S_ISREG(status.st_mode):
            os.close(fd)
            raise NotFoundError(f"{key}: no such object")
        return fd, stat_of(status), _identity(status)

    def identity(self, key: str) -> tuple[int, ...] | None:
        """Tells a file that was opened before from any other, or None. It opens nothing, so links on the way do no
        harm: they can only lead to that same file.
        """
        try:
            return _identity(os.stat(key, dir_fd=self._root, follow_symlinks=False))
        except OSError:
            return None

    def stat(self, key: str) -> Stat:
        fd, found = self.open(key)
        os.close(fd)
        return found

    def _open_inside(self, parts: list[str]) -> int:
        try:
            return self._walk_open(parts)
        except OSError as problem:
            # a link shows as ELOOP where a file was wanted, as ENOTDIR where a folder was
            if problem.errno not in {errno.ELOOP, errno.ENOTDIR}:
                raise
            resolved = os.path.realpath(os.path.join(self.root, *parts))
            prefix = self.root.rstrip("/") + "/"
            if resolved == os.path.join(self.root, *parts):
                raise
            if not resolved.startswith(prefix):
                raise OSError(errno.ELOOP, "a link out of the directory") from None
            return self._walk_open(resolved[len(prefix) :].split("/"))

    def _walk_open(self, parts: list[str]) -> int:
        current = self._root  # as `_folder` does, for the many reads without its generator
        try:
            for part in parts[:-1]:
                inner = os.open(part, _FOLDER, dir_fd=current)
                if current != self._root:
                    os.close(current)
                current = inner
            return os.open(parts[-1], _FILE, dir_fd=current)
        finally:
            if current != self._root:
                os.close(current)

    @contextlib.contextmanager
    def _folder(self, parts: list[str], *, create: bool = False) -> Iterator[int]:
        """A descriptor of a folder inside the root, no link on the way. Raises OSError."""
        current = self._root
        try:
            for part in parts:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=current)
                except FileNotFoundError:
                    if not create:
                        raise
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=current)
                        os.fsync(current)
                    inner = os.open(part, _FOLDER, dir_fd=current)
                if current != self._root:
                    os.close(current)
                current = inner
            yield current
        finally:
            if current != self._root:
                os.close(current)

    def create(self, key: str, size: int) -> Draft:
        """A nameless file of `size` bytes, allocated. Raises KvctlError (CapacityError when it does not fit)."""
        parts = check_name(key)
        try:
            with self._folder(parts[:-1], create=True) as folder:
                draft = Draft(self, key, parts, *_temp_file(folder, parts[-1]))
        except OSError as problem:
            raise _as_write_error(problem, key) from None
        try:
            if size:
                _allocate(draft.fd, size)
        except OSError as problem:
            draft.close()
            raise error_from(problem, key) from None
        return draft

    def next_mtime(self) -> int:
        """Nanoseconds that no other object of this node was given: the kernel's own clock ticks too slowly to tell
        two versions apart."""
        with self._stamp:
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            return self._last_ns

    def copy(self, source: str, key: str, if_version: str) -> tuple[Stat, bool]:
        """Give `key` what `source` holds: as another name of the file, or (False) as a copy where it can have none.
        Durable when it returns. Raises ConflictError when the source is at another version.
        """
        fd, found = self.open(source)
        try:
            if found.version != if_version:
                raise ConflictError(f"{source} is not at version {if_version} any more")
            os.fsync(fd)  # it may be another program's
            if self._link(fd, key):
                return found, True
            draft = self.create(key, found.size)
            try:
                _copy_bytes(fd, draft.fd, found.size)
                if stat_of(os.fstat(fd)) != found:
                    raise ConflictError(f"{source} was changed while it was copied")
                return draft.commit(), False
            finally:
                draft.close()
        except OSError as problem:
            raise _as_write_error(problem, key) from None
        finally:
            os.close(fd)

    def _link(self, fd: int, key: str) -> bool:
        """Another name of an open file, if it can have one. Raises OSError."""
        parts = check_name(key)
        temp = _temp_name(parts[-1])
        with self._folder(parts[:-1], create=True) as folder, _locked(folder):
            return not link_open(fd, folder, temp, parts[-1])

    def delete(self, key: str, if_version: str | None = None) -> None:
        """Raises ConflictError when the object is at another version; a missing one is no error."""
        parts = check_name(key)
        try:
            with self._folder(parts[:-1]) as folder, _locked(folder):
                if if_version is not None:
                    _check(folder, parts[-1], key, if_absent=False, if_version=if_version)
                os.unlink(parts[-1], dir_fd=folder)
        except OSError as problem:
            if problem.errno in {errno.ENOENT, errno.ENOTDIR}:
                if if_version is not None:
                    raise ConflictError(f"{key} is not at version {if_version} any more") from None
                return
            raise error_from(problem, key) from None

    def abort(self, ident: str) -> None:
        """Remove the temp file `ident`, as `uploads` names it. Raises UsageError for what is none."""
        if not ident.endswith(TEMP_SUFFIX):
            raise UsageError(f"{ident!r} is not an unfinished write")
        check_key(ident)
        parts = ident.split("/")
        with contextlib.suppress(OSError), self._folder(parts[:-1]) as folder:
            os.unlink(parts[-1], dir_fd=folder)

    def free_bytes(self) -> int:
        status = os.fstatvfs(self._root)
        return status.f_bavail * status.f_frsize


class Draft:
    """A file being written; `commit` names it, `close` without it leaves nothing."""

    def __init__(self, tree: Tree, key: str, parts: list[str], fd: int, temp: str | None) -> None:
        self.fd = fd
        self._tree = tree
        self._key = key
        self._parts = parts
        self._temp = temp

    def commit(self, *, if_absent: bool = False, if_version: str | None = None) -> Stat:
        """Durable under its key when it returns. Raises ConflictError when the condition does not hold."""
        try:
            moment = self._tree.next_mtime()
            os.utime(self.fd, ns=(moment, moment))
            os.fsync(self.fd)
            found = stat_of(os.fstat(self.fd))
            name = self._parts[-1]
            with self._tree._folder(self._parts[:-1], create=True) as folder:
                with _locked(folder):
                    if if_absent or if_version is not None:
                        _check(folder, name, self._key, if_absent=if_absent, if_version=if_version)
                    temp = self._temp
                    if temp is None:
                        temp = self._temp = _temp_name(name)
                        os.link(f"/proc/self/fd/{self.fd}", temp, dst_dir_fd=folder, follow_symlinks=True)
                    os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
                    self._temp = None
                os.fsync(folder)
        except OSError as problem:
            raise _as_write_error(problem, self._key) from None
        return found

    def close(self) -> None:
        """Free the descriptor, and what has no name yet."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if self._temp is not None:
            with contextlib.suppress(OSError), self._tree._folder(self._parts[:-1]) as folder:
                os.unlink(self._temp, dir_fd=folder)


def _file_system(device: int) -> str:
    """The type of the file system with this device number, as the kernel calls it; empty when it is not listed."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except OSError:
        pass
    return ""


def _as_write_error(problem: OSError, key: str) -> KvctlError:
    if problem.errno == errno.ENOTDIR:
        return UsageError(f"{key}: an object and a folder cannot have one name", cause="a part of it is an object")
    return error_from(problem, key)


def _temp_name(name: str) -> str:
    # the name is cut, not its folder: 255 bytes is the limit of a name
    short = name.encode()[:200].decode(errors="ignore")
    return f"{short}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}"


def _temp_file(folder: int, name: str) -> tuple[int, str | None]:
    try:
        return os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o644, dir_fd=folder), None
    except OSError as problem:
        if problem.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}:
            raise
    temp = _temp_name(name)  # NFS and some FUSE file systems: a name from the start
    return os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder), temp


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as problem:
        if problem.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            raise


def _copy_bytes(source: int, target: int, size: int) -> None:
    """Raises OSError."""
    done = 0
    while done < size:
        moved = os.sendfile(target, source, done, min(size - done, 64 << 20))
        if moved == 0:
            raise OSError(errno.EIO, "the file ended early")
        done += moved


@contextlib.contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Alone among all that rename or delete in this folder, `file` stores of other processes included."""
    # a descriptor of its own: flock is per open file
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _check(folder: int, name: str, key: str, *, if_absent: bool, if_version: str | None) -> None:
    try:
        version: str | None = stat_of(os.stat(name, dir_fd=folder, follow_symlinks=False)).version
    except FileNotFoundError:
        version = None
    if if_absent and version is not None:
        raise ConflictError(f"{key} exists already")
    if if_version is not None and version != if_version:
        raise ConflictError(f"{key} is not at version {if_version} any more")
