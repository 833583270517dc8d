"""The engine as the API server's process reaches it: calls of the worker extension, pausing, its caches."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kvctl.core.errors import EnvError, KvctlError, TransientError
from kvctl.engines.http import BY_CODE

RESET_TRIES: Final = 200  # of 50 ms: stores let go of their blocks within that
EXTENSION: Final = "--worker-extension-cls kvctl_vllm.extension.WorkerExtension"


class Engine:
    """`client`: vLLM's EngineClient."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.reading = asyncio.Lock()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:  # Any: JSON
        """Of every worker; the first one's answer. Raises what any of them raised."""
        try:
            answers = await self.client.collective_rpc(method, args=args, kwargs=kwargs)
        except Exception as error:
            if method in str(error):
                raise EnvError(
                    f"the engine's workers do not know {method}", hint=f"start it with {EXTENSION}"
                ) from None
            raise
        for answer in answers:
            fault = answer.get("kvctl_error") if isinstance(answer, dict) else None
            if fault:
                kind = BY_CODE.get(fault["code"], KvctlError)
                raise kind(
                    fault["what"], cause=fault.get("cause"), hint=fault.get("hint"), details=fault.get("details")
                )
        found: dict[str, Any] = dict(answers[0])
        return found

    async def pause(self, mode: str, seconds: float) -> None:
        """No request runs when it returns. Raises TransientError when running ones do not end in time; nothing is
        paused then.
        """
        try:
            await asyncio.wait_for(self.client.pause_generation(mode=mode), seconds)
        except TimeoutError:
            await self.client.resume_generation()
            raise TransientError(
                f"running requests did not end in {seconds:g} s", hint="give --drain-timeout, or --in-flight abort|keep"
            ) from None

    async def resume(self) -> None:
        await self.client.resume_generation()

    async def reset(self, *, connector: bool, running: bool = False) -> None:
        """Forget every cached block. Raises TransientError when some are in use all the time."""
        for _ in range(RESET_TRIES):
            if await self.client.reset_prefix_cache(reset_running_requests=running, reset_connector=connector):
                await self.client.reset_encoder_cache()
                return
            await asyncio.sleep(0.05)
        raise TransientError("the engine's prefix cache could not be reset", cause="some of its blocks are in use")
