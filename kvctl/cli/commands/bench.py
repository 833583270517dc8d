"""`kvctl bench paths|interference`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from kvctl.cli.app import S3Flags, current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Age, Size, Span, argument, option, s3_options
from kvctl.cli.tables import fields, table
from kvctl.core.units import format_seconds, format_size

EXAMPLES = """\b
Examples:
  kvctl bench paths /mnt/models
  kvctl bench paths node://10.0.0.7:7780/bench --sizes 64KiB,1MiB,16MiB --concurrency 1,8
  kvctl bench paths -r lab --plot lab.svg -o json
"""


if TYPE_CHECKING:
    _Type = click.ParamType[Any]  # Any: of items of any type
else:
    # generic only in newer releases of click
    _Type = click.ParamType


class ListOf(_Type):
    """Values separated by commas."""

    name = "list"

    def __init__(self, item: _Type) -> None:
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # Any: click's
        if isinstance(value, tuple):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in str(value).split(","))


@click.command("paths", cls=KvCommand, epilog=EXAMPLES)
@argument("url", "The store: a path or a URL (default: each member of the repo).", required=False)
@option(
    "--sizes", type=ListOf(Size()), metavar="SIZE,..", envvar=None, show_default="64KiB,1MiB,4MiB,16MiB",
    help="Bytes per request.",
)  # fmt: skip
@option(
    "--concurrency", type=ListOf(click.IntRange(min=1)), metavar="N,..", envvar=None, show_default="1,4",
    help="Requests in flight.",
)  # fmt: skip
@option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, envvar=None, help="Interleaved rounds.")
@option(
    "--seconds", type=Age(), metavar="TIME", envvar=None, show_default="500ms", help="How long one measurement takes."
)
@option("--transport", default="auto", envvar=None, help="Measure this one only (default: every one that can run).")
@option(
    "--transport-opt", multiple=True, metavar="K=V", envvar=None, help="An option of the transport; repeat for more."
)
@option("--plot", type=click.Path(), metavar="FILE", envvar=None, help="A picture: .svg, .png or .pdf.")
@option("--keep", is_flag=True, default=False, envvar=None, help="Leave the test object where it is.")
@s3_options
def paths(
    *,
    url: str | None,
    sizes: tuple[int, ...] | None,
    concurrency: tuple[int, ...] | None,
    rounds: int,
    seconds: float | None,
    transport: str,
    transport_opt: tuple[str, ...],
    plot: str | None,
    keep: bool,
    # Any: the S3 options, as S3Flags takes them
    **s3: Any,
) -> None:
    """Measure every path to a store that can run here, reading, beside the ceiling of its medium: median GB/s, p50 and
    p99 per request, CPU per GB on both ends. Stores one object of 64 MiB or more under URL/.kvctl-bench-*/ and removes
    it. Ends with 3 when a path broke.
    """
    from kvctl.core.config import parse_option

    app = current()
    flags = S3Flags(**s3)
    configs = app.stores(url, flags) if url else app.repo(flags)
    stores = [(config.url, config) for config in configs]

    from kvctl.bench.paths import CONCURRENCIES, SIZES, BenchOptions, bench_paths
    from kvctl.bench.plot import require_plot, write_plot

    if plot:
        require_plot(plot)
    options = BenchOptions(
        sizes=sizes or SIZES,
        concurrencies=concurrency or CONCURRENCIES,
        rounds=rounds,
        seconds=0.5 if seconds is None else seconds,
        transport=transport,
        transport_options=dict(parse_option(item) for item in transport_opt),
        keep=keep,
    )
    with app.running() as ctx:
        result = bench_paths(stores, options, ctx)
    document = result.to_json()
    if plot:
        write_plot(document, plot)
    app.output.result(document, lambda: _shown(document))
    result.require_measured()


@click.command("interference", cls=KvCommand)
@argument("engine", "The engine, with kvctl's plug-in: engine:http://HOST:PORT.")
@option("--from", "source", metavar="SOURCE", envvar=None, help="slot:NAME that it uses (default: its own weights).")
@option("--to", required=True, metavar="URL/NAME", envvar=None, help="A folder for the checkpoints; each is removed.")
@option("--rounds", type=click.IntRange(min=1), default=10, show_default=True, envvar=None, help="Interleaved rounds.")
@option(
    "--seconds", type=Age(), default=20.0, metavar="TIME", envvar=None, show_default="20s",
    help="How long one measurement takes, at least.",
)  # fmt: skip
@option("--streams", type=click.IntRange(min=0), default=1, show_default=True, envvar=None,
        help="Streams of our own, so that there are tokens.")  # fmt: skip
@option("--max-rate", type=Size(), metavar="SIZE", envvar=None, help="Of the paced ones.")
@option("--min-rate", type=Size(), default=1 << 20, show_default="1MiB", metavar="SIZE", envvar=None,
        help="Of the paced ones.")  # fmt: skip
@option("--latency-budget", type=Span(), default=0.001, show_default="1ms", metavar="TIME", envvar=None,
        help="Of the paced ones.")  # fmt: skip
@option("--plot", type=click.Path(), metavar="FILE", envvar=None, help="A picture: .svg, .png or .pdf.")
@s3_options
def interference(
    *,
    engine: str,
    source: str | None,
    to: str,
    rounds: int,
    seconds: float,
    streams: int,
    max_rate: int | None,
    min_rate: int,
    latency_budget: float,
    plot: str | None,
    **s3: Any,  # Any: the S3 options, as S3Flags takes them
) -> None:
    """Measure what checkpoints do to an engine's tokens: p50 and p99 of the gaps between them without any, with
    unpaced and with paced ones, and with a plain copy, interleaved. Ends with 3 when there are too few tokens.
    """
    from kvctl.bench.interference import InterferenceOptions, bench_interference, write_interference_plot
    from kvctl.bench.plot import require_plot
    from kvctl.checkpoint.pace import Limits
    from kvctl.cli.commands.swap import open_adapter
    from kvctl.core.addresses import PathOrUrl
    from kvctl.core.errors import UsageError

    app = current()
    url = engine.removeprefix("engine:")
    place = app.weights(to, S3Flags(**s3))
    if not isinstance(place, PathOrUrl):
        raise UsageError(f"{to!r} is no path and no URL", hint=f"for a folder write ./{to}")
    if plot:
        require_plot(plot)
    limits = Limits(max_rate, float(min_rate), latency_budget)
    options = InterferenceOptions(
        url, source or f"engine:{url}", place.store, limits, rounds=rounds, seconds=seconds, streams=streams
    )
    with app.running() as ctx:
        document = bench_interference(options, lambda: open_adapter(url, ctx), ctx)
    if plot:
        write_interference_plot(document, plot)
    app.output.result(document, lambda: _gaps(document))


def _gaps(document: Mapping[str, Any]) -> str:  # Any: JSON
    rows = [
        (
            kind["name"], kind["samples"], _time(kind["p50_s"]), _time(kind["p99_s"]),
            f"{1000 * kind['change_s']:+.2f} ms", kind["copies"], format_size(kind["bytes"]),
        )
        for kind in document["kinds"]
    ]  # fmt: skip
    headers = ("while", "gaps", "p50", "p99", "p99 change", "copies", "bytes")
    lines = table(headers, rows, right=(1, 2, 3, 4, 5, 6))
    share = document["paced_of_unpaced"]
    lines += ["", *(line for kind in document["kinds"] for line in _paces(kind))]
    spread = _time(document["baseline_spread_s"])
    lines += ["", f"the baseline's own p99 spread over {document['rounds']} rounds: {spread}"]
    lines.append(f"the paced change is {_ratio(share)} of the unpaced one; {document['resolution']}")
    return "\n".join(lines)


def _paces(kind: Mapping[str, Any]) -> list[str]:  # Any: JSON
    paces = kind["pacing"]
    if not paces:
        return []
    rates = [pace["mean_rate"] for pace in paces]
    missed, backoffs, windows = (sum(pace[name] for pace in paces) for name in ("budget_missed", "backoffs", "windows"))
    return [
        (
            f"{kind['name']}: {format_size(min(rates))}/s to {format_size(max(rates))}/s, at least "
            f"{format_size(paces[0]['min_rate'])}/s were asked for; {backoffs} back-offs in {windows} windows; the "
            f"budget was missed by {missed} of {len(paces)}"
        )
    ]


_READINTO: Final = "Python's http.client and `readinto`, asking the ceiling's server"


def _shown(document: Mapping[str, Any]) -> str:  # Any: JSON
    lines: list[str] = []
    for store in document["stores"]:
        lines += [store["url"], ""]
        rows = [
            (
                format_size(cell["size"]), cell["concurrency"], cell["path"], f"{cell['gb_per_s']:.2f}",
                _ratio(cell["of_ceiling"]), _time(cell["p50_s"]), _time(cell["p99_s"]),
                f"{cell['client_cpu_s_per_gb']:.2f}", _ratio(cell["server_cpu_s_per_gb"]), cell["requests"],
            )
            for cell in store["cells"]
        ]  # fmt: skip
        headers = ("size", "at once", "path", "GB/s", "of ceiling", "p50", "p99", "CPU s/GB", "server's", "requests")
        lines += table(headers, rows, right=(0, 1, 3, 4, 5, 6, 7, 8, 9))
        passed = "; ".join(f"{name}: {reason}" for name, reason in store["passed_over"])
        facts = [
            ("ceiling", store["ceiling"] or "none is known for this medium"),
            ("readinto", _READINTO if any(cell["path"] == "readinto" for cell in store["cells"]) else ""),
            ("ceiling-rdma", store["rdma_ceiling"]),
            ("server's CPU", store["server_cpu"]),
            ("auto takes", f"{store['auto']} ({store['auto_reason']})"),
            ("passed over", passed),
        ]
        facts += [(f"not measured: {item['path']}", _because(item)) for item in store["unavailable"]]
        facts += [(f"broke: {item['path']}", item["error"]) for item in store["failed"]]
        facts += [("note", note) for note in store["notes"]]
        facts.append(("left there", f"{store['url']}/{store['prefix']}/" if store["left"] else ""))
        lines += ["", *fields(facts, "  "), ""]
    host = document["host"]
    lines.append(
        f"{document['rounds']} interleaved rounds of {format_seconds(document['seconds_per_measurement'])}; one object "
        f"read again and again, warm; {host['cpus']} CPUs, {host['system']}"
    )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.001 else format_seconds(seconds)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _because(item: Mapping[str, str]) -> str:
    return f"{item['reason']}; {item['hint']}" if item["hint"] else item["reason"]
