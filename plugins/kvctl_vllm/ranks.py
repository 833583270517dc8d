"""KV of several tensor-parallel ranks on one host, brought together for a store: each rank leaves its heads in shared
memory, and rank 0 makes a session of them. No collective operation, so no step waits for it. Ranks on other hosts
cannot be collected so: their sessions are not stored, and the log says it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

SHM: Final = "/dev/shm"  # noqa: S108 - POSIX shared memory lives there
PATIENCE: Final = 60.0  # seconds for the other ranks; as long, what nobody fetched is kept
POLL: Final = 0.005


class Exchange:
    """`engine`: one name for all ranks of an engine, and no other engine."""

    def __init__(self, engine: str, rank: int) -> None:
        self._engine = hashlib.sha256(engine.encode()).hexdigest()[:16]
        self._rank = rank
        self._given: deque[tuple[float, str]] = deque()

    def _path(self, request: str, rank: int) -> str:
        name = hashlib.sha256(request.encode()).hexdigest()[:24]
        return os.path.join(SHM, f"kvctl-kv-{self._engine}-{name}-{rank}")

    def give(self, request: str, parts: Sequence[memoryview]) -> None:
        """The bytes of this rank, for rank 0 to take. Raises OSError."""
        self.tidy(time.monotonic() - PATIENCE)
        path = self._path(request, self._rank)
        temp = f"{path}.part"
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for part in parts:
                view = part
                while view:
                    view = view[os.write(descriptor, view) :]
        except BaseException:
            os.unlink(temp)
            raise
        finally:
            os.close(descriptor)
        os.rename(temp, path)
        self._given.append((time.monotonic(), path))

    @contextmanager
    def taken(self, request: str, rank: int, nbytes: int) -> Iterator[memoryview | None]:
        """What a rank gave; None when it did not come in time, or is not of that size."""
        path = self._path(request, rank)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                break
            except FileNotFoundError:
                if time.monotonic() > end:
                    yield None
                    return
                time.sleep(POLL)
        os.unlink(path)
        try:
            if os.fstat(descriptor).st_size != nbytes or not nbytes:
                yield None
                return
            with mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY) as data, memoryview(data) as view:
                yield view
        finally:
            os.close(descriptor)

    def tidy(self, before: float) -> None:
        """Remove what this rank gave before that time and nobody took."""
        while self._given and self._given[0][0] < before:
            with suppress(FileNotFoundError):
                os.unlink(self._given.popleft()[1])

    def close(self) -> None:
        self.tidy(float("inf"))
