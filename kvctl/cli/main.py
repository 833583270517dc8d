"""The entry point: builds the tree from its table, runs a command, turns errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, cast

import click

from kvctl import __version__
from kvctl.cli.app import App
from kvctl.cli.lazy import LazyGroup
from kvctl.cli.options import FORMATS
from kvctl.cli.output import Format, open_closed_streams
from kvctl.cli.tree import TREE
from kvctl.core.errors import EnvError, InterruptedRunError, KvctlError

_SIGINT = 2
_SHORT = re.compile(r"-[qvyn]*o(.*)")  # alone or after flags, as in -qo json
_EPILOG = "Topics: `kvctl help` lists them. Exit codes: `kvctl help exit-codes`."


def program() -> click.Group:
    """The whole tree; no command is imported."""
    group = LazyGroup(
        "kvctl", "Move model weights between fleets and shared storage: fast, verified, resumable.", TREE, _EPILOG
    )
    # click's own writes past our output
    version = click.Option(
        ["-V", "--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
        help="Show the version and exit.",
    )  # fmt: skip
    group.params.append(version)
    return group


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.find_root().obj.output.plain(f"kvctl {__version__}")
        ctx.exit()


def main() -> None:
    open_closed_streams()
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """The exit code of one invocation; everything it has to say is said."""
    app = App(argv, wanted_format(argv))
    try:
        # Any: click returns what the command returned, or the code of an early exit
        result: Any = program().main(args=list(argv), prog_name="kvctl", standalone_mode=False, obj=app)
        app.output.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        app.output.status(error.format_message())
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _fail(app, InterruptedRunError("interrupted", signum=_SIGINT))
    except Exception as error:
        return _fail(app, error)
    return result if isinstance(result, int) else 0


def wanted_format(argv: Sequence[str]) -> Format:
    """The format asked for, found without parsing: errors of the parser itself must be in it."""
    found = os.environ.get("KVCTL_OUTPUT", "")
    for index, word in enumerate(argv):
        if word == "--":
            break
        if word == "--output" and index + 1 < len(argv):
            found = argv[index + 1]
        elif word.startswith("--output="):
            found = word.partition("=")[2]
        elif match := _SHORT.fullmatch(word):
            value = match[1].removeprefix("=")
            found = value or (argv[index + 1] if index + 1 < len(argv) else "")
    return cast("Format", found) if found in FORMATS else "human"


def _fail(app: App, error: BaseException) -> int:
    from kvctl.cli.errors import as_kvctl_error, exit_code

    app.settle()
    known = as_kvctl_error(error)
    if known is None:
        known = _crash(app, error)
    code = exit_code(known)
    if app.output.verbose >= 2:
        app.output.status(_traceback(error))
    app.output.error(known, code)
    with contextlib.suppress(KvctlError):  # what a stream still holds is of no use, and must not be the last word
        app.output.flush()
    return code


def _crash(app: App, error: BaseException) -> KvctlError:
    """A bug: the traceback goes to a file, its ID to the person."""
    from kvctl.cli.state import save_crash

    summary = f"{type(error).__name__}: {error}"
    try:
        command = " ".join(app.argv)
        ident, path = save_crash(app.state_dir(), f"kvctl {__version__}\nkvctl {command}\n\n{_traceback(error)}")
    except (OSError, EnvError) as problem:
        return KvctlError(
            "kvctl failed in a way it should not",
            cause=summary,
            hint=f"-vv shows the traceback (no crash log: {problem})",
        )
    return KvctlError(
        "kvctl failed in a way it should not",
        cause=summary,
        hint=f"the traceback is in {path}; please report it",
        details={"crash": ident, "log": path},
    )


def _traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error)).rstrip()
