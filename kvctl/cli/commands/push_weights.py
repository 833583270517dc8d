"""`kvctl push-weights`."""

from __future__ import annotations

from typing import Any

import click

from kvctl.cli.app import S3Flags, current, source_address
from kvctl.cli.commands.report import show_report
from kvctl.cli.documents import render
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Size, argument, dry_run_option, option, s3_options

EXAMPLES = """\b
Examples:
  kvctl push-weights ./Llama-3.3-70B llama70b -r lab
  kvctl push-weights s3://models/llama70b/ llama70b -r lab --version v2
"""


@click.command("push-weights", cls=KvCommand, epilog=EXAMPLES)
@argument("source", "A file, folder or URL with safetensors.")
@argument("name", "The model's name in the repo.")
@option("--version", "version", envvar=None, help="Name of this version (default: the next number).")
@option("--revision", envvar=None, help="Revision at the origin, kept as a label.")
@option(
    "--rules",
    type=click.Path(),
    metavar="FILE",
    setting="rules",
    help="Tensor-parallel rules: row-parallel tensors are cut so that a rank's read stays exact.",
)
@option(
    "--max-in-flight",
    type=Size(some=True),
    setting="max_in_flight",
    metavar="SIZE",
    help="Bytes in flight at once (default: from the memory limit).",
)
@option("--max-rate", type=Size(some=True), setting="max_rate", metavar="SIZE", help="Cap in bytes per second.")
@dry_run_option
@s3_options
def command(
    *,
    source: str,
    name: str,
    version: str | None,
    revision: str | None,
    rules: str | None,
    max_in_flight: int | None,
    max_rate: int | None,
    dry_run: bool,
    # Any: the S3 options, as S3Flags takes them
    **s3: Any,
) -> None:
    """Store a model in a repo. Chunks that are there already are not sent, so a second push, or one after an
    interruption, writes only what is missing.
    """
    app = current()
    flags = S3Flags(**s3)
    address, stores = source_address(app, source, flags), app.repo(flags)

    from kvctl.weights.push import PushRequest, plan_push, push_weights

    request = PushRequest(
        source=address,
        name=name,
        repo=stores,
        version=version,
        revision=revision,
        rules=rules,
        max_in_flight_bytes=max_in_flight,
        max_rate=max_rate,
    )
    with app.running() as ctx:
        if dry_run:
            plan = plan_push(request, ctx).to_json()
            app.output.result(plan, lambda: render(plan))
            return
        report = push_weights(request, ctx)
    show_report(app, report)
