"""The one place that turns whatever a command raised into an error of our tree and an exit code."""

from __future__ import annotations

import errno
import os

import click

from kvctl.core.errors import (
    CapacityError,
    EnvError,
    InterruptedRunError,
    KvctlError,
    NotFoundError,
    TransientError,
    UsageError,
)

_CAPACITY = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG}
_NETWORK = {
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH,
}  # fmt: skip
_ENVIRONMENT = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EISDIR, errno.ENOTDIR, errno.EEXIST,
    errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG, errno.EBUSY, errno.EXDEV, errno.EIO, errno.ESTALE, errno.ENXIO,
    errno.ENODEV, errno.ENOTSUP, errno.ENOSYS, errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EPIPE,
}  # fmt: skip
_THREADS = "can't start new thread"  # CPython's words


def exit_code(error: KvctlError) -> int:
    """The error's own, or 128 + the signal that ended the run."""
    if isinstance(error, InterruptedRunError):
        return 128 + error.signum
    return error.exit_code


def as_kvctl_error(error: BaseException) -> KvctlError | None:
    """An error of our tree for what a person can act on; None for what only a bug explains."""
    if isinstance(error, KvctlError):
        return error
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "kvctl"
        notes = getattr(error, "__notes__", [])
        hint = notes[0] if notes else f"see `{path} --help`"
        return UsageError(error.format_message().rstrip("."), hint=hint)
    if isinstance(error, click.ClickException):
        return UsageError(error.format_message())
    if isinstance(error, MemoryError):
        return CapacityError("memory ran out", hint="lower --max-in-flight, or load less")
    if isinstance(error, RuntimeError) and _THREADS in str(error):
        return CapacityError("no more threads can be started", hint="raise the limit of processes (ulimit -u)")
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return UsageError("a name is no text in UTF-8", cause=ascii(error.object[:200]), hint="rename it")
    if isinstance(error, UnicodeError) and "idna" in str(error):
        return UsageError("an address names no host", cause=str(error))
    if isinstance(error, ImportError):
        return EnvError("a library cannot be loaded", cause=str(error), hint="`kvctl doctor` says what is missing")
    if isinstance(error, OSError) and error.errno is not None:
        return _from_os(error)
    return None


def _gone(error: OSError) -> EnvError:
    """What "no such file" means where none is named."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return EnvError("the current directory is gone", hint="go to one that exists")
    return EnvError("the operating system lacks something", cause=error.strerror)


def _from_os(error: OSError) -> KvctlError | None:
    name = error.filename if isinstance(error.filename, str) else None
    what = f"cannot use {name}" if name else "the operating system refused"
    cause = f"{os.strerror(error.errno or 0)} ({errno.errorcode.get(error.errno or 0, error.errno)})"
    if error.errno in _CAPACITY:
        return CapacityError(what, cause=cause)
    if error.errno in _ENVIRONMENT:
        return EnvError(what, cause=cause)
    if error.errno in _NETWORK:
        return TransientError(what, cause=cause)
    if error.errno == errno.ENOENT:
        if name:
            return NotFoundError(f"{name} does not exist")
        return _gone(error)
    return None
