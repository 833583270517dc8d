"""Sessions and KV bundles: a pull into a bundle, a push of one, and whole folders of them.

`export` writes DIR/TENANT/NAME.safetensors, `import` pushes DIR/TENANT/NAME.safetensors as TENANT/NAME. A bundle of one
rank or of some layers says in its identity what it has: it feeds that rank, and is no session to push again.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final, NoReturn

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, InterruptedRunError, KvctlError, NotFoundError, PartialError, UsageError
from kvctl.kv.access import secret_of
from kvctl.kv.bundle import read_bundle, write_bundle
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.names import parse_session
from kvctl.kv.pull import PullSession, pull_from
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.reading import StoredSession, stored_tokens
from kvctl.kv.seams import LayerKv, Layout, MemorySink, Slot
from kvctl.kv.sessions import Generation, matching
from kvctl.kv.tokens import Tokens, token_bytes
from kvctl.memory.files import cannot_write
from kvctl.repo.repo import Repo
from kvctl.transfer.report import Report
from kvctl.transfer.summary import Stopwatch

SUFFIX: Final = ".safetensors"


def session_facts(request: PullSession, ctx: Context) -> tuple[array[int] | None, Mapping[str, str]]:
    """The token ids that are stored with the session (None when they are not), and its producer."""
    with Repo.open(request.repo, ctx) as repo, StoredSession.open(repo, parse_session(request.address), ctx) as session:
        secret = secret_of(repo, request.key, session.manifest.tenant)
        return stored_tokens(session, secret), session.manifest.producer


def pull_bundle(request: PullSession, target: str | BinaryIO, ctx: Context) -> Report:
    """`pull_session` into a bundle: at the path `target`, whole or not at all, or written to a stream once all of it is
    verified. The caller's tokens, or those stored with the session, go into it. A prefix that damage made shorter is
    written, then PartialError is raised as by `pull_session`; when nothing is usable, PartialError, and nothing is
    written.
    """
    watch = Stopwatch()
    with Repo.open(request.repo, ctx) as repo:
        return bundle_from(repo, request, target, ctx, watch=watch)


def bundle_from(
    repo: Repo, request: PullSession, target: str | BinaryIO, ctx: Context, *, watch: Stopwatch | None = None
) -> Report:
    """`pull_bundle` from a repo that is open. See `pull_from`."""
    sink = MemorySink()
    tokens = request.tokens
    producer: Mapping[str, str] = {}

    def facts(session: StoredSession) -> None:
        nonlocal tokens, producer
        producer = session.manifest.producer
        if tokens is None:
            tokens = stored_tokens(session, secret_of(repo, request.key, session.manifest.tenant))

    problem: PartialError | None = None
    try:
        try:
            report = pull_from(repo, replace(request, sink=sink), ctx, watch=watch, first=facts)
        except PartialError as error:
            if not error.details.get("delivered") or not sink.usable:
                raise
            problem = error
            report = Report("kv pull")
        if not sink.usable:
            raise PartialError(
                f"nothing of {request.address} is usable for these tokens",
                cause=str(report.extra.get("verdict", {}).get("reason", "")) or None,
                hint="compute the prompt instead",
            )
        report.written = write_sink(sink, target, tokens, producer, request)
    finally:
        sink.close()
    if problem is not None:
        raise problem
    return report


def write_sink(
    sink: MemorySink,
    target: str | BinaryIO,
    tokens: array[int] | None,
    producer: Mapping[str, str],
    request: PullSession,
) -> int:
    """Write what a sink holds as a bundle. Returns its bytes."""
    assert sink.descriptor is not None
    assert sink.layout is not None
    descriptor, places = narrowed(sink.descriptor, sink.layout)
    layers = {
        (places[slot.group], slot.layer): cut_to(sink.layers[slot.group, slot.layer], slot, sink.usable)
        for slot in sink.layout.slots
    }
    rank = {"tp": f"rank {request.tp_rank} of {request.tp_size}"} if request.tp_size > 1 else {}
    ids: Tokens | None = None if tokens is None else token_bytes(tokens)[: 4 * sink.usable]
    if isinstance(target, str):
        folder = os.path.dirname(os.path.abspath(target))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
    return write_bundle(target, descriptor, sink.usable, layers, token_ids=ids, producer={**producer, **rank})


def narrowed(descriptor: Descriptor, layout: Layout) -> tuple[Descriptor, dict[int, int]]:
    """The descriptor of the layers and heads that a layout has, and the new number of each of its groups."""
    groups: list[Group] = []
    places: dict[int, int] = {}
    for number, group in enumerate(descriptor.groups):
        slots = [slot for slot in layout.slots if slot.group == number]
        if slots:
            places[number] = len(groups)
            held = tuple(sorted(slot.layer for slot in slots))
            groups.append(replace(group, layers=held, kv_heads=slots[0].heads))
    return replace(descriptor, groups=tuple(groups)), places


def cut_to(kv: LayerKv, slot: Slot, tokens: int) -> LayerKv:
    """The view as it is, or a copy of its first rows where damage left fewer tokens than it has room for."""
    if tokens >= slot.end or not slot.k_row or slot.start >= slot.end:
        return kv
    rows, kept = slot.end - slot.start, tokens - slot.start

    def copy(view: memoryview, row: int) -> memoryview:
        heads = (view[head * rows * row : (head * rows + kept) * row] for head in range(slot.heads if row else 0))
        return memoryview(b"".join(heads))

    return LayerKv(copy(kv.k, slot.k_row), copy(kv.v, slot.v_row), kv.start)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One line per session: `session` (with its generation), `path`, `tokens`, `bytes` of the bundle; `problem` where
    it failed.
    """

    command: str
    rows: tuple[Mapping[str, Any], ...]  # Any: JSON

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {"schema": "kvctl.kv-exchanged/1", "command": self.command, "sessions": [dict(row) for row in self.rows]}

    def require_ok(self) -> None:
        """Raises PartialError when some failed."""
        failed = [row for row in self.rows if row["problem"]]
        if failed:
            raise PartialError(
                f"{len(failed)} of {len(self.rows)} sessions failed in {self.command}",
                cause=f"{failed[0]['session']}: {failed[0]['problem']}",
                hint="the others are done; run it again for these",
                details={"failed": [row["session"] for row in failed]},
            )


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """`patterns`: TENANT/NAME[@GENERATION], globs; the latest generation where none is named."""

    repo: tuple[StoreConfig, ...]
    patterns: tuple[str, ...]
    folder: str
    key: bytes | None = None
    allow_empty: bool = False
    max_rate: int | None = None


def export_sessions(request: ExportRequest, ctx: Context) -> Exchanged:
    """A bundle per session, each whole or absent; one that fails does not stop the others. Raises UsageError for two
    generations of one session.
    """
    rows: list[dict[str, Any]] = []  # Any: JSON
    with Repo.open(request.repo, ctx) as repo:
        found = [
            item
            for text in request.patterns
            for item in _latest(matching(repo, [text], allow_empty=request.allow_empty), text)
        ]
        chosen: dict[str, Generation] = {}
        for item in found:
            path = os.path.join(request.folder, item.session.tenant, f"{item.session.name}{SUFFIX}")
            other = chosen.setdefault(path, item)
            if other != item:
                raise UsageError(
                    f"{other} and {item} would both become {path}", hint="name one generation of a session, or none"
                )
        for path, item in chosen.items():
            ctx.cancel.check("exporting")
            row = {"session": str(item), "path": path, "tokens": 0, "bytes": 0, "problem": ""}
            try:
                pull = PullSession(request.repo, str(item), key=request.key, strict=True, max_rate=request.max_rate)
                report = bundle_from(repo, pull, path, ctx)
                row |= {"tokens": report.extra["usable_tokens"], "bytes": report.written}
            except InterruptedRunError:
                raise
            except KvctlError as error:
                row["problem"] = str(error)
            rows.append(row)
    return Exchanged("kv export", tuple(rows))


def _latest(found: Sequence[Generation], pattern: str) -> list[Generation]:
    """The generations that the pattern names, or the last of each session where it names none."""
    return list(found) if "@" in pattern else list({item.session: item for item in found}.values())


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """`folder`: DIR/TENANT/NAME.safetensors. `tenant`: all go to this one instead."""

    repo: tuple[StoreConfig, ...]
    folder: str
    tenant: str | None = None
    key: bytes | None = None
    with_tokens: bool = False
    codec: str = "none"
    labels: Mapping[str, str] = field(default_factory=dict)
    max_rate: int | None = None


def import_bundles(request: ImportRequest, ctx: Context) -> Exchanged:
    """Push every bundle of a folder; one that fails does not stop the others. Raises NotFoundError for a folder without
    bundles.
    """
    rows: list[dict[str, Any]] = []  # Any: JSON
    for name in bundles_in(request.folder):
        ctx.cancel.check("importing")
        own, _, rest = name.removesuffix(SUFFIX).replace(os.sep, "/").partition("/")
        session = f"{request.tenant or own}/{rest}"
        path = os.path.join(request.folder, name)
        row: dict[str, Any] = {"session": session, "path": path, "tokens": 0, "bytes": 0, "problem": ""}  # Any: JSON
        try:
            with read_bundle(path) as bundle:
                report = push_session(
                    PushSession(
                        request.repo, session, bundle.source(), key=request.key, with_tokens=request.with_tokens,
                        codec=request.codec, labels=request.labels, max_rate=request.max_rate,
                    ),
                    ctx,
                )  # fmt: skip
            row |= {
                "session": f"{session}@{report.extra['generation']}",
                "tokens": report.extra["tokens"],
                "bytes": report.written,
            }
        except InterruptedRunError:
            raise
        except KvctlError as error:
            row["problem"] = str(error)
        rows.append(row)
    return Exchanged("kv import", tuple(rows))


def bundles_in(folder: str) -> list[str]:
    """TENANT/NAME.safetensors below the folder, sorted. Raises NotFoundError, EnvError where it cannot be read."""

    def refuse(error: OSError) -> NoReturn:
        raise EnvError(f"{error.filename} cannot be read", cause=error.strerror) from error

    found = sorted(
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if name.endswith(SUFFIX) and os.path.relpath(place, folder) != os.curdir
    )
    if not found:
        raise NotFoundError(
            f"there is no bundle below {folder}",
            hint=f"wanted is DIR/TENANT/NAME{SUFFIX}; one file is pushed with `kvctl kv push bundle:PATH TENANT/NAME`",
        )
    return found
