"""`kvctl kv advise`."""

from __future__ import annotations

import json
from typing import Any

import click

from kvctl.cli.app import S3Flags, current
from kvctl.cli.documents import cell, render
from kvctl.cli.kv_options import known_model
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Age, Size, argument, option, s3_options
from kvctl.core.errors import UsageError
from kvctl.core.units import is_count

EXAMPLES = """\b
Examples:
  kvctl kv advise ./Llama-3.1-8B --tokens 32768 --bandwidth 20GB --latency 5ms --prefill-rate 9000
  kvctl kv advise lab:llama70b --tokens 200000 --report last --prefill 4096=91ms --prefill 235000=11.2s
"""


@click.command("advise", cls=KvCommand, epilog=EXAMPLES)
@argument("model", "A folder or URL with config.json, or REPO:NAME[@VERSION].", required=False, metavar="[MODEL]")
@option("--tokens", type=click.IntRange(min=1), required=True, envvar=None, help="Length of the sessions.")
@option("--dtype", default="BF16", help="Logical dtype of the KV.")
@option("--bytes-per-token", type=click.IntRange(min=1), envvar=None, help="Instead of a MODEL.")
@option(
    "--bandwidth", type=Size(), metavar="SIZE", envvar=None, section="Restore", help="Bytes per second, end to end."
)
@option("--latency", type=Age(), metavar="TIME", envvar=None, section="Restore",
        help="Before the first byte (default: none, or the report's set-up).")  # fmt: skip
@option("--report", "ident", metavar="ID", envvar=None, section="Restore",
        help="Take both from a saved report ('last', an ID) of kv pull or load-weights.")  # fmt: skip
@option("--prefill-rate", type=float, metavar="TOKENS/S", envvar=None, section="Recompute", help="Tokens per second.")
@option("--prefill", "points", multiple=True, metavar="N=TIME", envvar=None, section="Recompute",
        help="Measured: N tokens took TIME; two and more give attention's quadratic part too.")  # fmt: skip
@s3_options
def command(
    *,
    model: str | None,
    tokens: int,
    dtype: str,
    bytes_per_token: int | None,
    bandwidth: int | None,
    latency: float | None,
    ident: str | None,
    prefill_rate: float | None,
    points: tuple[str, ...],
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Say from which length on restoring KV beats computing it, what both take at --tokens, and whether to store at
    all.
    """
    from kvctl.cli.state import load_report
    from kvctl.kv.advise import LONGEST, GroupCost, Prefill, Restore, advise, group_costs
    from kvctl.kv.geometry import groups_of

    app = current()
    if (model is None) == (bytes_per_token is None):
        raise UsageError("give a MODEL, or --bytes-per-token", hint="its config.json tells the bytes per token")
    if (prefill_rate is None) == (not points):
        raise UsageError("give --prefill-rate, or --prefill once or more")
    if (bandwidth is None) == (ident is None):
        raise UsageError("give --bandwidth, or --report", hint="`kvctl kv pull .. ` saves a report")
    if ident is not None:
        measured = Restore.from_report(load_report(app.state_dir(), ident))
        restore = measured if latency is None else Restore(measured.bandwidth, latency)
    else:
        restore = Restore(float(bandwidth or 0), latency or 0.0)
    prefill = Prefill.at_rate(prefill_rate) if prefill_rate is not None else Prefill.fitted(list(map(_point, points)))
    longest = LONGEST
    if bytes_per_token is not None:
        costs: tuple[GroupCost, ...] = (GroupCost("given", 1, bytes_per_token),)
    else:
        assert model is not None
        with app.running() as ctx:
            config = _config(known_model(app, ctx, model, S3Flags(**s3)).files, model)
        costs = group_costs(groups_of(config, dtype=dtype), dtype)
        text = config.get("text_config")
        inner = {**config, **text} if isinstance(text, dict) else config
        longest = int(inner.get("max_position_embeddings") or LONGEST)
    found = advise(costs, restore, prefill, tokens, longest=longest)
    document = found.to_json()

    def human() -> str:
        shown = {
            "tokens": found.tokens,
            "bytes": found.bytes,
            "bytes per token": found.bytes_per_token,
            "restore_s": found.restore_s,
            "recompute_s": found.recompute_s,
            "break-even": "never" if found.break_even is None else f"{found.break_even:,} tokens",
            "bandwidth": f"{cell('bytes', int(restore.bandwidth))}/s",
            "latency_s": restore.latency,
        }
        if found.needed_bandwidth is not None and not found.store:
            shown["needed"] = f"{cell('bytes', int(found.needed_bandwidth))}/s would break even here"
        return f"{'store' if found.store else 'do not store'}: {found.reason}\n\n{render(shown)}"

    app.output.result(document, human)


def _point(text: str) -> tuple[int, float]:
    from kvctl.core.units import parse_age

    tokens, equals, seconds = text.partition("=")
    if not equals or not is_count(tokens.strip()):
        raise UsageError(f"{text!r} is not N=TIME", hint="write it like 4096=91ms")
    return int(tokens), parse_age(seconds)


def _config(files: Any, model: str) -> dict[str, Any]:  # Any: JSON
    from kvctl.core.errors import FormatError

    if "config.json" not in files:
        raise UsageError(f"{model} has no config.json", hint="give --bytes-per-token instead")
    try:
        found = json.loads(files["config.json"])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{model}: config.json is not JSON", cause=str(error)) from error
    if not isinstance(found, dict):
        raise FormatError(f"{model}: config.json is no JSON object")
    return found
