"""Every error that kvctl raises on purpose, one tree.

    KvctlError                 1   failure (a bug of ours when nothing more precise fits)
    ├── UsageError             2   wrong arguments or configuration
    │   └── ConfigError        2   wrong configuration
    ├── PartialError           3   partial result, or a budget missed
    ├── NotFoundError          4   a name, key or glob matches nothing
    ├── AuthError              5   credentials missing, wrong, expired or not allowed
    ├── TransientError         6   another try may work (only this one means: run it again)
    │   ├── ThrottledError     6   the server asked to slow down (503 SlowDown, 429)
    │   ├── MemberDownError    6   a member or endpoint does not answer
    │   ├── StalledError       6   no progress within the deadline
    │   └── ConflictError      6   a conditional put or delete lost its race
    ├── IntegrityError         7   bytes are not what they should be
    │   ├── VersionChangedError 7  an object was replaced while it was read
    │   ├── SizeMismatchError  7   an object is shorter or longer than it must be
    │   └── FormatError        7   a file is malformed
    ├── IncompatibleError      8   well-formed, but does not fit here
    ├── CapacityError          9   no space, no memory, quota
    ├── EnvError              10   environment or plug-in: missing library, TLS, permissions of the machine
    ├── SwapFailedError       11   swap failed, the old weights serve
    └── NothingServesError    12   swap failed, nothing serves

`retryable` says whether the same operation may succeed when it is tried again *now*; the executor and the
retry wrapper look at nothing else. Nothing outside `kvctl.cli` prints an error or exits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class KvctlError(Exception):
    """What went wrong, why, and what to do about it.

    `what` is one sentence that names the file, key or member. `cause` is the fact behind it (a status, two
    numbers). `hint` tells the next step. `details` holds the same facts for machines (JSON-serialisable).
    """

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "failure"

    def __init__(
        self,
        what: str,
        *,
        cause: str | None = None,
        hint: str | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.hint = hint
        self.details: dict[str, object] = dict(details or {})

    def __str__(self) -> str:
        return f"{self.what}: {self.cause}" if self.cause else self.what


class UsageError(KvctlError):
    exit_code = 2
    code = "usage"


class ConfigError(UsageError):
    code = "config"


class PartialError(KvctlError):
    exit_code = 3
    code = "partial"


class NotFoundError(KvctlError):
    exit_code = 4
    code = "not_found"


class AuthError(KvctlError):
    exit_code = 5
    code = "auth"


class TransientError(KvctlError):
    exit_code = 6
    retryable = True
    code = "transient"


class ThrottledError(TransientError):
    code = "throttled"


class MemberDownError(TransientError):
    code = "member_down"


class StalledError(TransientError):
    retryable = False
    code = "stalled"


class ConflictError(TransientError):
    # Trying the same conditional put again cannot win: the caller must read again first.
    retryable = False
    code = "conflict"


class IntegrityError(KvctlError):
    exit_code = 7
    code = "integrity"


class VersionChangedError(IntegrityError):
    code = "changed"


class SizeMismatchError(IntegrityError):
    code = "size"


class FormatError(IntegrityError):
    code = "format"


class IncompatibleError(KvctlError):
    exit_code = 8
    code = "incompatible"


class CapacityError(KvctlError):
    exit_code = 9
    code = "capacity"


class EnvError(KvctlError):
    exit_code = 10
    code = "environment"


class SwapFailedError(KvctlError):
    exit_code = 11
    code = "swap_failed"


class NothingServesError(KvctlError):
    exit_code = 12
    code = "nothing_serves"


class InterruptedRunError(KvctlError):
    """A signal ended the run in order: `signum` is SIGINT (130) or SIGTERM (143)."""

    exit_code = 130
    code = "interrupted"

    def __init__(self, what: str, *, signum: int, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.signum = signum
