"""`kvctl models ls|inspect|digest|verify|cp|rm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.app import App, S3Flags, current, model_address
from kvctl.cli.commands.report import show_report
from kvctl.cli.documents import cell, render
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Size, allow_empty_option, argument, dry_run_option, option, s3_options, yes_option
from kvctl.cli.tables import table

if TYPE_CHECKING:
    from kvctl.core.addresses import StoreConfig
    from kvctl.weights.models import Removal

ADDRESS = "./PATH, a URL, or REPO:NAME[@VERSION]; see `kvctl help addresses`."
DIGEST_SHOWN = 16  # digits: enough to tell models apart by eye


@click.command("ls", cls=KvCommand)
@argument("patterns", "Names or globs in quotes, NAME or NAME@VERSION; none: all.", nargs=-1, metavar="[PATTERN]...")
@allow_empty_option
@s3_options
def ls(*, patterns: tuple[str, ...], allow_empty: bool, **s3: Any) -> None:  # Any: as S3Flags takes them
    """List the models of a repo, a line per version; '*' marks the newest. UNIQUE is what only that version holds."""
    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.weights.models import list_models

    with app.running() as ctx:
        document = list_models(stores, ctx, patterns, allow_empty=allow_empty).to_json()
    app.output.rows(document["schema"], "models", document["models"], _list)
    for row in document["models"]:
        if row["problem"]:
            app.output.warning(f"{row['name']}@{row['version']}: {row['problem']}")


def _list(rows: list[Mapping[str, Any]]) -> str:  # Any: JSON
    if not rows:
        return "no models"
    cells = [
        (
            row["name"],
            row["version"] + ("*" if row["latest"] else ""),
            str(row["created"])[:19] or "-",
            cell("bytes", row["bytes"]),
            cell("bytes", row["unique_bytes"]),
            row["files"],
            row["tensors"],
            row["revision"] or "-",
            row["digest"][:DIGEST_SHOWN] or "unreadable",
        )
        for row in rows
    ]
    headers = ("name", "version", "created", "bytes", "unique", "files", "tensors", "revision", "digest")
    return "\n".join(table(headers, cells, right=(3, 4, 5, 6)))


@click.command("inspect", cls=KvCommand)
@argument("address", ADDRESS)
@s3_options
def inspect(*, address: str, **s3: Any) -> None:  # Any: as S3Flags takes them
    """Show a model's files, tensors and digests, from headers and manifest alone."""
    app = current()
    text, repo, version = model_address(app, address, S3Flags(**s3))

    from kvctl.weights.models import inspect_model

    with app.running() as ctx:
        document = inspect_model(text, repo, version, ctx).to_json()
    app.output.result(document, lambda: render(document))


@click.command("digest", cls=KvCommand)
@argument("address", ADDRESS)
@option(
    "--out",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    envvar=None,
    help="Write the digests there, for --require-digests (default: to stdout).",
)
@s3_options
def digest(*, address: str, out: str | None, **s3: Any) -> None:  # Any: as S3Flags takes them
    """Digest a model's tensors. A plain source is read in full; a repo's model has its digests already."""
    app = current()
    text, repo, version = model_address(app, address, S3Flags(**s3))

    from kvctl.weights.models import digest_model

    with app.running() as ctx:
        found, report = digest_model(text, repo, version, out, ctx)
    if out is not None:
        show_report(app, report)
        return
    document = found.to_json()
    app.output.result(document, lambda: render(document))


@click.command("verify", cls=KvCommand)
@argument("address", ADDRESS)
@option(
    "--require-digests",
    type=click.Path(),
    metavar="FILE",
    help="The digests of a plain source, made by `kvctl models digest`.",
)
@option("--transport", default="auto", setting="transport", section="Transfer", help="How bulk bytes move.")
@option(
    "--max-in-flight",
    type=Size(some=True),
    setting="max_in_flight",
    section="Transfer",
    metavar="SIZE",
    help="Bytes in flight at once (default: from the memory limit).",
)
@option(
    "--max-rate",
    type=Size(some=True),
    setting="max_rate",
    section="Transfer",
    metavar="SIZE",
    help="Cap in bytes per second over all members.",
)
@s3_options
def verify(
    *,
    address: str,
    require_digests: str | None,
    transport: str,
    max_in_flight: int | None,
    max_rate: int | None,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Read a model in full and check every digest; ends with 7 when one is wrong."""
    app = current()
    text, repo, version = model_address(app, address, S3Flags(**s3))

    from kvctl.weights.models import verify_model
    from kvctl.weights.request import LoadRequest

    request = LoadRequest(
        address=text,
        repo=repo,
        version=version,
        digests=require_digests,
        transport=transport,
        max_in_flight_bytes=max_in_flight,
        max_rate=max_rate,
    )
    with app.running() as ctx:
        report = verify_model(request, ctx)
    show_report(app, report)


@click.command("cp", cls=KvCommand)
@argument("source", "[REPO:]NAME[@VERSION]")
@argument("target", "[REPO:]NAME[@VERSION], or REPO: for the same name.", required=False, metavar="[TARGET]")
@option(
    "--to",
    "to",
    metavar="REPO",
    envvar=None,
    help="The repo to copy to where TARGET names none: a configured name, a path, or store URLs.",
)
@option("--max-rate", type=Size(some=True), setting="max_rate", metavar="SIZE", help="Cap in bytes per second.")
@s3_options
def cp(
    *,
    source: str,
    target: str | None,
    to: str | None,
    max_rate: int | None,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Copy a model to another repo, or to another name. Only missing chunks move, each verified on the way."""
    from kvctl.core.errors import UsageError

    app = current()
    flags = S3Flags(**s3)
    name, stores, version = model_address(app, source, flags)
    if stores is None:
        raise UsageError(f"{source!r} is no model of a repo", hint="`kvctl push-weights` stores plain weights")
    new_name, new_version, goal = _goal(app, target, to, flags)
    if goal is None:
        goal = stores
    if goal == stores and new_name in {None, name}:
        raise UsageError("source and target are the same", hint="name another repo (REPO:, --to) or another name")

    from kvctl.weights.copying import CopyRequest, copy_model

    request = CopyRequest(
        source=stores,
        name=name,
        target=goal,
        version=version,
        new_name=new_name,
        new_version=new_version,
        max_rate=max_rate,
    )
    with app.running() as ctx:
        report = copy_model(request, ctx)
    show_report(app, report)


def _goal(
    app: App, target: str | None, to: str | None, flags: S3Flags
) -> tuple[str | None, str | None, tuple[StoreConfig, ...] | None]:
    """(new name, new version, member stores) of where a copy goes; each None when it was not said."""
    from kvctl.core.addresses import RepoModel
    from kvctl.core.errors import UsageError

    stores = app.stores(to, flags) if to else None
    if target is None:
        return None, None, stores
    if target.endswith(":") and target.count(":") == 1:
        found = RepoModel(target[:-1], "")
    else:
        parsed = app.weights(target, flags)
        if not isinstance(parsed, RepoModel):
            raise UsageError(f"{target!r} is no model of a repo", hint="write [REPO:]NAME[@VERSION], or use --to")
        found = parsed
    if found.repo:
        if stores is not None:
            raise UsageError(f"both {target!r} and --to {to} name a repo")
        stores = app.config.repo(found.repo).stores
    return found.name or None, found.version, stores


@click.command("rm", cls=KvCommand)
@argument("patterns", "Names or globs in quotes, NAME or NAME@VERSION.", nargs=-1, required=True, metavar="PATTERN...")
@dry_run_option
@yes_option
@allow_empty_option
@s3_options
def rm(
    *,
    patterns: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    allow_empty: bool,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Remove models. Their chunks stay until gc has found that nothing else uses them."""
    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.weights.models import remove_model

    def confirm(plan: Removal) -> None:
        size = cell("bytes", plan.unique_bytes)
        app.confirm(f"remove {', '.join(plan.models)} ({size} that nothing else holds)?", yes=yes)

    with app.running() as ctx:
        removal = remove_model(stores, patterns, ctx, dry_run=dry_run, allow_empty=allow_empty, confirm=confirm)
    document = removal.to_json()
    app.output.result(document, lambda: render(document))
    if removal.removed:
        app.output.note("`kvctl repo gc` frees the space, after the grace period")
