"""`kvctl completion SHELL`: the script that makes a shell complete kvctl. Also used to generate completions/."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from kvctl.cli.app import current
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import argument

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """The completion script; it asks kvctl itself what fits, so it does not age with the commands."""
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(click.Group("kvctl"), {}, "kvctl", "_KVCTL_COMPLETE")
    # not `made.source()`: for bash it starts a bash to look at its version
    return ShellComplete.source(made).strip() + "\n"


@click.command("completion", cls=KvCommand)
@argument("shell", "bash, zsh or fish.", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    r"""Print the completion script of a shell.

    \b
    bash  kvctl completion bash > ~/.local/share/bash-completion/completions/kvctl
    zsh   kvctl completion zsh > a directory of $fpath, as _kvctl
    fish  kvctl completion fish > ~/.config/fish/completions/kvctl.fish
    """
    text = script(shell)
    current().output.document("kvctl.completion/1", {"shell": shell, "script": text}, lambda: text)
