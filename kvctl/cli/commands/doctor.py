"""`kvctl doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.app import App, S3Flags, current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import option, s3_options
from kvctl.cli.output import Style
from kvctl.cli.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvctl.core.addresses import StoreConfig
    from kvctl.doctor.findings import Probe

AREAS = ("host", "transports", "rdma", "gpu", "nixl", "stores")
_STYLES: Mapping[str, Style] = {"ok": "dim", "degraded": "yellow", "broken": "red"}


@click.command("doctor", cls=KvCommand)
@option(
    "--area",
    multiple=True,
    type=click.Choice(AREAS),
    envvar=None,
    help="Look at this area only; repeat for more (default: all).",
)
@s3_options
def command(area: tuple[str, ...], **s3: Any) -> None:  # Any: as S3Flags takes them
    """Look at this machine and at the stores of the configured repos (or of -r): what is ok, what is degraded (it
    works, but slower or with less safety), what is broken, and the fix for each. Changes nothing. Ends with 10 when
    something is broken; degraded is 0.
    """
    app = current()
    areas = area or AREAS

    from kvctl.doctor.examine import examine

    probes = _probes(app, areas, S3Flags(**s3))
    with app.running() as ctx:
        diagnosis = examine(probes, ctx.cancel)
    document = diagnosis.to_json()
    app.output.result(document, lambda: _shown(app, document))
    diagnosis.require_whole()


def _probes(app: App, areas: Sequence[str], flags: S3Flags) -> list[Probe]:
    from kvctl.doctor import gpu, host, nixl, rdma, stores, transports
    from kvctl.doctor.findings import Machine

    machine = Machine()
    found: list[Probe] = []
    for name in areas:
        if name == "host":
            found += host.probes(machine)
        elif name == "transports":
            found += transports.probes()
        elif name == "rdma":
            found += rdma.probes(machine)
        elif name == "gpu":
            found += gpu.probes(machine)
        elif name == "nixl":
            found += nixl.probes()
        else:
            found += stores.probes(_repos(app, flags), machine)
    return found


def _repos(app: App, flags: S3Flags) -> dict[str, Sequence[StoreConfig]]:
    """The one of -r, else all that are configured."""
    chosen = app.flags.get("repo")
    if chosen:
        return {str(chosen): app.stores(str(chosen), flags)}
    return {name: repo.stores for name, repo in app.config.repos.items()}


def _shown(app: App, document: Mapping[str, Any]) -> str:  # Any: JSON
    """A table of all, then a paragraph for each line that is not ok."""
    import sys

    findings = document["findings"]
    lines = table(
        ("area", "what", "state", "found"),
        [(item["area"], item["name"], item["state"], item["value"]) for item in findings],
    )
    # colour after the columns are aligned
    lines = [
        lines[0],
        *(
            line.replace(
                f"  {item['state']}", f"  {app.output.style(item['state'], _STYLES[item['state']], sys.stdout)}", 1
            )
            for line, item in zip(lines[1:], findings, strict=True)
        ),
    ]
    for state in ("broken", "degraded"):
        for item in findings:
            if item["state"] == state:
                what = app.output.style(f"{state}: {item['area']} {item['name']}", _STYLES[state], sys.stdout)
                lines += ["", f"{what}: {item['why'] or item['value']}"]
                lines += [f"  fix: {item['fix']}"] if item["fix"] else []
    return "\n".join([*lines, "", f"all in all: {document['state']}"])
