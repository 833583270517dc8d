"""One owner of maintenance (gc, repair, rebalance, drain) at a time: a lock with expiry and a fencing token.

`gc/owner.json` at its home member, changed by conditional puts only. The token grows with every taking, and is
never reset. The lock saves work; nothing that gc does depends on it for safety.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, Self

from kvctl.core.errors import ConflictError, FormatError, KvctlError, NotFoundError
from kvctl.repo import metadata
from kvctl.repo.layout import OWNER
from kvctl.repo.moments import parse_moment
from kvctl.repo.process import identity, is_gone

if TYPE_CHECKING:
    from kvctl.repo.repo import Repo

TTL: Final = 600.0


class Owner:
    """The held lock; a context manager that gives it back. `token` is the fencing token."""

    def __init__(self, repo: Repo, label: str, ttl: float) -> None:
        self._member = metadata.require_home(repo, OWNER, f"start {label}: cannot lock")
        self._label = label
        self._ttl = ttl
        self._id = secrets.token_hex(8)
        self._version = ""
        self._renewed = 0.0
        self.token = 0

    @classmethod
    def take(cls, repo: Repo, label: str, *, ttl: float = TTL) -> Self:
        """Raises ConflictError while another run owns the repo's maintenance, MemberDownError when the lock's
        home is down.
        """
        owner = cls(repo, label, ttl)
        store = owner._member.store
        try:
            version: str | None = store.stat(OWNER).version
            held = _parse(store.get(OWNER))
        except NotFoundError:
            version, held = (
                None,
                {"token": 0, "expires": datetime.fromtimestamp(0, UTC).isoformat(), "label": "", "process": ""},
            )
        expires = parse_moment(held["expires"])
        if expires > store.now() and not is_gone(str(held["process"])):
            raise ConflictError(
                f"{held['label']} is running on this repo",
                cause=f"its lock expires at {expires:%Y-%m-%d %H:%M:%S} UTC",
                hint="wait for it to end; the lock of a run that died expires by itself",
            )
        owner.token = int(str(held["token"])) + 1
        owner._put(store.now() + timedelta(seconds=ttl), version)
        return owner

    def _put(self, expires: datetime, version: str | None) -> None:
        started = time.monotonic()
        document = {
            "owner": self._id,
            "label": self._label,
            "token": self.token,
            "expires": expires.isoformat(),
            "process": identity(),
            "nonce": secrets.token_hex(4),
        }
        data = json.dumps(document).encode()
        info = self._member.store.put(OWNER, data, if_absent=version is None, if_version=version)
        self._version = info.version
        self._renewed = started

    def keep(self) -> None:
        """Renew the lock when a third of its time is gone. Raises ConflictError when another run took it."""
        if time.monotonic() - self._renewed > self._ttl / 3:
            self._put(self._member.store.now() + timedelta(seconds=self._ttl), self._version)

    def release(self) -> None:
        with contextlib.suppress(KvctlError):  # it expires by itself
            self._put(datetime.fromtimestamp(0, UTC), self._version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _parse(data: bytes) -> dict[str, object]:
    try:
        document = json.loads(data)
        parse_moment(document["expires"])
        int(str(document["token"]))
        return {name: document[name] for name in ("token", "expires", "label", "process")}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as problem:
        raise FormatError(f"{OWNER} is malformed", cause=str(problem), hint=f"remove {OWNER}") from problem
