"""`kvctl help [TOPIC]`: the topics of `kvctl/help`."""

from __future__ import annotations

from importlib.resources import files

import click
from click.shell_completion import CompletionItem

from kvctl.cli.app import current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import argument
from kvctl.cli.tables import table


def topics() -> dict[str, str]:
    """Topic -> its first line, without the heading mark."""
    found = {
        entry.name.removesuffix(".md"): entry.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for entry in files("kvctl.help").iterdir()
        if entry.name.endswith(".md")
    }
    return dict(sorted(found.items()))


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name, help=title) for name, title in topics().items() if name.startswith(incomplete)]


@click.command("help", cls=KvCommand)
@argument("topic", "A topic; without one they are listed.", required=False, shell_complete=_complete)
def command(topic: str | None) -> None:
    """Show a help topic, or list them."""
    from kvctl.core.errors import NotFoundError

    app = current()
    known = topics()
    if topic is None:
        rows = [{"topic": name, "title": title} for name, title in known.items()]
        app.output.rows(
            "kvctl.help/1",
            "topics",
            rows,
            lambda listed: "\n".join(table(("topic", "about"), [tuple(row.values()) for row in listed])),
        )
        return
    if topic not in known:
        import difflib

        close = difflib.get_close_matches(topic, known, n=1)
        raise NotFoundError(
            f"no help topic is called {topic!r}",
            cause=f"topics: {', '.join(known)}",
            hint=f"did you mean {close[0]}?" if close else "`kvctl COMMAND --help` is the help of a command",
        )
    text = files("kvctl.help").joinpath(f"{topic}.md").read_text(encoding="utf-8")
    app.output.document("kvctl.help/1", {"topic": topic, "text": text}, lambda: text)
