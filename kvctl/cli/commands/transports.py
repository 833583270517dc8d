"""`kvctl transports ls|probe|check|new`. Listing loads no plug-in's heavy imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from kvctl.cli.app import S3Flags, current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import argument, option, s3_options
from kvctl.cli.tables import fields, table

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


@click.command("check", cls=KvCommand)
@argument("url", "The store: a path or a URL. Test objects go under a fresh prefix of it, and are removed.")
@option("--transport", default="auto", envvar=None, help="Check this transport only (default: every one that can run).")
@option(
    "--transport-opt", multiple=True, metavar="K=V", envvar=None, help="An option of the transport; repeat for more."
)
@s3_options
def check(url: str, transport: str, transport_opt: tuple[str, ...], **s3: Any) -> None:  # Any: as S3Flags takes them
    """Hold a store and its transports to the contracts that a repo relies on, live, each claimed or denied ability
    proved. Writes some hundred objects of up to 300 KB under URL/.kvctl-check-*/ and removes them. Ends with 7 when
    a check does not hold. Needs pytest: pip install 'kvctl[check]'.
    """
    from kvctl.core.config import parse_option
    from kvctl.core.errors import UsageError

    app = current()
    found = app.stores(url, S3Flags(**s3))
    if len(found) != 1:
        raise UsageError(f"{url} names {len(found)} stores", hint="check one at a time")
    options = dict(parse_option(item) for item in transport_opt)

    from kvctl.bench.contracts import check_contracts

    with app.running() as ctx:
        result = check_contracts(found[0], ctx, transport=transport, options=options)
    document = result.to_json()
    app.output.result(document, lambda: _checked(document))
    result.require_held()
    if result.left:
        raise UsageError(
            f"{len(result.left)} test objects could not be removed from {result.url}/{result.prefix}",
            hint="remove the prefix by hand; the credentials may lack the right to delete",
        )


def _checked(document: Row) -> str:
    """What was checked by subject, the flags, and every check that did not hold."""
    checks: list[Row] = document["checks"]
    rows = []
    for subject in dict.fromkeys(item["subject"] for item in checks):
        mine = [item for item in checks if item["subject"] == subject]
        count = {word: sum(item["outcome"] == word for item in mine) for word in ("held", "broken", "hung", "skipped")}
        rows.append((subject, count["held"], count["broken"] + count["hung"], count["skipped"]))
    lines = table(("checked", "held", "broken", "skipped"), rows, right=(1, 2, 3))
    unchecked = [(way["name"], way["reason"], way["hint"] or "-") for way in document["transports"] if way["reason"]]
    if unchecked:
        lines += ["", *table(("not checked", "because", "how to get it"), unchecked)]
    flags = [
        (item["subject"], item["flag"], _claim(item["claimed"]), item["verdict"])
        for item in document["flags"]
        if item["verdict"] != "not checked"
    ]
    lines += ["", *table(("of", "flag", "claimed", "verdict"), flags)]
    for item in checks:
        if item["outcome"] not in {"held", "skipped"}:
            parameters = f" [{item['parameters']}]" if item["parameters"] else ""
            lines += ["", f"{item['outcome']}: {item['subject']}: {item['check']}{parameters}"]
            lines += [f"  {line}" for line in item["why"].splitlines()[:6]]
    lines += [
        "",
        *fields(
            [
                ("compared through", document["raw"]),
                ("written under", f"{document['url']}/{document['prefix']}"),
                ("left there", ", ".join(document["left"][:5]) or "nothing"),
            ]
        ),
    ]
    return "\n".join(lines)


def _claim(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@click.command("new", cls=KvCommand)
@argument("name", "The plug-in's name: its scheme and transport, such as foo or foo-fast.")
@option(
    "--for",
    "scheme",
    metavar="SCHEME",
    envvar=None,
    help="Only a transport, for the stores of this scheme (default: a store and its transport).",
)
@option("--into", type=click.Path(), metavar="DIR", envvar=None, help="New folder (default: ./kvctl-NAME).")
def new(name: str, scheme: str | None, into: str | None) -> None:
    """Write a plug-in package that works: entry points, store, transport, contract test, README. Its example keeps
    objects in an SQLite file; put your server's calls in their place.
    """
    from kvctl.cli.scaffold import write_plugin
    from kvctl.core.errors import UsageError
    from kvctl.transports.registry import store_specs, transport_specs

    if scheme is not None and scheme not in store_specs():
        raise UsageError(f"no store knows {scheme}://", hint=f"known here: {', '.join(sorted(store_specs()))}")
    if name in transport_specs() or (scheme is None and name in store_specs()):
        raise UsageError(f"{name} is taken: two plug-ins of one name disable each other", hint="choose another name")
    folder = into or f"kvctl-{name}"
    written = write_plugin(name, folder, scheme=scheme)
    document = {"name": name, "folder": folder, "files": written}
    steps = f"cd {folder} && pip install -e '.[test]' && pytest"
    current().output.document("kvctl.transports-new/1", document, lambda: "\n".join([*written, "", f"next: {steps}"]))
