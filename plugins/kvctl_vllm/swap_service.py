"""A swap as the API server drives it: check and stage while requests run, then close the gate, pause, save, apply,
verify, reset, resume, open. Whatever fails, the old weights serve again; when even that fails, nothing serves, and the
gate stays closed, until a rollback or another swap succeeds: the copy of the old weights is kept for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from kvctl.core.errors import (
    ConflictError,
    KvctlError,
    NotFoundError,
    NothingServesError,
    SwapFailedError,
    UsageError,
)
from kvctl.engines.api import IN_FLIGHT
from kvctl_vllm.gate import Gate
from kvctl_vllm.remote import Engine

log = logging.getLogger("vllm.kvctl")
MODES: Final = {"drain": "wait", "abort": "abort", "keep": "keep"}
STEPS: Final = ("check", "stage", "pause", "save", "apply", "apply-late", "verify", "reset", "resume", "back")
POLL: Final = 0.05  # seconds between looks at what is being staged
LONGEST_LEASE: Final = 600.0  # seconds that a reader of weights may hold updates up
QUICK: Final = 30.0  # seconds for a pause with nothing to wait for
BROKEN: Final = "`kvctl swap engine:URL --rollback` tries again, so does another swap; else restart the engine"


class SwapService:
    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self._busy = asyncio.Lock()
        self._leased_until = 0.0
        self._held: dict[str, Any] | None = None  # Any: JSON; the result of a swap that waits for its smoke test
        self._held_until = 0.0
        self._watch: asyncio.Task[None] | None = None
        self.paused = False

    def lease(self, seconds: float) -> None:
        """Updates wait that long, for somebody who reads the weights; 0 ends it."""
        self._leased_until = time.monotonic() + min(seconds, LONGEST_LEASE) if seconds > 0 else 0.0

    async def swap(self, body: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        """Raises IncompatibleError and what reading raises while nothing was paused yet, SwapFailedError when the old
        weights serve on, NothingServesError when nothing does, ConflictError during another swap.
        """
        asked = _Asked(body)
        if self._held is not None:
            raise ConflictError(
                "another swap of this engine waits for its smoke test",
                cause=f"for {max(0.0, self._held_until - time.monotonic()):.0f} s more at most",
                hint="`kvctl swap engine:URL --rollback` ends it",
            )
        if self._busy.locked():
            raise ConflictError("another swap of this engine is under way")
        async with self._busy:
            # a client that goes away does not leave a swap half done
            return await asyncio.shield(asyncio.ensure_future(self._swap(asked)))

    async def _swap(self, asked: _Asked) -> dict[str, Any]:  # Any: JSON
        engine, steps = self._engine, _Steps(asked.fail_at)
        async with steps.step("check"):
            await engine.call("kvctl_swap", "check", address=asked.weights, repo=asked.repo)
        if asked.check_only:
            said = await engine.call("kvctl_info")
            return {
                "state": "fits", "source": said["source"], "digest": said["digest"], "generation": said["generation"],
                "steps": steps.seconds, "paused": 0.0, "verified": 0, "token": "",
            }  # fmt: skip
        try:
            async with steps.step("stage"):
                await self._stage()
        except KvctlError as error:
            raise self._not_loaded(error) from error
        await self._readers()
        saved = applied = False
        began = time.monotonic()
        token = secrets.token_urlsafe(16) if asked.hold else ""
        try:
            async with steps.step("pause"):
                self._gate.close(token)
                if not self.paused:  # as after a swap that left nothing that serves: what it kept must not run before
                    await engine.pause(MODES[asked.in_flight], asked.drain if asked.in_flight == "drain" else QUICK)
                self.paused = True
            saved = True
            async with steps.step("save"):
                await engine.call("kvctl_swap", "save")
            applied = True
            async with steps.step("apply"):
                await engine.call("kvctl_swap", "apply", fail_late=asked.fail_at in {"apply-late", "back"})
            async with steps.step("verify"):
                verified = await engine.call("kvctl_swap", "verify")
            async with steps.step("reset"):
                await engine.reset(connector=True, running=asked.in_flight == "keep" or bool(self._gate.broken))
            async with steps.step("resume"):
                await engine.resume()
                self.paused = False
        except Exception as error:
            await self._undo(error, saved=saved, applied=applied, fail=asked.fail_at == "back")
        said = await engine.call("kvctl_info")
        result = {
            "state": "serving",
            "source": said["source"],
            "digest": said["digest"],
            "generation": said["generation"],
            "steps": steps.seconds,
            "paused": time.monotonic() - began,
            "verified": verified["bytes"],
            "token": token,
            "keep": asked.keep,
        }
        if asked.hold:
            self._held, self._held_until = result, time.monotonic() + asked.hold_seconds
            self._watch = asyncio.create_task(self._give_up_after(asked.hold_seconds))
            return {**result, "state": "held"}
        self._gate.open()
        await engine.call("kvctl_swap", "done", keep=asked.keep)
        log.info("kvctl: %s serves, after a pause of %.3f s", said["source"], result["paused"])
        return result

    async def _stage(self) -> None:
        await self._engine.call("kvctl_swap", "stage")
        while not (await self._engine.call("kvctl_swap", "staged"))["done"]:  # noqa: ASYNC110 - it can only be asked
            await asyncio.sleep(POLL)

    def _not_loaded(self, error: KvctlError) -> KvctlError:
        what, cause, details = "the new weights could not be loaded", str(error), {"code": error.code}
        if self._gate.broken:
            return NothingServesError(f"{what}: nothing serves, as before", cause=cause, hint=BROKEN, details=details)
        return SwapFailedError(f"{what}, and the old ones serve", cause=cause, hint=error.hint, details=details)

    async def _readers(self) -> None:
        """Wait for those who read the weights: until their lease ends, renewed or not no longer than the longest."""
        longest = time.monotonic() + LONGEST_LEASE
        while (left := min(self._leased_until, longest) - time.monotonic()) > 0:  # noqa: ASYNC110 - leases are renewed and ended
            await asyncio.sleep(min(left, POLL))

    async def _undo(self, error: Exception, *, saved: bool, applied: bool, fail: bool) -> None:
        """Back to the old weights. Always raises. `fail`: rehearse that they do not come back."""
        log.warning("kvctl: the swap failed (%s); back to the old weights", error)
        replaced = applied or bool(self._gate.broken)
        try:
            if replaced:
                if not self.paused:
                    await self._engine.pause("abort", QUICK)
                    self.paused = True
                await self._engine.call("kvctl_swap", "back", fail=fail)
                await self._engine.reset(connector=True, running=True)
            await self._engine.resume()
            self.paused = False
            # what an earlier swap kept is there until something was saved
            await self._engine.call("kvctl_swap", "done", keep=not (saved or replaced))
        except Exception as worse:
            raise self._nothing("the swap failed", f"{error}; then {worse}") from worse
        self._gate.open()
        raise SwapFailedError(
            "the swap failed, and the old weights serve",
            cause=str(error),
            hint=getattr(error, "hint", None),
            details={"code": getattr(error, "code", "failure")},
        ) from error

    def _nothing(self, what: str, cause: str) -> NothingServesError:
        """Nothing serves from now on."""
        log.error("kvctl: %s, and the old weights do not serve either (%s): nothing serves", what, cause)
        self._gate.give_up(f"nothing serves: {what} ({cause})")
        return NothingServesError(
            f"{what}, and the old weights could not be brought back: nothing serves", cause=cause, hint=BROKEN
        )

    # -- a held swap, and the one before -----------------------------------------------------------------------

    async def finish(self) -> dict[str, Any]:  # Any: JSON
        held = self._take_held()
        self._gate.open()
        await self._engine.call("kvctl_swap", "done", keep=bool(held["keep"]))
        return {**held, "state": "serving"}

    async def rollback(self, fail_at: str = "") -> dict[str, Any]:  # Any: JSON
        """`fail_at` 'back': rehearse that the old weights do not come back. Raises NotFoundError when there is nothing
        to go back to, TransientError when requests did not end in time and nothing was changed, NothingServesError.
        """
        async with self._busy:
            held = self._held is not None
            if held:
                self._take_held()
            elif (await self._engine.call("kvctl_info"))["kept"] is None:
                raise NotFoundError("there are no weights to go back to", hint="swap with --keep-previous to keep them")
            await self._readers()
            serves = not (held or self._gate.broken)
            return await asyncio.shield(asyncio.ensure_future(self._rollback(serves=serves, fail=fail_at == "back")))

    async def _rollback(self, *, serves: bool, fail: bool) -> dict[str, Any]:  # Any: JSON
        """`serves`: the weights of now do, and go on when they cannot be stopped. Else what runs, if anything, is the
        test of weights that shall not serve, so it is not waited for.
        """
        steps, began = _Steps(""), time.monotonic()
        try:
            async with steps.step("pause"):
                self._gate.close()
                if not self.paused:
                    await self._engine.pause("wait" if serves else "abort", QUICK)
                self.paused = True
        except Exception as error:
            if not serves:
                raise self._nothing("the engine could not be paused", str(error)) from error
            self._gate.open()  # requests did not end in time: nothing was changed
            raise
        try:
            async with steps.step("apply"):
                await self._engine.call("kvctl_swap", "back", fail=fail)
            async with steps.step("reset"):
                await self._engine.reset(connector=True, running=True)
            async with steps.step("resume"):
                await self._engine.resume()
                self.paused = False
            await self._engine.call("kvctl_swap", "done", keep=False)
        except Exception as error:
            raise self._nothing("the rollback failed", str(error)) from error
        self._gate.open()
        said = await self._engine.call("kvctl_info")
        return {
            "state": "serving", "source": said["source"], "digest": said["digest"], "generation": said["generation"],
            "steps": steps.seconds, "paused": time.monotonic() - began, "verified": 0, "token": "",
        }  # fmt: skip

    def _take_held(self) -> dict[str, Any]:  # Any: JSON
        if self._held is None:
            raise NotFoundError("no swap is held in this engine")
        held, self._held = self._held, None
        if self._watch is not None:
            self._watch.cancel()
        return held

    async def _give_up_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        log.warning("kvctl: nobody finished the held swap in %g s; back to the old weights", seconds)
        self._watch = None
        with contextlib.suppress(KvctlError):  # the log has it by now
            await self.rollback()


class _Asked:
    """The body of a swap. Raises UsageError."""

    def __init__(self, body: dict[str, Any]) -> None:  # Any: JSON
        known = {
            *("weights", "repo", "in_flight", "drain_seconds", "keep_previous", "hold", "hold_seconds", "fail_at"),
            "check_only",
        }
        if set(body) - known or not isinstance(body.get("weights"), str):
            raise UsageError(f"a swap takes {', '.join(sorted(known))}", cause=f"{sorted(body)}")
        self.weights: str = body["weights"]
        self.repo: str | None = body.get("repo")
        self.in_flight = str(body.get("in_flight", "drain"))
        self.drain = float(body.get("drain_seconds", 60.0))
        self.keep = bool(body.get("keep_previous", False))
        self.hold = bool(body.get("hold", False))
        self.hold_seconds = float(body.get("hold_seconds", 300.0))
        self.fail_at = str(body.get("fail_at", ""))
        self.check_only = bool(body.get("check_only", False))
        if self.in_flight not in IN_FLIGHT:
            raise UsageError(f"in_flight {self.in_flight!r}", hint=f"one of {', '.join(IN_FLIGHT)}")
        if self.fail_at and self.fail_at not in STEPS:
            raise UsageError(f"there is no step {self.fail_at!r}", hint=f"one of {', '.join(STEPS)}")
        if self.hold and self.in_flight == "keep":
            raise UsageError(
                "requests that are kept would go on before the smoke test", hint="use drain or abort with a smoke test"
            )


class _Steps:
    """Seconds of each step; the one called `fail_at` fails once its work is done."""

    def __init__(self, fail_at: str) -> None:
        self.fail_at = fail_at
        self.seconds: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started
        if name == self.fail_at:
            raise KvctlError(f"rehearsed failure at {name}")
