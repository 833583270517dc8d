"""What one invocation knows: its flags, its configuration (read when first needed), its output, and the repo
and stores that its arguments mean. Made once by `main`, passed to commands as click's `obj`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from kvctl.cli.output import Format, Output, stdin_is_terminal
from kvctl.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from kvctl.core.addresses import StoreConfig, Weights
    from kvctl.core.config import Config, Setting
    from kvctl.core.context import Context


class S3Flags:
    """The S3 options of a command line; they apply to URLs given there."""

    def __init__(
        self,
        endpoint_url: Sequence[str] = (),
        region: str | None = None,
        profile: str | None = None,
        no_sign_request: bool = False,
        ca_bundle: str | None = None,
    ) -> None:
        self.endpoints = tuple(endpoint_url)
        self.options: dict[str, str] = {}
        for name, value in (("region", region), ("profile", profile), ("ca_bundle", ca_bundle)):
            if value:
                self.options[name] = value
        if no_sign_request:
            self.options["no_sign_request"] = "true"


class App:
    """`argv` is what was typed. `flags` and `sources` hold the global options that were given, and how."""

    def __init__(self, argv: Sequence[str], form: Format) -> None:
        self.argv = list(argv)
        # Any: values of options of several types
        self.flags: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.output = Output(form)
        self.s3_used = False

    def settle(self) -> None:
        """Bring the output in line with the global options; called before a command runs."""
        self.output.form = self.flags.get("output", self.output.form)
        self.output.quiet = bool(self.flags.get("quiet"))
        self.output.verbose = int(self.flags.get("verbose", 0))
        self.output.color = self.flags.get("color", "auto")

    @cached_property
    def config(self) -> Config:
        from kvctl.core.config import load_config

        try:
            cwd = os.getcwd()
        except FileNotFoundError:  # it was removed: there is no project
            cwd = os.sep
        return load_config(explicit=self.flags.get("config"), environ=os.environ, cwd=cwd)

    def setting(self, name: str) -> Setting:
        """Flag, environment, file or default of a setting that has a global flag or none."""
        from kvctl.core.config import SETTINGS, Setting

        if self.sources.get(name) == "flag":
            return Setting(self.flags[name], "flag", f"flag {SETTINGS[name].flag}")
        return self.config.setting(name, os.environ)

    def repo(self, s3: S3Flags | None = None, name: str | None = None) -> tuple[StoreConfig, ...]:
        """The member stores of `name`, else of -r, else of the default repo. Raises UsageError."""
        chosen = name or self.flags.get("repo")
        if not chosen:
            default = self.config.default_repo
            if default is None:
                raise UsageError(
                    "no repo was named",
                    cause="neither -r/--repo, KVCTL_REPO nor default_repo in a config file",
                    hint="add -r NAME, -r ./DIR or -r URL,URL; see `kvctl help config`",
                )
            return self.config.repo(str(default.value)).stores
        return self.stores(chosen, s3)

    def stores(self, text: str, s3: S3Flags | None = None) -> tuple[StoreConfig, ...]:
        """A configured repo's name, else paths or URLs separated by commas."""
        if text in self.config.repos or not ("://" in text or "/" in text or text.startswith((".", "~"))):
            return self.config.repo(text).stores
        from kvctl.core.addresses import expand_home, parse_store

        flags = s3 or S3Flags()
        configs: list[StoreConfig] = []
        for part in text.split(","):
            piece = part.strip()
            if not piece:
                raise UsageError(f"an empty store between commas in {text!r}")
            remote = self._takes_s3(piece)
            configs.append(
                parse_store(
                    piece if "://" in piece else expand_home(piece),
                    endpoints=flags.endpoints if remote else (),
                    options=flags.options if remote else None,
                )
            )
        return tuple(configs)

    def _takes_s3(self, text: str) -> bool:
        remote = "://" in text and not text.startswith(("file://", "mem://", "peer://", "slot://"))
        self.s3_used = self.s3_used or remote
        return remote

    def _check_s3_used(self) -> None:
        """Raises UsageError for an S3 flag that would have no effect: it belongs to a configured repo, or nowhere."""
        ctx = click.get_current_context()
        for name in ("endpoint_url", "region", "profile", "no_sign_request", "ca_bundle"):
            if not self.s3_used and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise UsageError(
                    f"--{name.replace('_', '-')} has no effect: no store URL is on the command line",
                    hint="configured repos say this in the config file; see `kvctl help s3`",
                )

    def weights(self, text: str, s3: S3Flags | None = None) -> Weights:
        """A weights address, with the S3 flags on it if it is a URL."""
        from kvctl.core.addresses import parse_weights

        flags = s3 or S3Flags()
        remote = self._takes_s3(text)
        return parse_weights(
            text, endpoints=flags.endpoints if remote else (), options=flags.options if remote else None
        )

    def context(self) -> Context:
        """What a use case gets: progress on stderr, two-stage signals, the retry policy of the settings."""
        from kvctl.cli.progress import make_progress
        from kvctl.cli.signals import install
        from kvctl.core.cancel import CancelToken
        from kvctl.core.context import Context, RetryPolicy

        progress = make_progress(str(self.setting("progress").value), self.output)
        cancel = CancelToken()
        install(cancel, self.output, progress, self.argv)
        retry = RetryPolicy(
            attempts=cast("int", self.setting("retries").value),
            stall_timeout=cast("float", self.setting("stall_timeout").value),
        )
        return Context(progress=progress, cancel=cancel, retry=retry, config=self.config, verbose=self.output.verbose)

    @contextmanager
    def running(self) -> Iterator[Context]:
        """The context of a use case; tidies the progress display, and tells how to resume after a signal."""
        from kvctl.cli.signals import resume_command
        from kvctl.core.errors import InterruptedRunError, TransientError

        self._check_s3_used()
        ctx = self.context()
        try:
            yield ctx
        except (TransientError, InterruptedRunError) as error:
            if not ctx.cancel.stopping:
                raise
            # work that was cut short by the signal may say so in its own words
            what = error.what if isinstance(error, InterruptedRunError) else f"stopped; {error.what}"
            hint = f"to go on: {resume_command(self.argv)}"
            raise InterruptedRunError(what, signum=ctx.cancel.signum, hint=hint) from error
        finally:
            ctx.progress.end()

    def confirm(self, question: str, *, yes: bool) -> None:
        """Returns when the person agrees. Without a terminal and without -y: UsageError (2)."""
        if yes:
            return
        if not stdin_is_terminal():
            raise UsageError(question, cause="nobody can be asked: stdin is no terminal", hint="add -y to agree")
        if not self.output.ask(question):
            raise UsageError("nothing was done", cause="the answer was no")

    def state_dir(self) -> str:
        from kvctl.cli.state import state_dir

        try:
            configured = self.config.setting("state_dir", {}).value
        except ConfigError:
            configured = None  # a crash must be logged whatever the config says
        return state_dir(os.environ, cast("str | None", configured))


def url_text(config: StoreConfig) -> str:
    """The store as one text: a path for a plain directory, else a URL with endpoints and options as its query."""
    if config.scheme == "file" and not config.endpoints and not config.options:
        return config.url.removeprefix("file://")
    from urllib.parse import urlencode

    query = urlencode([*(("endpoint", way) for way in config.endpoints), *config.options.items()])
    return f"{config.url}?{query}" if query else config.url


def source_address(app: App, text: str, s3: S3Flags) -> str:
    """A path or URL as one text that needs no flags. Raises UsageError for what is neither."""
    from kvctl.core.addresses import PathOrUrl, RepoModel

    found = app.weights(text, s3)
    if isinstance(found, RepoModel):
        raise UsageError(
            f"{text!r} is no path and no URL",
            hint=f"for a folder write ./{text}; to copy between repos use `kvctl models cp`",
        )
    return url_text(found.store) if isinstance(found, PathOrUrl) else found.url


def model_address(app: App, text: str, s3: S3Flags) -> tuple[str, tuple[StoreConfig, ...] | None, str | None]:
    """(address, member stores, version): a URL and None for plain weights, a model's name and its repo's members
    otherwise; an agent's slot has a URL too. Raises UsageError.
    """
    from kvctl.core.addresses import PathOrUrl, RepoModel

    found = app.weights(text, s3)
    if isinstance(found, PathOrUrl):
        return url_text(found.store), None, None
    if isinstance(found, RepoModel):
        stores = app.config.repo(found.repo).stores if found.repo else app.repo(s3)
        return found.name, stores, found.version
    return found.url, None, None


def current() -> App:
    """The App of the running command."""
    app: App = click.get_current_context().find_root().obj
    app.settle()
    return app
