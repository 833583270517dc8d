"""Options as every command has them: each with its environment variable, some also a setting of the config
file; the global ones; the S3 ones; types for sizes and time spans. Imports click and `core.errors`/`units` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from kvctl.cli.app import App

    _IntType = click.ParamType[int]
    _FloatType = click.ParamType[float]
else:
    # generic only in newer releases of click
    _IntType = _FloatType = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])  # Any: click callbacks of any shape

FORMATS = ("human", "json", "jsonl")


class KvOption(click.Option):
    """`section`: its heading in the help. `setting`: the config setting that stands in when neither flag nor
    environment gives a value. Has the variable KVCTL_<NAME> unless `envvar` is given (None: no variable).
    """

    # Any: click's own signature
    def __init__(self, *args: Any, section: str = "Options", setting: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section
        self.setting = setting
        if "envvar" not in kwargs:
            self.envvar = f"KVCTL_{self.name.upper()}"
        self.show_envvar = self.envvar is not None

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        if source is ParameterSource.DEFAULT and self.setting is not None and not ctx.resilient_parsing:
            app: App = ctx.find_root().obj
            found = app.config.setting(self.setting, {})
            if found.source != "default":
                value, source = found.value, ParameterSource.DEFAULT_MAP
                if self.multiple and isinstance(value, dict):
                    value = [f"{name}={item}" for name, item in value.items()]
        return value, source


class KvArgument(click.Argument):
    """An argument with a line of help."""

    # Any: click's own signature
    def __init__(self, *args: Any, about: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.about = about


def option(*names: str, **kwargs: Any) -> Callable[[F], F]:  # Any: as KvOption takes them
    return click.option(*names, cls=KvOption, **kwargs)


def argument(name: str, about: str, **kwargs: Any) -> Callable[[F], F]:  # Any: as click.Argument takes them
    return click.argument(name, cls=KvArgument, about=about, **kwargs)


class Size(_IntType):
    """Bytes of '16MiB' or '2GB'. `some`: 0 makes no sense."""

    name = "size"

    def __init__(self, *, some: bool = False) -> None:
        self.some = some

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # Any: click's
        from kvctl.core.errors import UsageError
        from kvctl.core.units import parse_size

        nbytes = value if isinstance(value, int) else parse_size(value)
        if self.some and nbytes <= 0:
            name = param.opts[0] if param is not None else "a size"
            raise UsageError(f"{name} {value}: nothing would ever move", hint="leave it out for no limit of yours")
        return nbytes


class Age(_FloatType):
    """Seconds of '90m' or '7d'."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # Any: click's
        if isinstance(value, (int, float)):
            return float(value)
        from kvctl.core.units import parse_age

        return parse_age(value)


class Span(Age):
    """Seconds of '1ms', '90m' or '7d'."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # Any: click's
        if isinstance(value, str) and value.endswith("ms"):
            from kvctl.core.errors import UsageError

            try:
                return float(value.removesuffix("ms")) / 1000
            except ValueError:
                raise UsageError(f"{value!r} is no time", hint="for example 1ms, 30s or 4h") from None
        return super().convert(value, param, ctx)


def _keep(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:  # Any: an option's value
    """A callback that stores a global option in the App: the innermost place that gives it wins."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:  # Any: an option's value
        app: App | None = ctx.find_root().obj
        source = ctx.get_parameter_source(param.name)
        if app is None or source is ParameterSource.DEFAULT:
            return
        if source is ParameterSource.COMMANDLINE or name not in app.flags:
            app.flags[name] = value
            app.sources[name] = "flag" if source is ParameterSource.COMMANDLINE else "environment"

    return callback


def _global(*names: str, keep: str, **kwargs: Any) -> KvOption:  # Any: as KvOption takes them
    return KvOption(
        list(names), section="Global options", expose_value=False, is_eager=True, callback=_keep(keep), **kwargs
    )


def _complete_repo(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from kvctl.core.errors import KvctlError

    app: App | None = ctx.find_root().obj
    try:
        return [name for name in app.config.repos if name.startswith(incomplete)] if app is not None else []
    except KvctlError:
        return []  # a broken config is told by the command, not by the Tab key


def global_options() -> tuple[KvOption, ...]:
    """Accepted by the program and by every command, before or after the command's name."""
    return (
        _global("-r", "--repo", keep="repo", metavar="REPO", shell_complete=_complete_repo,
                help="Repo: a configured name, a path, or store URLs separated by commas."),
        _global("-o", "--output", keep="output", type=click.Choice(FORMATS), help="Format of the data on stdout."),
        _global("-q", "--quiet", keep="quiet", is_flag=True, default=False, help="Only data and errors."),
        _global("-v", "--verbose", keep="verbose", count=True, show_default=False,
                help="More on stderr; twice: tracebacks too."),
        _global("--color", keep="color", type=click.Choice(("auto", "always", "never")),
                help="Colour of messages; NO_COLOR is honoured."),
        _global("--progress", keep="progress", type=click.Choice(("auto", "bar", "plain", "json", "none")),
                help="How progress is shown on stderr."),
        _global("--stall-timeout", keep="stall_timeout", metavar="TIME", type=Age(), envvar=None,
                help="End what makes no progress for this long (default: 60s, or KVCTL_STALL_TIMEOUT)."),
        _global("--config", keep="config", metavar="FILE", type=click.Path(),
                help="Read this config file only."),
    )  # fmt: skip


def s3_options(function: F) -> F:
    """How S3 URLs on the command line are reached; configured repos have these in the config file."""
    for decorate in reversed((
        option("--endpoint-url", multiple=True, metavar="URL", section="S3 options",
               help="S3 server of the URLs on the command line; repeat for several ways to it."),
        option("--region", section="S3 options", help="Region to sign for."),
        option("--profile", section="S3 options", help="Profile of the AWS config files."),
        option("--no-sign-request", is_flag=True, default=False, section="S3 options", help="Anonymous requests."),
        option("--ca-bundle", section="S3 options", type=click.Path(), metavar="FILE",
               help="CA certificates to trust."),
    )):  # fmt: skip
        function = decorate(function)
    return function


def transport_options(function: F) -> F:
    """How bulk bytes move: `transport`, and `transport_opt` for `kvctl.core.config.parse_option`."""
    for decorate in reversed((
        option("--transport", default="auto", setting="transport", section="Transfer", help="How bulk bytes move."),
        option("--transport-opt", multiple=True, metavar="K=V", setting="transport_opt", section="Transfer",
               help="An option of the transport; repeat for more."),
    )):  # fmt: skip
        function = decorate(function)
    return function


def yes_option(function: F) -> F:
    return option("-y", "--yes", is_flag=True, default=False, envvar=None, help="Do not ask.")(function)


def dry_run_option(function: F) -> F:
    return option("-n", "--dry-run", is_flag=True, default=False, envvar=None, help="Show what would be done.")(
        function
    )


def allow_empty_option(function: F) -> F:
    return option("--allow-empty", is_flag=True, default=False, envvar=None,
                  help="A name or glob that matches nothing is no error.")(function)  # fmt: skip
