"""`kvctl swap TARGET WEIGHTS`: other weights in a slot of the agent, or in a running engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kvctl.cli.app import App, S3Flags, current, model_address
from kvctl.cli.commands.report import show_report
from kvctl.cli.documents import render
from kvctl.cli.lazy import KvCommand
from kvctl.cli.options import Age, argument, dry_run_option, option, s3_options
from kvctl.cli.smoke import run_smoke, smoke_words
from kvctl.core.errors import NotFoundError, SwapFailedError, UsageError

if TYPE_CHECKING:
    from kvctl.agent.driving import EngineDriver
    from kvctl.core.cancel import CancelToken
    from kvctl.core.context import Context
    from kvctl.engines.api import EngineAdapter, SwapRequest, SwapResult

EXAMPLES = """\b
Examples:
  kvctl swap engine:http://gpu1:8000 lab:llama70b@7 --keep-previous --smoke ./smoke.sh -o json
  kvctl swap engine:http://gpu1:8000 --rollback
  kvctl swap slot:llama lab:llama70b@7
  kvctl swap slot:llama lab:llama70b@7 --engine http://127.0.0.1:8000 --keep-previous
"""
_ENGINE = "Engines"
_MARGIN = 30.0  # seconds that an engine holds a swap longer than the smoke test may take


@click.command("swap", cls=KvCommand, epilog=EXAMPLES)
@argument("target", "engine:URL, or slot:NAME of the agent on this host.")
@argument("address", "The new weights, see `kvctl help addresses`.", metavar="[WEIGHTS]", required=False)
@option("--rollback", is_flag=True, default=False, envvar=None, help="Back to the weights that --keep-previous kept.")
@option("--keep-previous", is_flag=True, default=False, envvar=None, help="Keep the old weights for --rollback.")
@option("--evict-first", is_flag=True, default=False, envvar=None, section="Slots",
        help="Free the old weights first, where both do not fit: a failure leaves nothing (12).")  # fmt: skip
@option("--engine", multiple=True, metavar="URL", envvar=None, section="Slots",
        help="An engine that uses the slot takes them before the slot flips; repeat. All do, or none.")  # fmt: skip
@option("--in-flight", type=click.Choice(("drain", "abort", "keep")), default="drain", envvar=None, section=_ENGINE,
        help="Running requests: wait for them, end them, or let them go on with the new weights.")  # fmt: skip
@option("--drain-timeout", type=Age(), default=60.0, show_default="60s", metavar="TIME", envvar=None, section=_ENGINE,
        help="How long to wait for them; then the old weights serve on (11).")  # fmt: skip
@option("--smoke", metavar="CMD", envvar=None, section=_ENGINE,
        help="Run this before requests come in again; when it fails or hangs, the old weights serve (11).")  # fmt: skip
@option("--smoke-timeout", type=Age(), default=120.0, show_default="2m", metavar="TIME", envvar=None, section=_ENGINE,
        help="For the smoke test; longer is a failure, and ends it.")  # fmt: skip
@option("--fail-at", metavar="STEP", default="", envvar=None, section=_ENGINE,
        help="Rehearse: fail at check, stage, pause, save, apply, apply-late, verify, reset, resume, "
             "or back (then nothing serves).")  # fmt: skip
@dry_run_option
@s3_options
def command(
    *,
    target: str,
    address: str | None,
    rollback: bool,
    keep_previous: bool,
    evict_first: bool,
    engine: tuple[str, ...],
    in_flight: str,
    drain_timeout: float,
    smoke: str | None,
    smoke_timeout: float,
    fail_at: str,
    dry_run: bool,
    **s3: Any,  # Any: as S3Flags takes them
) -> None:
    """Swap the weights that serve. What does not fit is refused before anything stops (8); what was swapped is
    verified; whatever fails, the old weights serve on (11), or it says that nothing serves (12).

    A smoke test gets KVCTL_ENGINE_URL, and KVCTL_ENGINE_PASS: the value of the header X-Kvctl-Pass, without which
    requests wait in line until the swap is over.
    """
    from kvctl.core.addresses import parse_target

    app = current()
    if smoke is not None:
        smoke_words(smoke)  # refused before anything is swapped
    where = parse_target(target)
    if where.kind not in {"engine", "slot"}:
        raise UsageError(f"{target!r} holds no weights to swap", hint="engine:URL or slot:NAME")
    if rollback == (address is not None):
        raise UsageError("say which weights, or --rollback", hint="kvctl swap engine:http://HOST:PORT lab:NAME@VERSION")
    if where.kind == "slot":
        if fail_at or dry_run or (smoke and not engine):
            raise UsageError("--fail-at and --dry-run are for engines, --smoke too, or for --engine of a slot")
        plan = _Slot(where.value, address, keep_previous, evict_first, engine, in_flight, drain_timeout)
        _slot(app, plan, S3Flags(**s3), smoke, smoke_timeout)
        return
    if engine:
        raise UsageError("--engine is for slots", hint=f"{target} is an engine itself")
    if evict_first:
        raise UsageError("--evict-first is for slots: an engine keeps its memory")
    if rollback and (smoke or fail_at or dry_run):
        raise UsageError("--smoke, --fail-at and --dry-run are for other weights, not for --rollback of an engine")

    from kvctl.engines.api import SwapRequest

    wanted = None
    if address is not None:
        weights, repo = _as_seen_there(app, address, S3Flags(**s3))
        wanted = SwapRequest(
            weights=weights,
            repo=repo,
            in_flight=in_flight,
            drain_seconds=drain_timeout,
            keep_previous=keep_previous,
            hold=smoke is not None,
            hold_seconds=smoke_timeout + _MARGIN,
            fail_at=fail_at,
            check_only=dry_run,
        )
    with app.running() as ctx:
        adapter = open_adapter(where.value, ctx)
        try:
            result = (
                adapter.rollback()
                if wanted is None
                else _swap(adapter, wanted, smoke, smoke_timeout, where.value, ctx.cancel)
            )
        finally:
            adapter.close()
    document = _document(target, result)
    app.output.result(document, lambda: render(document))


def open_adapter(url: str, ctx: Context) -> EngineAdapter:
    """The adapter of the engine at `url`; its API key comes from KVCTL_ENGINE_API_KEY."""
    import os

    from kvctl.engines.registry import open_engine

    return open_engine(url, ctx, api_key=os.environ.get("KVCTL_ENGINE_API_KEY"))


def _as_seen_there(app: App, address: str, flags: S3Flags) -> tuple[str, str | None]:
    """(address, member stores of its repo) that need neither this directory nor this configuration."""
    import os

    from kvctl.cli.app import url_text

    text, stores, version = model_address(app, address, flags)
    if stores is None:
        return (text if "://" in text else os.path.abspath(text)), None
    return (f"{text}@{version}" if version else text), ",".join(url_text(store) for store in stores)


def _swap(
    adapter: EngineAdapter, wanted: SwapRequest, smoke: str | None, seconds: float, url: str, cancel: CancelToken
) -> SwapResult:
    result = adapter.swap(wanted)
    if result.state != "held":
        return result
    assert smoke is not None
    try:
        problem = run_smoke(smoke, seconds, {"KVCTL_ENGINE_URL": url, "KVCTL_ENGINE_PASS": result.token}, cancel)
    except BaseException:
        _back(adapter)
        raise
    if problem:
        _back(adapter)
        raise SwapFailedError(
            "the smoke test failed, and the old weights serve", cause=problem, details={"weights": wanted.weights}
        )
    try:
        return adapter.finish()
    except NotFoundError as error:
        raise SwapFailedError(
            f"the smoke test passed, but the engine holds the swap no longer: {adapter.info().source} serves",
            cause=str(error),
            hint="its time was up, or somebody rolled it back: swap again",
        ) from error


def _back(adapter: EngineAdapter) -> None:
    import contextlib

    with contextlib.suppress(NotFoundError):  # its time was up: it has gone back by itself
        adapter.rollback()


def _document(target: str, result: SwapResult) -> dict[str, Any]:  # Any: JSON
    return {
        "schema": "kvctl.swap/1",
        "target": target,
        "state": result.state,
        "source": result.source,
        "digest": result.digest,
        "generation": result.generation,
        "paused_s": result.paused,
        "verified_bytes": result.verified,
        "steps": {f"{name}_s": seconds for name, seconds in result.steps.items()},
        "notes": list(result.notes),
    }


@dataclass(frozen=True)
class _Slot:
    """What is asked of a slot's swap. `engines`: by URL."""

    name: str
    address: str | None
    keep_previous: bool
    evict_first: bool
    engines: tuple[str, ...]
    in_flight: str
    drain_seconds: float


def _slot(app: App, plan: _Slot, flags: S3Flags, smoke: str | None, smoke_seconds: float) -> None:
    from kvctl.agent.load import rollback_slot, swap_slot
    from kvctl.agent.target import SlotOptions
    from kvctl.weights.request import LoadRequest

    with app.running() as ctx:
        driver = _driver(plan, ctx, smoke, smoke_seconds) if plan.engines else None
        if plan.address is None:
            kept = rollback_slot(plan.name, driver=driver)
            document = {"schema": "kvctl.swap/1", "target": f"slot:{plan.name}", **kept}
            app.output.result(document, lambda: render(document))
            return
        text, repo, version = model_address(app, plan.address, flags)
        request = LoadRequest(address=text, repo=repo, version=version)
        options = SlotOptions(keep_previous=plan.keep_previous, evict_first=plan.evict_first, driver=driver)
        report = swap_slot(plan.name, request, ctx, options=options)
        if driver is not None:
            report.extra["engines"] = {url: _document(url, result) for url, result in driver.results.items()}
    show_report(app, report)


def _driver(plan: _Slot, ctx: Context, smoke: str | None, smoke_seconds: float) -> EngineDriver:
    from kvctl.agent.driving import DriveOptions, EngineDriver
    from kvctl.agent.settings import default_socket

    def check() -> None:
        for url, result in driver.results.items():
            environ = {"KVCTL_ENGINE_URL": url, "KVCTL_ENGINE_PASS": result.token}
            problem = run_smoke(smoke or "", smoke_seconds, environ, ctx.cancel)
            if problem:
                raise SwapFailedError("the smoke test failed", cause=problem, details={"engine": url})

    options = DriveOptions(
        in_flight=plan.in_flight,
        drain_seconds=plan.drain_seconds,
        hold_seconds=len(plan.engines) * (smoke_seconds + plan.drain_seconds + 60),
        keep_previous=plan.keep_previous,
        smoke=check if smoke else None,
    )
    driver = EngineDriver(
        [url.removeprefix("engine:") for url in plan.engines],
        lambda url: open_adapter(url, ctx),
        socket=default_socket(),
        options=options,
    )
    return driver
