"""What this plug-in needs of other plug-ins' stores, by shape: plug-ins do not import each other. Pure."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from kvctl.core.errors import UsageError
from kvctl.transports.api import ObjectInfo, Store
from kvctl.transports.wrapper import innermost

T = TypeVar("T")


class FilePlace(Protocol):
    """A store whose objects are files."""

    def path(self, key: str) -> str: ...
    def stat(self, key: str) -> ObjectInfo: ...
    def writing(self, key: str) -> AbstractContextManager[int]:
        """A descriptor of a temp file that becomes `key`, durably, when the block ends without an error."""
        ...


class Keys(Protocol):
    """What requests are signed with."""

    @property
    def access_key(self) -> str: ...
    @property
    def secret_key(self) -> str: ...
    @property
    def token(self) -> str | None: ...


class S3Access(Protocol):
    """How an S3 store is reached, with what its user said about it."""

    @property
    def settings(self) -> Any: ...  # Any: bucket, prefix, addressing, ca_bundle, anonymous, timeout of the s3 plug-in
    @property
    def region(self) -> str: ...
    @property
    def endpoints(self) -> tuple[str, ...]: ...
    def credentials(self) -> Keys | None: ...


class S3Place(Protocol):
    """A store whose objects are behind S3."""

    @property
    def url(self) -> str: ...
    @property
    def access(self) -> S3Access: ...
    def full_key(self, key: str) -> str: ...
    def stat(self, key: str) -> ObjectInfo: ...


def bare(store: Store, *wanted: str) -> Any:  # Any: one of the shapes above
    """The store inside whatever wraps it that has the attributes `wanted`. Raises UsageError."""
    inner = innermost(store)
    if all(hasattr(inner, name) for name in wanted):
        return inner
    raise UsageError(f"{store.url}: this store does not say where its objects are", cause=f"no {', '.join(wanted)}")
