"""The stores of the configured repos: each way to each of them, answered or not, with what credentials, and by what
clock; the disk under directories.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import AuthError, KvctlError, MemberDownError, NotFoundError, ThrottledError
from kvctl.core.units import GIB, format_seconds, format_size
from kvctl.doctor.findings import Finding, Machine, Probe, State
from kvctl.transports.api import Store
from kvctl.transports.registry import open_store

AREA: Final = "stores"
SECONDS: Final = 20.0
_SKEW_DEGRADED: Final = 30.0  # a lease's renewal still works, but ages are wrong
_SKEW_BROKEN: Final = 300.0  # S3 refuses signatures that are 15 minutes off, nodes tokens that are older than minutes
_NAMES: Final = "repo.json"


def probes(repos: Mapping[str, Sequence[StoreConfig]], machine: Machine) -> list[Probe]:
    """One per way to a store, so that a dead one delays nothing."""
    found: list[Probe] = []
    for repo, stores in repos.items():
        for config in stores:
            if config.scheme == "file":
                found.append(Probe(AREA, f"{repo} {config.url}", partial(_folder, repo, config, machine), SECONDS))
                continue
            for endpoint in config.endpoints or ("",):
                name = _name(repo, config, endpoint)
                one = replace(config, endpoints=(endpoint,)) if endpoint else config
                found.append(Probe(AREA, name, partial(_remote, name, one), SECONDS))
    if not found:
        found.append(
            Probe(
                AREA,
                "repos",
                lambda: [
                    Finding(AREA, "repos", "ok", "none configured", "", "name one with -r, or see `kvctl help config`")
                ],
            )
        )
    return found


def _name(repo: str, config: StoreConfig, endpoint: str) -> str:
    return f"{repo} {config.url}{f' over {endpoint}' if endpoint else ''}"


def _remote(name: str, config: StoreConfig) -> list[Finding]:
    """Reachability, credentials, the repo's own document, and the clock of the other side."""
    started = time.monotonic()
    try:
        store = open_store(config)
    except KvctlError as error:
        return [_failed(name, error)]
    try:
        return list(_asked(name, store, started))
    except KvctlError as error:
        return [_failed(name, error)]
    finally:
        store.close()


def _asked(name: str, store: Store, started: float) -> Iterator[Finding]:
    state: State = "ok"
    why = fix = ""
    try:
        store.get(_NAMES, 0, 1)
        value = "a repo answers"
    except NotFoundError as error:
        # a bucket that does not exist is also 'not found': listing it tells them apart
        next(iter(store.list()), None)
        state, value, why = "degraded", "answers, holds no repo", error.what
        fix = "`kvctl repo init`, or check the prefix"
    before = datetime.now(UTC)
    asked = time.monotonic()
    theirs = store.now()
    trip = time.monotonic() - asked
    yield Finding(AREA, name, state, f"{value} in {format_seconds(asked - started)}", why, fix)
    yield _skew(name, (theirs - before).total_seconds(), trip)


def _skew(name: str, skew: float, trip: float) -> Finding:
    """Clocks are compared by the Date of an answer, which has whole seconds."""
    off = max(0.0, abs(skew) - trip - 1.0)
    value = "the clocks agree to a second" if off == 0 else f"{format_seconds(off)} {'ahead' if skew > 0 else 'behind'}"
    state: State = "broken" if off > _SKEW_BROKEN else "degraded" if off > _SKEW_DEGRADED else "ok"
    why = "" if state == "ok" else "signatures, leases and grace periods compare clocks"
    fix = "" if state == "ok" else "run chrony or systemd-timesyncd on both ends"
    return Finding(AREA, f"{name} clock", state, value, why, fix)


def _failed(name: str, error: KvctlError) -> Finding:
    value = "does not answer as it should"
    if isinstance(error, AuthError):
        value = "refuses the credentials"
    elif isinstance(error, ThrottledError):
        value = "is overloaded"
    elif isinstance(error, MemberDownError):
        value = "cannot be reached"
    return Finding(AREA, name, "broken", value, str(error), error.hint or "check the address and the server")


def _folder(repo: str, config: StoreConfig, machine: Machine) -> list[Finding]:
    """A directory: there, usable, with room."""
    path = config.url.removeprefix("file://")
    name = f"{repo} {path}"
    if not os.path.isdir(path):
        return [
            Finding(
                AREA, name, "broken", "does not exist", "the repo's directory is missing",
                "mount it, or make the repo with `kvctl repo init`",
            )
        ]  # fmt: skip
    status = os.statvfs(path)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    kind = _file_system(path, machine)
    value = f"{format_size(free)} free of {format_size(size)}{f', {kind}' if kind else ''}"
    if not os.access(path, os.R_OK | os.X_OK):
        return [Finding(AREA, name, "broken", value, "it cannot be read", "check its owner and mode")]
    if not os.path.exists(os.path.join(path, _NAMES)):
        return [Finding(AREA, name, "degraded", value, "it holds no repo yet", "`kvctl repo init`, or check the path")]
    if not os.access(path, os.W_OK):
        return [Finding(AREA, name, "degraded", value, "it is read-only: loads work, pushes do not", "check its mode")]
    if free < size // 100:
        return [Finding(AREA, name, "broken", value, "the file system is full", "`kvctl repo gc`, or add a member")]
    if free < max(size // 20, GIB):
        return [Finding(AREA, name, "degraded", value, "little space is left", "`kvctl repo gc`, or add a member")]
    if kind == "tmpfs":
        return [Finding(AREA, name, "degraded", value, "what is in memory is lost at the next start", "use a disk")]
    return [Finding(AREA, name, "ok", value)]


def _file_system(path: str, machine: Machine) -> str:
    """The type of the file system that holds `path`, from the longest mount point above it."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in (machine.read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = fields[4].encode().decode("unicode_escape")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind
