"""The `file://` store: objects are files; a write is temp, fsync, rename, fsync of the folder.

Conditional puts are atomic among kvctl's writers on one host and on file systems with working `flock` (NFSv4,
Lustre with -o flock, ext4, xfs): the condition is checked and the rename done under a lock on the folder. A
version is mtime (ns), inode and size: a rename always brings a new inode, a rewrite in place a new mtime.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat as stat_module
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NoReturn

from kvctl.core.errors import (
    AuthError,
    CapacityError,
    ConflictError,
    EnvError,
    IncompatibleError,
    KvctlError,
    NotFoundError,
    TransientError,
    UsageError,
)
from kvctl.transports.api import Copied, ObjectInfo, StoreCapabilities, StoreConfig, UploadInfo
from kvctl.transports.keys import TEMP_SUFFIX
from kvctl.transports.links import link_open
from kvctl_file.paths import check_key, root_of

READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block the open
_EXT_OWN = "lost+found"  # the file system's own folder at its root
_LATEST = 32_503_680_000.0  # the year 3000


def version_of(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"


def error_from(problem: OSError, path: str) -> KvctlError:
    """The kvctl error for a system error on `path`."""
    reason = problem.strerror or str(problem)
    code = problem.errno
    if code in {errno.ENOENT, errno.ENOTDIR}:
        return NotFoundError(f"{path} does not exist")
    if code in {errno.EACCES, errno.EPERM}:
        return AuthError(f"{path} is not accessible", cause=reason, hint="check its owner and mode")
    if code == errno.EROFS:
        return AuthError(f"{path} is on a read-only file system", hint="choose a writable place")
    if code in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return CapacityError(f"no space for {path}", cause=reason, hint="free space or choose another store")
    if code in {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN}:
        return TransientError(f"{path} cannot be read or written now", cause=reason)
    return EnvError(f"{path}: {reason}")


def raise_from(problem: OSError, path: str) -> NoReturn:
    raise error_from(problem, path) from problem


class FileStore:
    """See `kvctl.transports.api.Store`."""

    capabilities = StoreCapabilities(conditional_put=True, conditional_delete=True, uploads=True, copy=True)

    def __init__(self, url: str) -> None:
        self.root = root_of(url)
        self.url = f"file://{self.root}"

    def path(self, key: str) -> str:
        return os.path.join(self.root, check_key(key))

    def stat(self, key: str) -> ObjectInfo:
        path = self.path(key)
        try:
            status = os.stat(path)
        except OSError as problem:
            raise_from(problem, path)
        if not stat_module.S_ISREG(status.st_mode):
            raise NotFoundError(f"{path} is not a file")
        return _info(key, status)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        yield from self._walk(folder, prefix)

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                # order of keys: a folder sorts as 'name/', which '-' and '.' precede and letters follow
                found = sorted(
                    ((f"{entry.name}/" if _is_dir(entry) else entry.name), entry.name)
                    for entry in entries
                    if not entry.name.endswith(TEMP_SUFFIX)
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as problem:
            if problem.errno == errno.ELOOP or (folder == _EXT_OWN and isinstance(problem, PermissionError)):
                return
            raise_from(problem, os.path.join(self.root, folder))
        for shown, name in found:
            key = f"{folder}/{name}" if folder else name
            if shown.endswith("/"):
                deeper = f"{key}/"
                if deeper.startswith(prefix) or prefix.startswith(deeper):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                status = _stat(os.path.join(self.root, key))
                if status is not None:
                    yield _info(key, status)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        path = self.path(key)
        try:
            fd = os.open(path, READ)
        except OSError as problem:
            raise_from(problem, path)
        try:
            status = os.fstat(fd)
            if not stat_module.S_ISREG(status.st_mode):
                raise NotFoundError(f"{path} is not a file")
            wanted = status.st_size - start if length is None else length
            parts = []
            while wanted > 0 and (part := os.pread(fd, wanted, start)):
                parts.append(part)
                start += len(part)
                wanted -= len(part)
            return b"".join(parts)
        except OSError as problem:
            raise_from(problem, path)
        finally:
            os.close(fd)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        with self.writing(key, if_absent=if_absent, if_version=if_version) as fd:
            view = memoryview(data).cast("B") if len(data) else memoryview(b"")
            written = 0
            while written < len(view):
                written += os.write(fd, view[written:])
        return self.stat(key)

    @contextlib.contextmanager
    def writing(self, key: str, *, if_absent: bool = False, if_version: str | None = None) -> Iterator[int]:
        """A descriptor of a temp file that becomes `key`, durably, when the block ends without an error."""
        path = self.path(key)
        folder, temp = os.path.dirname(path), _temp_of(path)
        try:
            _make_folder(folder)
            fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as problem:
            raise_from(problem, path)
        try:
            try:
                yield fd
                os.fsync(fd)
            finally:
                os.close(fd)
            with _folder_lock(folder) as folder_fd:
                if if_absent or if_version is not None:
                    self._check_condition(path, key, if_absent=if_absent, if_version=if_version)
                os.rename(temp, path)
                fcntl.flock(folder_fd, fcntl.LOCK_UN)  # the next one need not wait for the disk
                os.fsync(folder_fd)
        except OSError as problem:
            _unlink(temp)
            raise_from(problem, path)
        except BaseException:
            _unlink(temp)
            raise

    def copy(self, source: str, key: str, *, if_version: str) -> Copied:
        """A second name of the file: whoever edits one in place, which kvctl never does, edits the other. Raises
        IncompatibleError where the file system has no links, or the file too many.
        """
        origin, path = self.path(source), self.path(key)
        folder, temp = os.path.dirname(path), _temp_of(path)
        try:
            _make_folder(folder)
            fd = os.open(origin, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise_from(problem, origin)
        try:
            status = os.fstat(fd)
            if version_of(status) != if_version:
                raise ConflictError(f"{self.url}: {source} is not at version {if_version} any more")
            os.fsync(fd)  # it may be another program's
            with _folder_lock(folder) as folder_fd:
                why = link_open(fd, folder_fd, os.path.basename(temp), os.path.basename(path))
        except OSError as problem:
            raise_from(problem, path)
        finally:
            os.close(fd)
        if why:
            raise IncompatibleError(f"{origin} can have no second name", cause=why)
        return Copied(_info(key, status), shared=True)

    def _check_condition(self, path: str, key: str, *, if_absent: bool, if_version: str | None) -> None:
        try:
            version: str | None = version_of(os.stat(path))
        except FileNotFoundError:
            version = None
        if if_absent and version is not None:
            raise ConflictError(f"{self.url}: {key} exists already")
        if if_version is not None and version != if_version:
            raise ConflictError(f"{self.url}: {key} is not at version {if_version} any more")

    def delete(self, keys: Sequence[str], *, if_version: str | None = None) -> None:
        if if_version is not None and len(keys) != 1:
            raise UsageError("a conditional delete takes one key")
        for key in keys:
            path = self.path(key)
            try:
                if if_version is None:
                    os.unlink(path)
                else:
                    with _folder_lock(os.path.dirname(path)):
                        self._check_condition(path, key, if_absent=False, if_version=if_version)
                        os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as problem:
                raise_from(problem, path)

    def now(self) -> datetime:
        """The host's clock; on shared file systems keep hosts in sync (NTP), as their mtimes need it too."""
        return datetime.now(UTC)

    def uploads(self) -> Iterator[UploadInfo]:
        """Temp files of writers, alive or dead: whoever aborts one must know that its writer is gone."""
        for folder, _, names in os.walk(self.root):
            for name in sorted(names):
                if name.endswith(TEMP_SUFFIX):
                    path = os.path.join(folder, name)
                    status = _stat(path)
                    if status is not None:
                        relative = os.path.relpath(path, self.root)
                        yield UploadInfo(relative.removesuffix(TEMP_SUFFIX), relative, _moment(status.st_mtime))

    def abort(self, upload: UploadInfo) -> None:
        check_key(upload.id.removesuffix(TEMP_SUFFIX))
        if not upload.id.endswith(TEMP_SUFFIX):
            raise UsageError(f"{upload.id!r} is not an unfinished write")
        _unlink(os.path.join(self.root, upload.id))

    def close(self) -> None:
        return


def _make_folder(path: str) -> None:
    """Raises UsageError when a file is in the way."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as problem:
        raise UsageError(
            f"{path} cannot be a folder: a file is in its way", hint="choose another place, or move the file"
        ) from problem


def _temp_of(path: str) -> str:
    # the name of the file is cut, not its folder: 255 bytes is the limit of a name
    short = os.path.basename(path).encode()[:200].decode(errors="ignore")
    return os.path.join(os.path.dirname(path), f"{short}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}")


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


@contextlib.contextmanager
def _folder_lock(folder: str) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _stat(path: str) -> os.stat_result | None:
    """Of a file that holds bytes; None for what went meanwhile, for a link to nothing, a pipe, a device."""
    try:
        status = os.stat(path)
    except OSError as problem:
        if problem.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return None
        raise_from(problem, path)
    return status if stat_module.S_ISREG(status.st_mode) else None


def _moment(seconds: float) -> datetime:
    """A file's time; one that no date can hold is the nearest that computing with it leaves a date."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LATEST), UTC)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, version_of(status), _moment(status.st_mtime))


def open_store(config: StoreConfig) -> FileStore:
    if config.endpoints or config.options:
        raise UsageError(f"{config.url}: a file store takes no endpoints and no options")
    return FileStore(config.url)
