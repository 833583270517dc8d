"""`kv pull --into engine:URL` and `kv push --from engine:URL`: KV of a running engine, moved by the engine itself."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from kvctl.cli.app import App
from kvctl.cli.commands.swap import open_adapter
from kvctl.cli.documents import render
from kvctl.cli.kv_options import Place
from kvctl.core.errors import IncompatibleError, NotFoundError, PartialError, UsageError

if TYPE_CHECKING:
    from kvctl.core.context import Context

ENGINE = "engine:"


def warm_engine(
    app: App, ctx: Context, url: str, where: Place, address: str, tokens: array[int] | None, min_tokens: int
) -> None:
    """Make the engine load the session, from the repo that it is set up with. Raises PartialError when fewer than
    `min_tokens` are in its cache then.
    """
    from kvctl.kv.exchange import session_facts
    from kvctl.kv.pull import PullSession

    if tokens is None:
        tokens, _ = session_facts(PullSession(where.stores, address, key=where.key), ctx)
    if tokens is None:
        raise UsageError(
            f"{address} was stored without its tokens, and an engine looks its cache up by them",
            hint="give the transcript with --tokens FILE",
        )
    adapter = open_adapter(url, ctx)
    try:
        found = adapter.warm(tokens, address)
    finally:
        adapter.close()
    document: dict[str, Any] = {"schema": "kvctl.kv-warm/1", "session": address, "engine": url, **found}  # Any: JSON
    app.output.result(document, lambda: render(document))
    usable = int(found["here"]) + int(found["loaded"])
    if usable < min_tokens:
        raise PartialError(
            f"{usable:,} tokens of {address} are in the engine's cache, {min_tokens:,} are wanted",
            hint="its log says why; is it set up with the same repo, and does it run the same weights?",
        )


def store_from_engine(
    app: App,
    ctx: Context,
    url: str,
    address: str,
    *,
    tokens: array[int] | None,
    prompt: str | None,
    request: str | None,
    with_tokens: bool,
) -> None:
    """Make the engine store the KV of a transcript, of a text file, or of a request of lately."""
    given = [name for name, value in (("--tokens", tokens), ("--prompt-file", prompt), ("--request", request)) if value]
    if len(given) != 1:
        raise UsageError("say what the engine shall store", hint="one of --tokens, --prompt-file and --request")
    adapter = open_adapter(url, ctx)
    try:
        ids = list(tokens or ())
        if not ids:
            ask = getattr(adapter, "tokenize" if prompt else "tokens_of", None)
            if ask is None:
                raise IncompatibleError(f"this engine does not take {given[0]}", hint="use --tokens FILE")
            ids = ask(_text(prompt) if prompt else request)
        found = adapter.store(ids, address, with_tokens=with_tokens)
    finally:
        adapter.close()
    document: dict[str, Any] = {"schema": "kvctl.kv-stored/1", "engine": url, **found}  # Any: JSON
    app.output.result(document, lambda: render(document))


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise NotFoundError(f"there is no {path}", hint="--prompt-file names a text file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no text file that can be read", cause=str(error)) from None
