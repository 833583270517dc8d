"""click commands and groups of this program: groups that know their commands from the table and import one
only when it is invoked; help in sections; the global options on every command. Imports click and the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvctl.cli.options import KvArgument, KvOption, global_options
from kvctl.cli.tree import Branch, Leaf, Section

CONTEXT_SETTINGS = {"max_content_width": 100, "show_default": True}


def _show_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.find_root().obj.output.plain(ctx.get_help())
        ctx.exit()


class _Sectioned(click.Command):
    """Help with arguments, then options under their sections, the global ones last."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        # click's own writes past our output, and ends with 1 when the reader has gone
        return click.Option(
            ["-h", "--help"], is_flag=True, is_eager=True, expose_value=False, callback=_show_help,
            help="Show this message and exit.",
        )  # fmt: skip

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        arguments: list[tuple[str, str]] = []
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, KvArgument):
                if param.about:
                    arguments.append((param.make_metavar(ctx), param.about))
                continue
            record = param.get_help_record(ctx)
            if record is not None:
                section = param.section if isinstance(param, KvOption) else "Global options"
                sections.setdefault(section, []).append(record)
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        last = sections.pop("Global options", [])
        for title, records in [*sections.items(), ("Global options", last)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class KvCommand(_Sectioned):
    """A command with the global options after its own."""

    # Any: click's own signature
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", CONTEXT_SETTINGS)
        super().__init__(*args, **kwargs)
        self.params = [*self.params, *global_options()]


class LazyGroup(_Sectioned, click.Group):
    """A group made of table sections; no command's module is imported before it is invoked."""

    def __init__(self, name: str, summary: str, sections: Sequence[Section], epilog: str | None = None) -> None:
        super().__init__(
            name,
            help=summary,
            epilog=epilog,
            context_settings=CONTEXT_SETTINGS,
            params=list(global_options()),
            no_args_is_help=True,
            subcommand_metavar="COMMAND [ARGS]...",
        )
        self.sections = sections
        self.entries = {entry.name: entry for section in sections for entry in section.entries}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        if isinstance(entry, Branch):
            return LazyGroup(entry.name, entry.summary, (Section("Commands", entry.leaves),))
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.entries and not args[0].startswith("-") and not ctx.resilient_parsing:
            import difflib

            close = difflib.get_close_matches(args[0], self.entries, n=1)
            error = click.UsageError(f"no command is called {args[0]!r}", ctx)
            if close:
                error.add_note(f"did you mean {ctx.command_path} {close[0]}?")
            raise error
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in self.sections:
            with formatter.section(section.title):
                formatter.write_dl([(entry.name, entry.summary) for entry in section.entries])
        super().format_options(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [
            CompletionItem(entry.name, help=entry.summary)
            for entry in self.entries.values()
            if entry.name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


def find(entries: Sequence[Section], path: Sequence[str]) -> Leaf | Branch | None:
    """The entry of the table at a path of names."""
    table = {entry.name: entry for section in entries for entry in section.entries}
    entry = table.get(path[0]) if path else None
    if len(path) > 1 and isinstance(entry, Branch):
        return next((leaf for leaf in entry.leaves if leaf.name == path[1]), None)
    return entry if len(path) == 1 else None
