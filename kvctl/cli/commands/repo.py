"""`kvctl repo init|status|check|repair|rebalance|drain|gc|stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.app import App, S3Flags, current
from kvctl.cli.documents import render
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Age, F, Size, argument, dry_run_option, option, s3_options, yes_option

if TYPE_CHECKING:
    from kvctl.core.addresses import StoreConfig


def read_data_option(function: F) -> F:
    return option("--read-data", metavar="[all|N/T]", envvar=None,
                  help="Read chunks and verify their digests: all, or part N of T.")(function)  # fmt: skip


@click.command("init", cls=KvCommand)
@option(
    "--replicas",
    type=click.IntRange(min=1),
    envvar=None,
    help="Copies of each chunk, on different members; has to be said when there are several.",
)
@option(
    "--stripe",
    "--stripe-size",
    "stripe_size",
    type=Size(),
    metavar="SIZE",
    envvar=None,
    show_default="16MiB",
    help="Largest chunk of a weights file.",
)
@s3_options
def init(*, replicas: int | None, stripe_size: int | None, **s3: Any) -> None:  # Any: as S3Flags takes them
    """Make a repo over the stores that -r names. An init that was interrupted is finished by running it again."""
    app = current()
    stores = app.repo(S3Flags(**s3))
    if replicas is None:
        replicas = 1 if len(stores) == 1 else _ask_replicas(app, len(stores))

    from kvctl.repo.admin import InitOptions, init_repo
    from kvctl.repo.format import STRIPE

    with app.running() as ctx:
        result = init_repo(stores, ctx, InitOptions(STRIPE if stripe_size is None else stripe_size, replicas)).to_json()
    app.output.result(result, lambda: render(result))


def _ask_replicas(app: App, members: int) -> int:
    from kvctl.core.errors import UsageError
    from kvctl.core.units import is_count

    question = f"copies of each chunk (1 to {members})?"
    answer = app.output.prompt(question)
    if not is_count(answer):
        raise UsageError(
            "the number of replicas has to be said for a repo of several members",
            cause=f"{answer!r} is no number" if answer else f"{members} members, no --replicas",
            hint="--replicas 2 survives the loss of one member, --replicas 1 of none",
        )
    return int(answer)


@click.command("status", cls=KvCommand)
@s3_options
def status(**s3: Any) -> None:  # Any: as S3Flags takes them
    """Show members, what is at risk, and which models have no readable copy. Works with members down."""
    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.repo.admin import repo_status

    with app.running() as ctx:
        result = repo_status(stores, ctx).to_json()
    app.output.result(result, lambda: render(result))


@click.command("stats", cls=KvCommand)
@s3_options
def stats(**s3: Any) -> None:  # Any: as S3Flags takes them
    """Show sizes: what models name, what is distinct of it, what the members hold."""
    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.repo.admin import repo_stats

    with app.running() as ctx:
        result = repo_stats(stores, ctx).to_json()
    app.output.result(result, lambda: render(result))


@click.command("check", cls=KvCommand)
@read_data_option
@s3_options
def check(*, read_data: str | None, **s3: Any) -> None:  # Any: as S3Flags takes them
    """Look for holes, orphans and damage; change nothing. Ends with 7 when something is lost or wrong, with 3 when
    replicas are missing or a member is down; garbage is no problem.
    """
    from kvctl.core.errors import IntegrityError, PartialError

    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.repo.admin import CheckOptions, check_repo, require_ok
    from kvctl.repo.check import Share

    share = Share.parse(read_data) if read_data else None
    with app.running() as ctx:
        result = check_repo(stores, ctx, CheckOptions(share))
    document = result.to_json()
    app.output.result(document, lambda: render(document))
    if result.damaged:
        first = result.problems[0]
        raise IntegrityError(
            f"the check found {len(result.problems)} problems",
            cause=f"{first.kind}: {first.key} {first.member}: {first.detail}",
            hint="`kvctl repo repair` mends what has a good copy",
        )
    require_ok(result)
    if result.members_down:
        raise PartialError(
            "what answers is in order, but not every member does",
            cause=f"no answer from {', '.join(result.members_down)}",
            hint="`kvctl repo status` says why",
        )


@click.command("repair", cls=KvCommand)
@option(
    "--replace",
    multiple=True,
    metavar="OLD=NEW",
    envvar=None,
    help="Put store NEW in the place of member OLD (name, URL or id); repeat for more.",
)
@read_data_option
@dry_run_option
@yes_option
@s3_options
def repair(
    *,
    replace: tuple[str, ...],
    read_data: str | None,
    dry_run: bool,
    yes: bool,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Restore missing and damaged replicas from good copies. Ends with 3 when a chunk has no good copy left."""
    from kvctl.core.errors import PartialError

    app = current()
    flags = S3Flags(**s3)
    pairs = tuple(_replacement(app, text, flags) for text in replace)
    stores = app.repo(flags)
    if pairs and not dry_run:
        app.confirm(f"replace {', '.join(f'{old} by {new.url}' for old, new in pairs)} for good?", yes=yes)

    from kvctl.repo.admin import RepairOptions, repair_repo
    from kvctl.repo.check import Share

    options = RepairOptions(pairs, Share.parse(read_data) if read_data else None, dry_run)
    with app.running() as ctx:
        result = repair_repo(stores, ctx, options)
    document = result.to_json()
    app.output.result(document, lambda: render(document))
    if replace and not dry_run:
        app.output.note("the repo has other members now: put them into -r or the config file")
    lost = result.repaired.copied.lost
    if lost:
        raise PartialError(
            f"{len(lost)} chunks have no good copy",
            cause=f"the first: {lost[0]}",
            hint="`kvctl repo check` names the models; push them again",
        )


def _replacement(app: App, text: str, flags: S3Flags) -> tuple[str, StoreConfig]:
    from kvctl.core.errors import UsageError

    old, equals, new = text.partition("=")
    if not equals or not old or not new:
        raise UsageError(f"--replace {text!r} is not OLD=NEW")
    found = app.stores(new if "://" in new or "/" in new else f"./{new}", flags)
    if len(found) != 1:
        raise UsageError(f"--replace {text!r} names {len(found)} stores for one member")
    return old, found[0]


@click.command("rebalance", cls=KvCommand)
@s3_options
def rebalance(**s3: Any) -> None:  # Any: as S3Flags takes them
    """Spread chunks over the members as they are now. Stores in -r that are no members yet are added first."""
    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.repo.admin import rebalance_repo

    with app.running() as ctx:
        result = rebalance_repo(stores, ctx).to_json()
    app.output.result(result, lambda: render(result))


@click.command("drain", cls=KvCommand)
@argument("member", "Name, URL or id, as `kvctl repo status` shows it.")
@yes_option
@s3_options
def drain(*, member: str, yes: bool, **s3: Any) -> None:  # Any: as S3Flags takes them
    """Move everything off a member, drop it from the repo, and empty its store."""
    app = current()
    stores = app.repo(S3Flags(**s3))
    app.confirm(f"move everything off {member} and drop it from the repo?", yes=yes)

    from kvctl.repo.admin import drain_member

    with app.running() as ctx:
        result = drain_member(stores, ctx, member).to_json()
    app.output.result(result, lambda: render(result))
    app.output.note(f"{member} is no member now: take it out of -r or the config file")


@click.command("gc", cls=KvCommand)
@option(
    "--grace",
    type=Age(),
    metavar="AGE",
    envvar=None,
    show_default="24h",
    help="How long garbage stays condemned before it goes; asks when shorter than 24h.",
)
@option("--max-time", type=Age(), metavar="AGE", envvar=None, help="Stop in order after this; the next run goes on.")
@option("--max-deletes", type=click.IntRange(min=0), envvar=None, help="Stop in order after so many objects.")
@dry_run_option
@yes_option
@s3_options
def gc(
    *,
    grace: float | None,
    max_time: float | None,
    max_deletes: int | None,
    dry_run: bool,
    yes: bool,
    # Any: as S3Flags takes them
    **s3: Any,
) -> None:
    """Free what no model, session, lease or running push uses: garbage is condemned now, and deleted by a run after the
    grace period. KV packs of which less than half is used are made anew, smaller. Needs every member; interrupting it
    is safe.
    """
    from kvctl.core.units import format_seconds

    app = current()
    stores = app.repo(S3Flags(**s3))

    from kvctl.kv.repacking import repack_sessions
    from kvctl.repo.admin import gc_repo
    from kvctl.repo.gc import GRACE, GcOptions

    wait = GRACE if grace is None else grace
    if wait < GRACE and not dry_run:
        app.confirm(
            f"a grace period of {format_seconds(wait)} takes chunks away from loads that run longer; go on?", yes=yes
        )
    options = GcOptions(
        grace=wait, max_seconds=max_time, max_deletes=max_deletes, dry_run=dry_run, repacker=repack_sessions
    )
    with app.running() as ctx:
        result = gc_repo(stores, ctx, options).to_json()
    app.output.result(result, lambda: render(result))
