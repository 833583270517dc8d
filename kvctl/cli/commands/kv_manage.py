"""`kvctl kv ls|inspect|diff|pin|unpin|evict`: what is stored, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.app import App, S3Flags, current
from kvctl.cli.documents import cell, render
from kvctl.cli.kv_options import (
    BUNDLE,
    PATTERNS,
    SESSION,
    descriptor_of,
    filter_options,
    key_option,
    known_model,
    make_filter,
    model_options,
    place,
    session_place,
)
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Size, allow_empty_option, argument, dry_run_option, option, s3_options, yes_option
from kvctl.cli.tables import table

if TYPE_CHECKING:
    from kvctl.core.context import Context
    from kvctl.kv.evict import Eviction
    from kvctl.kv.identity import Descriptor, Difference

SHOWN = 12  # digits of a digest: enough to tell models apart by eye
_FILTER = ("tenant", "older_than", "idle", "labels", "for_model", "revision", "weights", "lora", "stale_for", "expired",
           "not_latest")  # fmt: skip


def _split(given: dict[str, Any]) -> tuple[dict[str, Any], S3Flags]:  # Any: values of options
    """The filter options and the S3 flags of a command's options."""
    return {name: given.pop(name) for name in _FILTER}, S3Flags(**given)


@click.command("ls", cls=KvCommand)
@argument("patterns", f"{PATTERNS}; none: all.", nargs=-1, metavar="[PATTERN]...")
@option("--sort", type=click.Choice(("name", "age", "used", "tokens", "bytes", "unique")), default="name", envvar=None,
        help="Largest, oldest or longest unused first.")  # fmt: skip
@allow_empty_option
@filter_options
@s3_options
def ls(*, patterns: tuple[str, ...], sort: str, allow_empty: bool, **given: Any) -> None:  # Any: filters and S3
    """List sessions, a line per generation; '*' marks the latest. UNIQUE is what only that generation holds."""
    app = current()
    chosen, flags = _split(given)
    stores = app.repo(flags)

    from kvctl.kv.inspecting import list_sessions

    with app.running() as ctx:
        found = list_sessions(
            stores, ctx, patterns, chosen=make_filter(app, ctx, flags, **chosen), sort=sort, allow_empty=allow_empty
        )
    document = found.to_json()
    app.output.rows(document["schema"], "sessions", document["sessions"], _list)
    for row in document["sessions"]:
        if row["problem"]:
            app.output.warning(f"{row['tenant']}/{row['session']}@{row['generation']}: {row['problem']}")


def _list(rows: list[Mapping[str, Any]]) -> str:  # Any: JSON
    if not rows:
        return "no sessions"
    cells = [
        (
            f"{row['tenant']}/{row['session']}@{row['generation']}" + ("*" if row["latest"] else ""),
            "-" if row["tokens"] is None else f"{row['tokens']:,}",
            cell("bytes", row["bytes"]),
            cell("bytes", row["unique_bytes"]),
            cell("age_s", row["age_s"]),
            str(row["used"])[:16],
            str(row["producer"].get("model", "-")),
            (row["weights"] or "unreadable")[:SHOWN],
            row["dtype"] or "-",
            ("pinned " if row["pinned"] else "") + ("lossy" if row["lossy"] else "") or "-",
        )
        for row in rows
    ]
    headers = ("session", "tokens", "bytes", "unique", "age", "used", "model", "weights", "dtype", "state")
    return "\n".join(table(headers, cells, right=(1, 2, 3, 4)))


@click.command("inspect", cls=KvCommand)
@argument("session", f"{SESSION}, or bundle:PATH.")
@model_options
@key_option
@s3_options
def inspect(
    *,
    session: str,
    model: str | None,
    model_digests: str | None,
    dtype: str | None,
    kv_key_file: str | None,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Show what a session is: tokens, layers, bytes per token, sharing, age, producer, identity. With --model: whether
    that model can use it, and if not, every field that differs. Reads no KV.
    """
    app = current()
    flags = S3Flags(**s3)
    if session.startswith(BUNDLE):
        from kvctl.core.addresses import expand_home

        with app.running() as ctx:
            document = _bundle(expand_home(session.removeprefix(BUNDLE)))
            meaning = document.pop("meaning")
            document |= _compared(app, ctx, flags, model, model_digests, dtype, meaning, None, "")
        app.output.result(document, lambda: _details(document))
        return
    where, address = session_place(app, session, flags, kv_key_file)

    from kvctl.kv.inspecting import InspectRequest, inspect_session

    with app.running() as ctx:
        found = inspect_session(InspectRequest(where.stores, address), ctx)
        tenant = address.partition("/")[0]
        document = found.to_json() | _compared(
            app, ctx, flags, model, model_digests, dtype, found.descriptor, where.key, tenant
        )
    app.output.result(document, lambda: _details(document))


def _compared(
    app: App,
    ctx: Context,
    flags: S3Flags,
    model: str | None,
    digests: str | None,
    dtype: str | None,
    theirs: Descriptor,
    key: bytes | None,
    tenant: str,
) -> dict[str, Any]:  # Any: JSON
    """Compatibility of a session with a model; nothing is known when no model was given or its digest is unknown."""
    if model is None:
        return {"compatible": None, "differences": [], "stale": None}
    from kvctl.kv.identity import compare

    known = known_model(app, ctx, model, flags, digests)
    if known.digest is None:
        app.output.warning(
            f"the weights digest of {model} is not known, so nothing is said about its KV: make it with "
            "`kvctl models digest`, and give --model-digests"
        )
        return {"compatible": None, "differences": [], "stale": None}
    differences = compare(descriptor_of(known, model, dtype or theirs.dtype, key, tenant), theirs)
    return {
        "compatible": not differences,
        "differences": [_difference(item) for item in differences],
        "stale": known.digest != theirs.weights,
    }


def _difference(item: Difference) -> dict[str, str]:
    return {"field": item.field, "ours": item.ours, "theirs": item.theirs}


def _bundle(path: str) -> dict[str, Any]:  # Any: JSON
    from kvctl.kv.bundle import read_bundle
    from kvctl.kv.geometry import bytes_per_token

    with read_bundle(path) as bundle:
        meaning = bundle.descriptor
        return {
            "schema": "kvctl.kv-bundle/1",
            "path": path,
            "tokens": bundle.tokens,
            "bytes": sum(kv.k.nbytes + kv.v.nbytes for kv in bundle.layers.values()),
            "bytes_per_token": bytes_per_token(meaning.groups, meaning.dtype),
            "layers": meaning.layers,
            "ns": meaning.digest,
            "tokens_stored": bundle.token_ids is not None,
            "salted": meaning.salt is not None,
            "producer": dict(bundle.producer),
            "identity": meaning.to_json(),
            "meaning": meaning,
        }


def _details(document: Mapping[str, Any]) -> str:  # Any: JSON
    """Without what is only for machines: layer numbers of the identity, fields that say nothing."""
    identity = {
        name: value for name, value in document["identity"].items() if name not in {"groups", "schema"} and value
    }
    shown = {name: value for name, value in document.items() if value not in (None, "", [], {})}
    return render({**shown, "identity": identity})


@click.command("diff", cls=KvCommand)
@argument("a", SESSION)
@argument("b", SESSION)
@key_option
@s3_options
def diff(*, a: str, b: str, kv_key_file: str | None, **s3: Any) -> None:  # Any: as S3Flags takes them
    """Compare two sessions or generations: common prefix, shared bytes, and every part of identity and producer that
    differs.
    """
    app = current()
    flags = S3Flags(**s3)
    one, name = session_place(app, a, flags, kv_key_file)
    two, other = session_place(app, b, flags, kv_key_file)

    from kvctl.kv.inspecting import diff_sessions

    with app.running() as ctx:
        document = diff_sessions(one.stores, name, two.stores, other, ctx).to_json()
    app.output.result(document, lambda: render(document))


@click.command("pin", cls=KvCommand)
@argument("patterns", PATTERNS, nargs=-1, required=True, metavar="PATTERN...")
@option("--budget", type=Size(), metavar="SIZE", envvar=None,
        help="Refuse (9) when a tenant's pins would keep more than this.")  # fmt: skip
@allow_empty_option
@s3_options
def pin(*, patterns: tuple[str, ...], budget: int | None, allow_empty: bool, **s3: Any) -> None:  # Any: S3Flags
    """Keep sessions from eviction; with @GENERATION only that one."""
    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.kv.evict import pin_sessions

    with app.running() as ctx:
        document = pin_sessions(stores, patterns, ctx, budget=budget, allow_empty=allow_empty).to_json()
    app.output.result(document, lambda: render(document))


@click.command("unpin", cls=KvCommand)
@argument("patterns", PATTERNS, nargs=-1, required=True, metavar="PATTERN...")
@allow_empty_option
@s3_options
def unpin(*, patterns: tuple[str, ...], allow_empty: bool, **s3: Any) -> None:  # Any: as S3Flags takes them
    """Let sessions be evicted again."""
    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.kv.evict import unpin_sessions

    with app.running() as ctx:
        document = unpin_sessions(stores, patterns, ctx, allow_empty=allow_empty).to_json()
    app.output.result(document, lambda: render(document))


EVICT_EXAMPLES = """\b
Examples:
  kvctl kv evict 'alice/*' --idle 7d -n
  kvctl kv evict --stale-for lab:llama70b -y
  kvctl kv evict --budget 2TiB --limit-bytes 200GiB
"""


@click.command("evict", cls=KvCommand, epilog=EVICT_EXAMPLES)
@argument("patterns", PATTERNS, nargs=-1, metavar="[PATTERN]...")
@option("--budget", type=Size(), metavar="SIZE", envvar=None,
        help="Evict the longest unused until what is chosen takes no more.")  # fmt: skip
@option("--limit-bytes", type=Size(), metavar="SIZE", envvar=None, help="Free no more than this in one run.")
@dry_run_option
@yes_option
@allow_empty_option
@filter_options
@s3_options
def evict(
    *,
    patterns: tuple[str, ...],
    budget: int | None,
    limit_bytes: int | None,
    dry_run: bool,
    yes: bool,
    allow_empty: bool,
    **given: Any,  # Any: filters and S3 options
) -> None:
    """Remove sessions: by name, age, idle time, tenant, model, staleness or budget. Pinned ones are kept, those being
    read are skipped. The space is freed by gc, after its grace period.
    """
    app = current()
    chosen, flags = _split(given)
    stores = place(app, flags, None).stores

    from kvctl.kv.evict import EvictRequest, evict_sessions

    def confirm(plan: Eviction) -> None:
        if not yes:
            app.output.note(render(plan.to_json()))
        app.confirm(f"evict {len(plan.evict)} sessions ({cell('bytes', plan.freed_bytes)} to be freed)?", yes=yes)

    with app.running() as ctx:
        request = EvictRequest(
            stores, patterns, make_filter(app, ctx, flags, **chosen), budget, limit_bytes, allow_empty, dry_run
        )
        result = evict_sessions(request, ctx, confirm=confirm)
    document = result.to_json()
    app.output.result(document, lambda: render(document) if result.evict or result.leased else "nothing to evict")
    if result.evicted and result.freed_bytes:
        app.output.note(f"`kvctl repo gc` frees the space, not before {result.due}")
