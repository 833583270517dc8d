"""`kvctl kv push|pull|cp`: sessions that move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.app import App, S3Flags, current
from kvctl.cli.commands.report import saved_report, show_report
from kvctl.cli.documents import cell, render
from kvctl.cli.kv_options import (
    SESSION,
    bundle_target,
    codec_option,
    descriptor_of,
    key_option,
    known_model,
    label_option,
    model_options,
    pairs,
    place,
    rate_option,
    read_tokens,
    session_place,
    tokens_option,
)
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import (
    Age,
    Size,
    argument,
    dry_run_option,
    option,
    s3_options,
    transport_options,
)
from kvctl.core.errors import InterruptedRunError, KvctlError, PartialError, UsageError
from kvctl.core.units import is_count

if TYPE_CHECKING:
    from kvctl.core.context import Context
    from kvctl.transfer.report import Report

in_flight_option = option(
    "--max-in-flight",
    type=Size(some=True),
    setting="max_in_flight",
    metavar="SIZE",
    help="Bytes in flight at once (default: from the memory limit).",
)
ENGINE = "engine:"
MOST_LAYERS = 100_000
PUSH_EXAMPLES = """\b
Examples:
  kvctl kv push bundle:chat.safetensors alice/chat1 -r lab
  my-engine --dump-kv | kvctl kv push - alice/chat1 -r lab --tokens transcript.json
  kvctl kv push --from engine:http://gpu1:8000 alice/system --prompt-file prompt.txt
"""
PULL_EXAMPLES = """\b
Examples:
  kvctl kv pull alice/chat1 -n                                   # the verdict only
  kvctl kv pull lab:alice/chat1@3 --into bundle:chat.safetensors
  kvctl kv pull alice/chat1 --tokens now.json --min-tokens 12000 --into bundle:chat.safetensors
  kvctl kv pull alice/chat1 --tp-size 2 --tp-rank 1 --into bundle:rank1.safetensors
  kvctl kv pull alice/chat1 --into engine:http://gpu9:8000 --min-tokens 12000
"""


@click.command("push", cls=KvCommand, epilog=PUSH_EXAMPLES)
@argument("source", "bundle:PATH, - for a bundle on stdin, or engine:URL (also as --from).", metavar="[SOURCE]")
@argument("session", "[REPO:]TENANT/NAME; kvctl numbers its generations.", required=False, metavar="SESSION")
@option("--from", "origin", metavar="SOURCE", envvar=None, help="The same as SOURCE, before the session's name.")
@option("--prompt-file", metavar="FILE", envvar=None, section="Engines", help="Text whose KV an engine shall store.")
@option("--request", metavar="ID", envvar=None, section="Engines",
        help="A request of lately whose KV an engine shall store.")  # fmt: skip
@tokens_option
@option("--with-tokens", is_flag=True, default=False, envvar=None, help="Store the token ids too.")
@codec_option
@label_option
@option("--expires", type=Age(), metavar="TIME", envvar=None, help="Policies may evict it after this time.")
@option("--pack-size", type=Size(), metavar="SIZE", envvar=None, show_default="by size",
        help="Bytes of KV per object.")  # fmt: skip
@transport_options
@in_flight_option
@rate_option
@dry_run_option
@key_option
@s3_options
def push(
    *,
    source: str,
    session: str | None,
    origin: str | None,
    prompt_file: str | None,
    request: str | None,
    tokens: str | None,
    with_tokens: bool,
    codec: str,
    labels: tuple[str, ...],
    expires: float | None,
    pack_size: int | None,
    transport: str,
    transport_opt: tuple[str, ...],
    max_in_flight: int | None,
    max_rate: int | None,
    dry_run: bool,
    kv_key_file: str | None,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Store a session's KV as its next generation. Blocks that any session of the repo has already are not written
    again; an interrupted push is invisible, and running it again goes on.
    """
    app = current()
    if origin is not None and session is None:
        source, session = origin, source
    if session is None:
        raise UsageError("a push takes a source and a session", hint="kvctl kv push bundle:PATH TENANT/NAME")
    transcript = read_tokens(tokens)
    if source.startswith(ENGINE):
        from kvctl.cli.commands.kv_engine import store_from_engine
        from kvctl.kv.names import split_repo

        with app.running() as ctx:
            store_from_engine(
                app, ctx, source.removeprefix(ENGINE), split_repo(session)[1], tokens=transcript,
                prompt=prompt_file, request=request, with_tokens=with_tokens,
            )  # fmt: skip
        return
    where, address = session_place(app, session, S3Flags(**s3), kv_key_file)
    target = bundle_target(source, "SOURCE")

    from kvctl.kv.bundle import read_bundle
    from kvctl.kv.push import PushSession, push_session

    with read_bundle(target) as bundle, app.running() as ctx:
        wanted = PushSession(
            repo=where.stores,
            address=address,
            source=bundle.source(transcript),
            key=where.key,
            with_tokens=with_tokens,
            codec=codec,
            labels=pairs(labels),
            expires=expires,
            pack_bytes=pack_size,
            transport=transport,
            transport_options=pairs(transport_opt),
            max_in_flight_bytes=max_in_flight,
            max_rate=max_rate,
        )
        if dry_run:
            from kvctl.kv.planning import plan_push

            plan = plan_push(wanted, ctx).to_json()
            app.output.result(plan, lambda: render(plan))
            return
        report = push_session(wanted, ctx)
    report.source = report.source or source
    show_report(app, report)


@click.command("pull", cls=KvCommand, epilog=PULL_EXAMPLES)
@argument("session", SESSION)
@option(
    "--into",
    default="none",
    metavar="TARGET",
    help="none (measure, keep nothing), bundle:PATH, - (stdout), or engine:URL.",
)
@tokens_option
@option("--min-tokens", type=click.IntRange(min=0), default=0, envvar=None,
        help="End with 3, and deliver nothing, when fewer tokens are usable.")  # fmt: skip
@option("--strict", is_flag=True, default=False, help="A damaged block is an error (7); nothing is delivered.")
@option("--layers", metavar="LIST", envvar=None, help="Only these layers, such as 0-3,7.")
@option("--mode", type=click.Choice(("prefix", "layers")), default="prefix",
        help="Hand over the whole prefix, or layer by layer.")  # fmt: skip
@dry_run_option
@option("--tp-rank", type=click.IntRange(min=0), section="Tensor parallelism", help="This rank's heads only.")
@option("--tp-size", type=click.IntRange(min=1), default=1, section="Tensor parallelism", help="Ranks.")
@model_options
@transport_options
@option("--hedge/--no-hedge", default=True, setting="hedge", section="Transfer",
        help="Ask a replica too when a request is slower than the p95 of its peers.")  # fmt: skip
@in_flight_option
@rate_option
@key_option
@s3_options
def pull(
    *,
    session: str,
    into: str,
    tokens: str | None,
    min_tokens: int,
    strict: bool,
    layers: str | None,
    mode: str,
    dry_run: bool,
    tp_rank: int | None,
    tp_size: int,
    model: str | None,
    model_digests: str | None,
    dtype: str | None,
    transport: str,
    transport_opt: tuple[str, ...],
    hedge: bool,
    max_in_flight: int | None,
    max_rate: int | None,
    kv_key_file: str | None,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Fetch the usable prefix of a session: a verdict first, then exactly its bytes, verified. A short prefix is
    success; damage ends with 3 (with --strict 7).
    """
    app = current()
    flags = S3Flags(**s3)
    where, address = session_place(app, session, flags, kv_key_file)
    if into.startswith(ENGINE):
        from kvctl.cli.commands.kv_engine import warm_engine

        with app.running() as ctx:
            url = into.removeprefix(ENGINE)
            warm_engine(app, ctx, url, where, address, read_tokens(tokens), min_tokens)
        return
    target = None if into == "none" else bundle_target(into, "TARGET")
    if tp_size > 1 and tp_rank is None:
        raise UsageError(f"--tp-size {tp_size} needs --tp-rank", hint=f"ranks are 0 to {tp_size - 1}")

    from kvctl.kv.exchange import pull_bundle
    from kvctl.kv.pull import PullSession, pull_session, resolve_session
    from kvctl.kv.seams import MemorySink

    sink = MemorySink()
    with app.running() as ctx:
        meaning = None
        if model is not None:
            from kvctl.kv.inspecting import InspectRequest, inspect_session

            own = dtype or inspect_session(InspectRequest(where.stores, address), ctx).descriptor.dtype
            known = known_model(app, ctx, model, flags, model_digests)
            meaning = descriptor_of(known, model, own, where.key, address.partition("/")[0])
        request = PullSession(
            repo=where.stores,
            address=address,
            sink=sink,
            key=where.key,
            tokens=read_tokens(tokens),
            descriptor=meaning,
            tp_rank=tp_rank,
            tp_size=tp_size,
            layers=None if layers is None else numbers(layers),
            min_tokens=min_tokens,
            strict=strict,
            mode=mode,
            transport=transport,
            transport_options=pairs(transport_opt),
            max_in_flight_bytes=max_in_flight,
            max_rate=max_rate,
            hedge=hedge,
        )
        if dry_run:
            verdict = resolve_session(request, ctx)
            document = verdict.to_json()
            app.output.result(document, lambda: f"{verdict}\n{render(document)}")
            if verdict.usable < min_tokens:
                raise PartialError(f"{verdict.usable:,} tokens are usable, {min_tokens:,} are wanted")
            return
        try:
            report = pull_session(request, ctx) if target is None else pull_bundle(request, target, ctx)
        finally:
            sink.close()
    report.target = into
    if into == "-":
        app.output.note(f"kv pull {address}: {cell('bytes', report.bytes)}, verified")
        return
    show_report(app, report)


def numbers(text: str) -> tuple[int, ...]:
    """Layers of '0-3,7'. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not is_count(first) or (dash and not is_count(last)) or int(last or first) < int(first):
            raise UsageError(f"{text!r} is no list of layers", hint="write it like 0-3,7")
        if int(last or first) >= MOST_LAYERS:
            raise UsageError(f"{text!r} names more layers than any model has", hint="write it like 0-3,7")
        found += range(int(first), int(last or first) + 1)
    return tuple(sorted(set(found)))


@click.command("cp", cls=KvCommand)
@argument("source", "[REPO:]TENANT/NAME[@GENERATION], or a glob in quotes with --to.")
@argument("target", "[REPO:]TENANT/NAME.", required=False, metavar="[TARGET]")
@option("--to", "to", metavar="REPO", envvar=None,
        help="Copy under the same names to this repo: a configured name, a path, or store URLs.")  # fmt: skip
@tokens_option
@option("--to-kv-key-file", type=click.Path(), metavar="FILE", envvar=None,
        help="The target repo's key file, where no config names it.")  # fmt: skip
@option("--transport", default="auto", envvar=None, section="Transfer", help="How bulk bytes are read.")
@option("--transport-opt", multiple=True, metavar="K=V", envvar=None, section="Transfer",
        help="An option of that transport; repeat for more.")  # fmt: skip
@option("--to-transport", default="auto", envvar=None, section="Transfer", help="How bulk bytes are written.")
@option("--to-transport-opt", multiple=True, metavar="K=V", envvar=None, section="Transfer",
        help="An option of that transport; repeat for more.")  # fmt: skip
@rate_option
@key_option
@s3_options
def cp(
    *,
    source: str,
    target: str | None,
    to: str | None,
    tokens: str | None,
    to_kv_key_file: str | None,
    transport: str,
    transport_opt: tuple[str, ...],
    to_transport: str,
    to_transport_opt: tuple[str, ...],
    max_rate: int | None,
    kv_key_file: str | None,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Copy sessions to another repo or name: only missing chunks move, each verified on the way. Between repos of
    different keys the blocks are keyed anew, which needs the tokens (else 8).
    """
    from kvctl.kv.copying import CopySession, copy_session
    from kvctl.kv.names import split_repo

    app = current()
    flags = S3Flags(**s3)
    if (target is None) == (to is None):
        raise UsageError("say where to: a TARGET, or --to REPO", hint="kvctl kv cp a:alice/chat1 b:alice/chat1")
    repo_name, pattern = split_repo(source)
    origin = place(app, flags, kv_key_file, repo_name or None)
    if target is not None:
        goal, new_name = session_place(app, target, flags, to_kv_key_file)
        if goal.stores == origin.stores and new_name == pattern.partition("@")[0]:
            raise UsageError("source and target are the same", hint="name another repo or another session")
    else:
        goal, new_name = place(app, flags, to_kv_key_file, to), ""
    transcript = read_tokens(tokens)
    options, target_options = pairs(transport_opt), pairs(to_transport_opt)
    with app.running() as ctx:
        names = _expand(app, origin.stores, pattern, ctx)
        if len(names) > 1 and (new_name or transcript is not None):
            raise UsageError(
                f"{pattern!r} names {len(names)} sessions, TARGET and --tokens are for one", hint="use --to"
            )

        def copy(name: str) -> Report:
            wanted = CopySession(
                source=origin.stores,
                address=name,
                target=goal.stores,
                new_address=new_name or None,
                source_key=origin.key,
                target_key=goal.key,
                tokens=transcript,
                transport=transport,
                transport_options=options,
                target_transport=to_transport,
                target_options=target_options,
                max_rate=max_rate,
            )
            return copy_session(wanted, ctx)

        if not is_glob(pattern):
            show_report(app, copy(names[0]))
            return
        rows = [_copied(app, ctx, name, copy) for name in names]
    app.output.rows("kvctl.kv-copied/1", "sessions", rows, _copies)
    failed = [row for row in rows if row["problem"]]
    if failed:
        raise PartialError(
            f"{len(failed)} of {len(rows)} sessions were not copied",
            cause=f"{failed[0]['session']}: {failed[0]['problem']}",
            hint="the others are done; run it again for these",
            details={"failed": [row["session"] for row in failed]},
        )


def _copied(app: App, ctx: Context, name: str, copy: Callable[[str], Report]) -> dict[str, Any]:  # Any: JSON
    """One session of many: its report, or why there is none."""
    ctx.cancel.check("copying sessions")
    try:
        return {"session": name, "problem": "", "report": saved_report(app, copy(name))}
    except (InterruptedRunError, UsageError):  # wrong options are wrong for all
        raise
    except KvctlError as error:
        if ctx.cancel.stopping:
            raise
        return {"session": name, "problem": str(error), "report": None}


def _copies(rows: list[Mapping[str, Any]]) -> str:  # Any: JSON
    from kvctl.cli.reports import render

    shown = (
        render(row["report"]) if row["report"] else f"{row['session']} was not copied: {row['problem']}" for row in rows
    )
    return "\n\n".join(shown)


def is_glob(pattern: str) -> bool:
    return bool(set(pattern) & set("*?["))


def _expand(app: App, stores: Any, pattern: str, ctx: Any) -> list[str]:  # Any: as the use cases take them
    """The sessions that a name or glob means: the latest generation where none is named."""
    if not is_glob(pattern):
        return [pattern]
    from kvctl.kv.inspecting import list_sessions

    found = list_sessions(stores, ctx, [pattern]).entries
    if "@" in pattern:
        return [str(entry.found) for entry in found]
    return [str(entry.found) for entry in found if entry.latest]
