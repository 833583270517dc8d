"""`kvctl report [last|ID]`, and how commands show and save theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.app import App, current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import argument
from kvctl.core.errors import EnvError, FormatError

if TYPE_CHECKING:
    from kvctl.transfer.report import Report


@click.command("report", cls=KvCommand)
@argument("ident", "'last', an ID, or a part of one.", metavar="[last|ID]", required=False, default="last")
def command(ident: str) -> None:
    """Show the report of the last run, or of one by its ID. The last 200 are kept."""
    from kvctl.cli.reports import render
    from kvctl.cli.state import load_report

    app = current()
    document = load_report(app.state_dir(), ident)

    def shown() -> str:
        try:
            return render(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                f"report {document.get('id', ident)} cannot be shown",
                cause=f"{type(error).__name__}: {error}",
                hint="another version of kvctl wrote it, or it was edited; -o json prints it as it is",
            ) from error

    app.output.document(document["schema"], document, shown)


def show_report(app: App, report: Report) -> None:
    """Save the report of a run and print it. Not being able to save it is a warning."""
    from kvctl.cli.reports import render

    document = saved_report(app, report)
    app.output.document(document["schema"], document, lambda: render(document))


def saved_report(app: App, report: Report) -> dict[str, Any]:  # Any: JSON
    """The report's document, with its ID once it is saved."""
    from kvctl.cli.state import save_report

    document = report.to_json()
    try:
        document["id"] = save_report(app.state_dir(), report.command, document)
    except (OSError, EnvError) as error:
        app.output.warning(f"the report could not be saved: {error}")
    return document
