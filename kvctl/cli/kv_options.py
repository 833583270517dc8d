"""What the `kv` commands share: filters, the repo with its key, transcripts, models that a session is compared with.
Imports click and the options; use cases only inside the functions.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from kvctl.cli.app import App, S3Flags, model_address
from kvctl.cli.options import Age, F, Size, option
from kvctl.core.errors import UsageError

if TYPE_CHECKING:
    from kvctl.core.addresses import StoreConfig
    from kvctl.core.context import Context
    from kvctl.kv.catalog import Filter
    from kvctl.kv.identity import Descriptor
    from kvctl.weights.identify import KnownModel

T = TypeVar("T")
PATTERNS = "TENANT/NAME[@GENERATION], or globs in quotes"
SESSION = "[REPO:]TENANT/NAME[@GENERATION]"
BUNDLE = "bundle:"


def stack(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, shown in this order."""

    def decorate(function: F) -> F:
        for one in reversed(decorators):
            function = one(function)
        return function

    return decorate


key_option = option(
    "--kv-key-file",
    type=click.Path(),
    metavar="FILE",
    help="The repo's key file, where no config names it (`kv_key_file`).",
)
tokens_option = option(
    "--tokens",
    type=click.Path(),
    metavar="FILE",
    envvar=None,
    help="The transcript's token ids: a JSON list, or u32 little endian if it ends in .bin.",
)
rate_option = option("--max-rate", type=Size(), setting="max_rate", metavar="SIZE", help="Cap in bytes per second.")
codec_option = option(
    "--codec",
    type=click.Choice(("none", "zstd", "fp8")),
    default="none",
    envvar=None,
    help="How packs are stored: fp8 is lossy, and the manifest says so.",
)
label_option = option("--label", "labels", multiple=True, metavar="K=V", envvar=None, help="A label; repeat for more.")
model_options = stack(
    option(
        "--model",
        "model",
        metavar="ADDRESS",
        envvar=None,
        section="Compatibility",
        help="The model that will use the KV: a folder, a URL or REPO:NAME[@VERSION].",
    ),
    option(
        "--model-digests",
        type=click.Path(),
        metavar="FILE",
        envvar=None,
        section="Compatibility",
        help="Its digests (`kvctl models digest`), where it is not in a repo.",
    ),
    option(
        "--dtype",
        metavar="DTYPE",
        envvar=None,
        section="Compatibility",
        help="Logical dtype of its KV, such as BF16 (default: the session's).",
    ),
)
filter_options = stack(
    option("--tenant", metavar="GLOB", envvar=None, section="Filters", help="Sessions of these tenants."),
    option("--older-than", type=Age(), metavar="TIME", envvar=None, section="Filters", help="Pushed longer ago."),
    option("--idle", type=Age(), metavar="TIME", envvar=None, section="Filters", help="Not used for so long."),
    option("--label", "labels", multiple=True, metavar="K=GLOB", envvar=None, section="Filters",
           help="With this label; repeat for more."),
    option("--for-model", metavar="GLOB", envvar=None, section="Filters",
           help="Whose producer called its model so."),
    option("--revision", metavar="GLOB", envvar=None, section="Filters", help="Of this revision of it."),
    option("--weights", metavar="DIGEST", envvar=None, section="Filters",
           help="Of the weights with this digest, or its first 8 digits and more."),
    option("--lora", metavar="DIGEST", envvar=None, section="Filters", help="With this adapter."),
    option("--stale-for", metavar="WEIGHTS", envvar=None, section="Filters",
           help="Made by other weights than these: REPO:NAME[@VERSION], or a digests file with --for-model."),
    option("--expired", is_flag=True, default=False, envvar=None, section="Filters", help="Whose expiry has passed."),
    option("--not-latest", is_flag=True, default=False, envvar=None, section="Filters",
           help="That a newer generation has replaced."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A repo's member stores, and the master secret of its KV (None without one)."""

    stores: tuple[StoreConfig, ...]
    key: bytes | None


def place(app: App, flags: S3Flags, key_file: str | None, name: str | None = None) -> Place:
    """The repo called `name` (a configured one, or what -r takes), else that of -r, else the default one."""
    given = name or app.flags.get("repo")
    configured = app.config.repos.get(str(given)) if given else None
    if not given and app.config.default_repo is not None:
        configured = app.config.repo(str(app.config.default_repo.value))
    stores = configured.stores if configured is not None else app.repo(flags, name)
    path = key_file or (configured.kv_key_file if configured is not None else None)
    return Place(stores, None if path is None else read_key(path))


def read_key(path: str) -> bytes:
    """Raises ConfigError."""
    from kvctl.core.errors import ConfigError
    from kvctl.kv.tokens import parse_key

    try:
        with open(path, "rb") as file:
            return parse_key(file.read(4096), path)
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be read",
            cause=error.strerror,
            hint="see kv_key_file in `kvctl help kv`",
        ) from error


def session_place(app: App, text: str, flags: S3Flags, key_file: str | None) -> tuple[Place, str]:
    """(repo, TENANT/NAME[@GENERATION]) of a session's address. Raises UsageError."""
    from dataclasses import replace

    from kvctl.kv.names import parse_session

    found = parse_session(text)
    return place(app, flags, key_file, found.repo or None), str(replace(found, repo=""))


def read_tokens(path: str | None) -> array[int] | None:
    """The token ids in a file; None for no file. Raises NotFoundError, UsageError."""
    if path is None:
        return None
    import json

    from kvctl.core.errors import EnvError, NotFoundError
    from kvctl.kv.tokens import token_bytes, token_ids

    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise NotFoundError(f"there is no {path}", hint="--tokens names a file with token ids") from None
    except OSError as error:
        raise EnvError(f"{path} cannot be read", cause=error.strerror) from error
    if path.endswith(".bin"):
        return token_ids(data, path)
    try:
        listed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON list of token ids", cause=str(error)) from error
    if not isinstance(listed, list) or not all(type(item) is int for item in listed):
        raise UsageError(f"{path} is no JSON list of token ids", hint="write [1, 2, 3], or u32 in a .bin file")
    return token_ids(token_bytes(listed), path)


def bundle_target(text: str, option_name: str) -> str | BinaryIO:
    """The path of bundle:PATH, or stdout's or stdin's bytes for '-'. Raises UsageError, EnvError for other ends."""
    from kvctl.core.errors import EnvError

    if text == "-":
        stream: BinaryIO = sys.stdin.buffer if option_name == "SOURCE" else sys.stdout.buffer
        if stream.isatty():
            raise UsageError("a bundle is no text for a terminal", hint="pipe it, or use bundle:PATH")
        return stream
    kind, colon, value = text.partition(":")
    if colon and kind in {"engine", "slot"}:
        raise EnvError(
            f"{text!r}: this version has no adapter for it",
            hint="use bundle:PATH, or an engine's own plug-in such as kvctl_transformers",
        )
    if f"{kind}{colon}" != BUNDLE or not value:
        raise UsageError(
            f"{text!r} is no {option_name} of KV", hint=f"write bundle:{text}" if not colon else "bundle:PATH, or -"
        )
    from kvctl.core.addresses import expand_home

    return expand_home(value)


def pairs(items: tuple[str, ...]) -> dict[str, str]:
    """Name -> value of each K=V. Raises UsageError."""
    from kvctl.core.config import parse_option

    return dict(parse_option(item) for item in items)


def make_filter(
    app: App,
    ctx: Context,
    flags: S3Flags,
    *,
    stale_for: str | None,
    for_model: str | None,
    labels: tuple[str, ...],
    **others: Any,  # Any: the other fields of Filter
) -> Filter:
    """The filter of the options. Raises IncompatibleError when the digest behind --stale-for is not known."""
    from kvctl.kv.catalog import Filter, Stale

    stale: Stale | None = None
    if stale_for is not None:
        weights, name = stale_weights(app, ctx, stale_for, flags)
        if name is None and for_model is None:
            raise UsageError(
                f"--stale-for {stale_for} does not tell whose sessions are meant",
                hint="add --for-model NAME: the name that their producer gave the model",
            )
        stale = Stale(weights, None if for_model is not None else name)
        stale.check()
    return Filter(stale_for=stale, model=for_model, labels=pairs(labels), **others)


def stale_weights(app: App, ctx: Context, text: str, flags: S3Flags) -> tuple[str | None, str | None]:
    """(digest or None, name or None) of the weights that --stale-for names."""
    from kvctl.weights.digests import is_digest, parse_digests

    if is_digest(text):
        return text, None
    if text.endswith(".json"):
        from kvctl.weights.identify import read_file

        return parse_digests(read_file(text), text).digest, None
    known = known_model(app, ctx, text, flags)
    return known.digest, known.name


def known_model(app: App, ctx: Context, text: str, flags: S3Flags, digests: str | None = None) -> KnownModel:
    from kvctl.weights.identify import identify_model

    address, stores, version = model_address(app, text, flags)
    return identify_model(address, stores, version, ctx, digests=digests)


def descriptor_of(known: KnownModel, text: str, dtype: str, key: bytes | None, tenant: str) -> Descriptor:
    """The descriptor of a run of the model with KV of `dtype`. Raises IncompatibleError without a known digest."""
    from kvctl.core.errors import IncompatibleError
    from kvctl.kv.identity import describe_model
    from kvctl.kv.tokens import domain_secret

    if known.digest is None:
        raise IncompatibleError(
            f"the weights digest of {text} is not known, so nothing can be said about its KV",
            hint="make it with `kvctl models digest ADDRESS --out FILE`, and give --model-digests FILE",
        )
    return describe_model(known.files, known.digest, dtype=dtype, secret=domain_secret(key, tenant), where=text)


def progress_lines(document: Mapping[str, Any]) -> str:  # Any: JSON
    """One line about a report, for stderr when stdout is the data."""
    from kvctl.core.units import format_seconds, format_size

    moved = format_size(document["bytes"] or document["written"])
    return f"{document['command']}: {moved} in {format_seconds(document['seconds'])}"
