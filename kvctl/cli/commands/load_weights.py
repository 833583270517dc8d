"""`kvctl load-weights`."""

from __future__ import annotations

from typing import Any

import click

from kvctl.cli.app import S3Flags, current, model_address
from kvctl.cli.commands.report import show_report
from kvctl.cli.documents import render
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Size, argument, dry_run_option, option, s3_options, transport_options

EXAMPLES = """\b
Examples:
  kvctl load-weights ./Llama-3.3-70B
  kvctl load-weights s3://models/llama70b/ --endpoint-url https://s3.lab -n
  kvctl load-weights lab:llama70b --tp-size 8 --tp-rank 0 --into shm:llama
  kvctl load-weights lab:llama70b@3 --into dir:./copy --verify full
  kvctl load-weights lab:llama70b --into slot:llama
  kvctl load-weights lab:llama70b --into slot:llama --device cuda:0
"""


@click.command("load-weights", cls=KvCommand, epilog=EXAMPLES)
@argument("address", "./PATH, a URL, or REPO:NAME[@VERSION]; see `kvctl help addresses`.")
@option(
    "--into",
    default="none",
    metavar="TARGET",
    help="none (measure, keep nothing), dir:PATH, shm:NAME or slot:NAME (of this host's agent).",
)
@option("--device", default="cpu", help="Where tensors land: cpu, cuda:N, or cuda:A-B for a rank each.")
@option(
    "--require-digests",
    type=click.Path(),
    metavar="FILE",
    help="Fail unless every tensor has the digest that this sidecar (`kvctl models digest`) names.",
)
@dry_run_option
@option(
    "--tp-rank",
    type=click.IntRange(min=0),
    section="Tensor parallelism",
    help="Load this rank's slice only (default: every rank's).",
)
@option("--tp-size", type=click.IntRange(min=1), default=1, section="Tensor parallelism", help="Ranks.")
@option(
    "--rules",
    type=click.Path(),
    metavar="FILE",
    setting="rules",
    section="Tensor parallelism",
    help="Which tensors are split how, where names do not tell.",
)
@transport_options
@option(
    "--verify",
    type=click.Choice(("leaves", "full", "none")),
    default="leaves",
    setting="verify",
    section="Transfer",
    help="Fast checksums of what lands, full digests, or nothing.",
)
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
@option(
    "--hedge/--no-hedge",
    default=True,
    setting="hedge",
    section="Transfer",
    help="Ask a replica too when a request is slower than the p95 of its peers.",
)
@option(
    "--fallback/--no-fallback",
    default=False,
    setting="fallback",
    section="Transfer",
    help="Let the next transport take over when the chosen one fails at run time.",
)
@option(
    "--evict", is_flag=True, default=False, section="Agent",
    help="Free slots that nobody uses when the agent's memory is full, the longest unused first.",
)  # fmt: skip
@option(
    "--peer", multiple=True, metavar="HOST:PORT", section="Agent",
    help="An agent that loads the same into a slot of the same name now, this one included; repeat. Together they read"
    " each byte of the source once.",
)  # fmt: skip
@s3_options
def command(
    *,
    address: str,
    into: str,
    device: str,
    require_digests: str | None,
    dry_run: bool,
    tp_rank: int | None,
    tp_size: int,
    rules: str | None,
    transport: str,
    transport_opt: tuple[str, ...],
    verify: str,
    max_in_flight: int | None,
    max_rate: int | None,
    hedge: bool,
    fallback: bool,
    evict: bool,
    peer: tuple[str, ...],
    # Any: the S3 options, as S3Flags takes them
    **s3: Any,
) -> None:
    """Load a model's weights into memory, files or nothing, verified as they land.

    Headers are checked before a weight byte moves. With --into none nothing is kept: the run measures, and
    proves that every byte can be read. Running the command again after an interruption resumes where the
    target keeps what was done (dir:).
    """
    from kvctl.core.addresses import parse_target
    from kvctl.core.config import parse_option
    from kvctl.core.errors import UsageError

    app = current()
    if tp_rank is not None and tp_rank >= tp_size:
        raise UsageError(
            f"--tp-rank {tp_rank} does not exist with --tp-size {tp_size}", hint=f"ranks are 0 to {tp_size - 1}"
        )
    kind = parse_target(into).kind
    if (peer or evict) and kind != "slot":
        raise UsageError("--peer and --evict are about an agent's slot", hint="add --into slot:NAME")
    options = dict(parse_option(item) for item in transport_opt)
    text, repo, version = model_address(app, address, S3Flags(**s3))

    from kvctl.weights.load import plan_load, run_load
    from kvctl.weights.request import LoadRequest

    request = LoadRequest(
        address=text,
        repo=repo,
        version=version,
        tp_rank=tp_rank,
        tp_size=tp_size,
        rules=rules,
        into=into,
        device=device,
        transport=transport,
        transport_options=options,
        verify=verify,
        max_in_flight_bytes=max_in_flight,
        max_rate=max_rate,
        hedge=hedge,
        fallback=fallback,
        digests=require_digests,
    )
    with app.running() as ctx:
        if dry_run:
            plan = plan_load(request, ctx).to_json()
            app.output.result(plan, lambda: render(plan))
            return
        if kind == "slot":
            from kvctl.agent.load import load_slot
            from kvctl.agent.target import SlotOptions

            report = load_slot(request, ctx, options=SlotOptions(evict=evict), peers=peer)
        else:
            report = run_load(request, ctx)
    show_report(app, report)
