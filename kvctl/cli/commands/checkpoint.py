"""`kvctl checkpoint create|ls|verify|restore|rm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.app import App, S3Flags, current
from kvctl.cli.commands.report import show_report
from kvctl.cli.documents import render
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Size, Span, argument, option, s3_options, yes_option

if TYPE_CHECKING:
    from kvctl.checkpoint.into_repo import IntoRepo
    from kvctl.checkpoint.latency import Latencies
    from kvctl.checkpoint.pace import Limits
    from kvctl.checkpoint.shards import ShardSource
    from kvctl.core.addresses import StoreConfig
    from kvctl.core.context import Context
    from kvctl.engines.api import EngineAdapter
    from kvctl.transfer.report import Report

EXAMPLES = """\b
Examples:
  kvctl checkpoint create --from slot:llama --to s3://ckpt/llama --max-rate 500MB --keep-last 7
  kvctl checkpoint create --from slot:llama --to s3://ckpt/llama \\
      --latency-budget 1ms --latency-from canary:http://127.0.0.1:8000 --deadline 4h
  kvctl checkpoint create --from slot:llama --to lab:llama --format repo
  kvctl checkpoint restore s3://ckpt/llama --into slot:llama2
"""
_PACE = "Pace"


@click.command("create", cls=KvCommand, epilog=EXAMPLES)
@option("--from", "source", required=True, envvar=None, metavar="SOURCE", help="slot:NAME, or engine:URL.")
@option("--to", required=True, envvar=None, metavar="URL/NAME", help="Where; with --format repo REPO:NAME.")
@option(
    "--format", "form", type=click.Choice(("hf", "repo")), default="hf", envvar=None,
    help="A Hugging Face folder that any loader opens, or a version of a repo's model.",
)  # fmt: skip
@option(
    "--keep-last", type=click.IntRange(min=1), metavar="N", envvar=None, help="Then remove older ones of this name."
)
@option("--max-rate", type=Size(), metavar="SIZE", section=_PACE, help="At most so many bytes per second.")
@option(
    "--min-rate", type=Size(), default=1 << 20, show_default="1MiB", metavar="SIZE", section=_PACE,
    help="At least so many, whatever the latencies say.",
)  # fmt: skip
@option(
    "--deadline", type=Span(), metavar="TIME", section=_PACE, help="Be done by then: raises the least rate; missed: 3."
)
@option(
    "--latency-budget", type=Span(), metavar="TIME", section=_PACE,
    help="Back off when the engine's p99 is over its baseline by more; missed: 3.",
)  # fmt: skip
@option(
    "--latency-from", metavar="WHERE", section=_PACE,
    help="engine:URL (raw samples of kvctl's plug-in; the default with --from engine:), canary:URL (a stream of our own"
    " to an OpenAI API), metrics:URL (Prometheus histogram).",
)  # fmt: skip
@option("--transport", default="auto", setting="transport", section="Transfer", help="How bulk bytes move.")
@option(
    "--shard-size", type=Size(), default=5_000_000_000, show_default="5GB", metavar="SIZE", envvar=None,
    section="Transfer", help="Of an engine's weights; one shard at a time is copied into memory.",
)  # fmt: skip
@s3_options
def create(
    *,
    source: str,
    to: str,
    form: str,
    keep_last: int | None,
    max_rate: int | None,
    min_rate: int,
    deadline: float | None,
    latency_budget: float | None,
    latency_from: str | None,
    transport: str,
    shard_size: int,
    # Any: the S3 options, as S3Flags takes them
    **s3: Any,
) -> None:
    """Write one generation of live weights to a store, at a pace that the engine's users do not feel.

    Files that have not changed since the last checkpoint are not sent: the store links or copies them (a repo: shares
    chunks). Running it again after an interruption resumes. LATEST moves last.
    """
    from contextlib import ExitStack, closing

    from kvctl.checkpoint.create import CreateRequest
    from kvctl.checkpoint.create import create as run
    from kvctl.checkpoint.pace import Limits
    from kvctl.checkpoint.pacing import missed
    from kvctl.core.errors import PartialError, UsageError

    app = current()
    if max_rate == 0:
        raise UsageError("--max-rate 0 moves nothing")
    if max_rate is not None and max_rate < min_rate:
        raise UsageError(f"--max-rate {max_rate} is below --min-rate {min_rate}", hint="the minimum is 1MiB by default")
    if latency_budget is not None and latency_from is None and source.startswith("engine:"):
        latency_from = source
    if latency_budget is not None and latency_from is None:
        raise UsageError(
            "--latency-budget without --latency-from",
            hint="engine:URL, canary:URL or metrics:URL tells what the engine's users feel",
        )
    limits = Limits(max_rate, float(min_rate), latency_budget, deadline)
    request: CreateRequest | IntoRepo
    if form == "repo":
        if keep_last:
            raise UsageError(
                "--format repo takes no --keep-last",
                hint="versions of a repo's model share their chunks; remove them with `kvctl models rm`",
            )
        if transport != "auto":
            raise UsageError("--format repo takes no --transport", hint="members of a repo are written by the fastest")
        request = _into_repo(app, source, to, limits, S3Flags(**s3))
    else:
        request = CreateRequest(_place(app, to, S3Flags(**s3)), limits, keep_last, transport)
    with app.running() as ctx, ExitStack() as stack:
        latencies = None
        if latency_from is not None:
            latencies = stack.enter_context(closing(_latencies(latency_from, ctx)))
        if isinstance(request, CreateRequest):
            shards = stack.enter_context(closing(_source(source, shard_size, ctx)))
            report = run(shards, request, ctx, latencies=latencies)
        else:
            from kvctl.checkpoint.into_repo import create_in_repo

            report = create_in_repo(request, ctx, latencies=latencies)
    show_report(app, report)
    late = missed(report)
    if late:
        raise PartialError("the checkpoint is complete, but its pace was not kept", cause=late)


def _source(text: str, shard_size: int, ctx: Context) -> ShardSource:
    """Raises UsageError for what is no live source, and what the agent or the engine says."""
    from kvctl.checkpoint.shards import LiveShards, SlotShards
    from kvctl.core.errors import UsageError

    kind, _, rest = text.partition(":")
    if kind == "slot" and rest:
        return SlotShards(rest)
    if kind == "engine" and rest:
        from kvctl.checkpoint.engine import EngineWeights

        return LiveShards(EngineWeights(_engine(rest, ctx), rest), shard_size)
    raise UsageError(f"{text!r} is no live source", hint="slot:NAME or engine:URL; to store files: kvctl push-weights")


def _latencies(text: str, ctx: Context) -> Latencies:
    from kvctl.checkpoint.latency import open_latencies

    kind, _, rest = text.partition(":")
    if kind == "engine" and rest:
        from kvctl.checkpoint.engine import EngineLatencies

        return EngineLatencies(_engine(rest, ctx))
    return open_latencies(text)


def _engine(url: str, ctx: Context) -> EngineAdapter:
    import os

    from kvctl.engines.registry import open_engine

    return open_engine(url, ctx, api_key=os.environ.get("KVCTL_ENGINE_API_KEY"))


def _place(app: App, text: str, s3: S3Flags) -> StoreConfig:
    from kvctl.core.addresses import PathOrUrl
    from kvctl.core.errors import UsageError

    found = app.weights(text, s3)
    if not isinstance(found, PathOrUrl):
        raise UsageError(
            f"{text!r} is no path and no URL", hint=f"for a folder write ./{text}; --format repo takes REPO:NAME"
        )
    return found.store


def _into_repo(app: App, source: str, to: str, limits: Limits, s3: S3Flags) -> IntoRepo:
    """A slot's generation as the next version of a repo's model."""
    from kvctl.checkpoint.into_repo import IntoRepo
    from kvctl.core.addresses import RepoModel
    from kvctl.core.errors import UsageError

    found = app.weights(to, s3)
    kind, _, slot = source.partition(":")
    if not isinstance(found, RepoModel) or kind != "slot" or not slot:
        raise UsageError("--format repo goes from slot:NAME to REPO:NAME")
    stores = app.config.repo(found.repo).stores if found.repo else app.repo(s3)
    return IntoRepo(slot, found.name, stores, found.version, limits)


@click.command("ls", cls=KvCommand)
@argument("place", "URL/NAME, as given to --to.")
@s3_options
def ls(*, place: str, **s3: Any) -> None:  # Any: the S3 options
    """List the checkpoints of a name, oldest first, and those that were not finished."""
    from kvctl.checkpoint.catalog import ls as run

    app = current()
    config = _place(app, place, S3Flags(**s3))
    with app.running() as ctx:
        document = run(config, ctx)
    app.output.result(document, lambda: render(document))


@click.command("verify", cls=KvCommand)
@argument("place", "URL/NAME[@ID]; without an ID the latest.")
@s3_options
def verify(*, place: str, **s3: Any) -> None:  # Any: the S3 options
    """Read all of a checkpoint and compare every tensor and small file with what was written."""
    from kvctl.checkpoint.catalog import verify as run

    _with_report(place, S3Flags(**s3), run)


@click.command("restore", cls=KvCommand)
@argument("place", "URL/NAME[@ID]; without an ID the latest.")
@option("--into", required=True, envvar=None, metavar="TARGET", help="dir:PATH, shm:NAME or slot:NAME.")
@s3_options
def restore(*, place: str, into: str, **s3: Any) -> None:  # Any: the S3 options
    """Load a checkpoint, every tensor compared with its digest before it is handed over."""
    from kvctl.checkpoint.catalog import restore as run
    from kvctl.core.addresses import parse_target
    from kvctl.core.errors import UsageError
    from kvctl.weights.request import LoadRequest

    if parse_target(into).kind == "none":
        raise UsageError("nothing would be kept", hint="`kvctl checkpoint verify` reads and checks it")
    _with_report(place, S3Flags(**s3), lambda config, ident, ctx: run(LoadRequest("", into=into), config, ident, ctx))


def _with_report(place: str, s3: S3Flags, run: Callable[[StoreConfig, str | None, Context], Report]) -> None:
    from kvctl.checkpoint.catalog import split

    app = current()
    text, ident = split(place)
    config = _place(app, text, s3)
    with app.running() as ctx:
        report = run(config, ident, ctx)
    show_report(app, report)


@click.command("rm", cls=KvCommand)
@argument("place", "URL/NAME@ID.")
@option("--force", is_flag=True, default=False, envvar=None, help="Also the latest one.")
@yes_option
@s3_options
def rm(*, place: str, force: bool, yes: bool, **s3: Any) -> None:  # Any: the S3 options
    """Remove one checkpoint. What others share with it stays theirs."""
    from kvctl.checkpoint.catalog import remove, split
    from kvctl.core.errors import UsageError

    app = current()
    text, ident = split(place)
    if ident is None:
        raise UsageError(f"{place!r} names no checkpoint", hint="URL/NAME@ID; `kvctl checkpoint ls` shows the IDs")
    config = _place(app, text, S3Flags(**s3))
    app.confirm(f"remove checkpoint {ident} of {text}?", yes=yes)
    with app.running() as ctx:
        document = remove(config, ident, ctx, force=force)
    app.output.result(document, lambda: render(document))
