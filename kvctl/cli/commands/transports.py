"""`kvctl transports ls|probe`. Listing loads no plug-in's heavy imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from kvctl.cli.app import current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import argument
from kvctl.cli.tables import table

# Any: rows of a JSON document
Row = Mapping[str, Any]


@click.command("ls", cls=KvCommand)
def ls() -> None:
    """List the stores and transports that are installed, with their options and what they need."""
    from kvctl.transports.registry import broken_plugins, store_specs, transport_specs

    broken: list[Row] = [{"group": item.group, "name": item.name, "reason": item.reason} for item in broken_plugins()]
    stores: list[Row] = [
        {
            "scheme": spec.scheme,
            "summary": spec.summary,
            "options": [option.name for option in spec.options],
        }
        for spec in store_specs().values()
    ]
    transports: list[Row] = [
        {
            "name": spec.name,
            "schemes": list(spec.schemes),
            "memory": sorted(spec.memory_kinds),
            "rank": spec.rank,
            "summary": spec.summary,
            "requirements": spec.requirements,
            "options": [
                {"name": option.name, "summary": option.summary, "default": option.default} for option in spec.options
            ],
        }
        for spec in sorted(transport_specs().values(), key=lambda item: (-item.rank, item.name))
    ]

    def human() -> str:
        lines = table(("store", "what it is"), [(f"{row['scheme']}://", row["summary"]) for row in stores])
        rows = [
            (
                row["name"],
                ", ".join(row["schemes"]) or "any",
                ", ".join(row["memory"]),
                ", ".join(option["name"] for option in row["options"]) or "-",
                row["summary"],
            )
            for row in transports
        ]
        lines += ["", *table(("transport", "stores", "memory", "options", "how"), rows)]
        if broken:
            lines += ["", *table(("broken plug-in", "why"), [(row["name"], row["reason"]) for row in broken])]
        return "\n".join(lines)

    document = {"stores": stores, "transports": transports, "broken": broken}
    current().output.document("kvctl.transports/1", document, human)


@click.command("probe", cls=KvCommand)
@argument("name", "Only this transport; fails when it cannot run here.", required=False)
def probe(name: str | None) -> None:
    """Say which transports can run here, why others cannot, and how to get them."""
    from kvctl.core.errors import EnvError, NotFoundError
    from kvctl.transports import registry

    specs = registry.transport_specs()
    if name is not None and name not in specs:
        raise NotFoundError(f"no transport is called {name!r}", hint=f"known here: {', '.join(sorted(specs))}")
    rows: list[Row] = []
    for spec in sorted(specs.values(), key=lambda item: (-item.rank, item.name)):
        if name is not None and spec.name != name:
            continue
        try:
            found = registry.probe(spec)
        except EnvError as error:
            # one broken plug-in must not hide the others
            found = registry.Probe(available=False, reason=str(error))
        hint = "" if found.available else found.hint or spec.install_hint
        rows.append({"name": spec.name, "available": found.available, "reason": found.reason, "hint": hint})

    def human(listed: list[Row]) -> str:
        cells = [
            (
                row["name"],
                "available" if row["available"] else "not available",
                row["reason"] or "-",
                row["hint"] or "-",
            )
            for row in listed
        ]
        return "\n".join(table(("transport", "state", "because", "how to get it"), cells))

    current().output.rows("kvctl.probe/1", "transports", rows, human)
    if name is not None and not rows[0]["available"]:
        raise EnvError(f"transport {name} is not available", cause=rows[0]["reason"], hint=rows[0]["hint"] or None)
