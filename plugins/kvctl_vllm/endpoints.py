"""Routes of kvctl in vLLM's API server (entry point vllm.endpoint_plugins, opened by VLLM_PLUGINS=kvctl). They lie
under /v1, so an `--api-key` guards them too.

    GET  /v1/kvctl/engine             what it is and holds
    POST /v1/kvctl/reset              forget the prefix cache
    POST /v1/kvctl/swap               other weights (`kvctl swap`); /swap/finish, /swap/rollback
    GET  /v1/kvctl/weights            names, dtypes, shapes of one generation; POST /weights/lease, /weights/release
    GET  /v1/kvctl/weights/data       bytes of a tensor; name, offset, length again: of several, one after the other
    GET  /v1/kvctl/samples            inter-token times
    GET  /v1/kvctl/stored, /tokens    what became of a request's KV, and its tokens
"""

from __future__ import annotations

import base64
import json
import logging
import mmap
import os
import tempfile
from argparse import Namespace
from importlib import metadata
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State

from kvctl.core.errors import IncompatibleError, KvctlError, NothingServesError, UsageError
from kvctl.engines.api import SCHEMA
from kvctl_vllm.extension import to_json
from kvctl_vllm.gate import Gate
from kvctl_vllm.identity import small_files
from kvctl_vllm.plugin import version
from kvctl_vllm.remote import Engine
from kvctl_vllm.swap_service import BROKEN, SwapService

log = logging.getLogger("vllm.kvctl")
LARGEST: Final = 64 << 20  # bytes of a read of weights
STATUS: Final = {2: 400, 4: 404, 5: 403, 6: 503, 7: 422, 8: 409, 9: 507, 11: 500, 12: 500}
MORE_FILES: Final = (
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


class KvctlEndpoints:
    """An EndpointPlugin of vLLM."""

    name = "kvctl"
    required_tasks = None

    def __init__(self) -> None:
        self.gate = Gate()
        self.engine: Engine | None = None
        self.swaps: SwapService | None = None
        self.args = Namespace()
        self._window: tuple[str, mmap.mmap] | None = None

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:  # Any: EngineClient
        if engine_client is None:
            return
        self.engine = Engine(engine_client)
        self.swaps = SwapService(self.engine, self.gate)
        self.args = args

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(self.gate.middleware())
        for method, path, handler in (
            ("GET", "engine", self.info),
            ("POST", "reset", self.reset),
            ("POST", "swap", self.swap),
            ("POST", "swap/finish", self.finish),
            ("POST", "swap/rollback", self.rollback),
            ("GET", "weights", self.weights),
            ("POST", "weights/lease", self.lease),
            ("POST", "weights/release", self.release),
            ("GET", "weights/data", self.data),
            ("GET", "samples", self.samples),
            ("GET", "stored", self.stored),
            ("GET", "tokens", self.tokens),
        ):
            app.add_api_route(f"/v1/kvctl/{path}", self._guarded(handler), methods=[method], include_in_schema=False)

    def _guarded(self, handler: Any) -> Any:  # Any: a route's function
        async def answer(request: Request) -> Response:
            try:
                found = await handler(request)
            except KvctlError as error:
                return JSONResponse(to_json(error), STATUS.get(error.exit_code, 500))
            except Exception as error:
                return JSONResponse(to_json(error), 500)
            return found if isinstance(found, Response) else JSONResponse(found)

        answer.__annotations__ = {"request": Request, "return": Response}
        answer.__name__ = handler.__name__
        return answer

    def _here(self) -> tuple[Engine, SwapService]:
        if self.engine is None or self.swaps is None:
            raise IncompatibleError("this server has no engine")
        return self.engine, self.swaps

    # -- routes ----------------------------------------------------------------------------------------------

    async def info(self, request: Request) -> Any:  # Any: JSON, here and below
        engine, swaps = self._here()
        said = await engine.call("kvctl_info")
        return {
            "schema": SCHEMA,
            "engine": "vllm",
            "version": version(),
            "kvctl": metadata.version("kvctl"),
            "model": str((self.args.served_model_name or [self.args.model])[0]),
            **said,
            "paused": swaps.paused,
            "held": self.gate.waiting,
            "broken": self.gate.broken,
        }

    async def reset(self, request: Request) -> Any:
        engine, _ = self._here()
        await engine.reset(connector=False)
        return {}

    async def swap(self, request: Request) -> Any:
        body = await _body(request)
        return await self._here()[1].swap(body)

    async def finish(self, request: Request) -> Any:
        return await self._here()[1].finish()

    async def rollback(self, request: Request) -> Any:
        return await self._here()[1].rollback(str((await _body(request)).get("fail_at", "")))

    async def weights(self, request: Request) -> Any:
        engine, swaps = self._here()
        if self.gate.broken:
            raise NothingServesError("the engine holds no weights to read", cause=self.gate.broken, hint=BROKEN)
        seconds = float(request.query_params.get("lease", 60))
        swaps.lease(seconds)
        said = await engine.call("kvctl_weights")
        files = _files_beside(str(self.args.model))
        return {**said, "files": {name: base64.b64encode(data).decode() for name, data in files.items()}}

    async def lease(self, request: Request) -> Any:
        self._here()[1].lease(float((await _body(request)).get("seconds", 60)))
        return {}

    async def release(self, request: Request) -> Any:
        self._here()[1].lease(0)
        return {}

    async def data(self, request: Request) -> Any:
        engine, _ = self._here()
        query = request.query_params
        try:
            generation = int(query["generation"])
            offsets, lengths = ([int(text) for text in query.getlist(name)] for name in ("offset", "length"))
            parts = list(zip(query.getlist("name"), offsets, lengths, strict=True))
        except (KeyError, ValueError) as error:
            raise UsageError("generation, name, offset and length are wanted", cause=str(error)) from None
        length = sum(lengths)
        if min(lengths, default=-1) < 0 or length > LARGEST:
            raise UsageError(f"a read of {lengths} bytes", hint=f"at most {LARGEST} at once")
        if not length:
            return Response(b"", media_type="application/octet-stream")
        async with engine.reading:
            path, window = self._shared()
            await engine.call("kvctl_read", generation, parts, path)
            return Response(window[:length], media_type="application/octet-stream")

    def _shared(self) -> tuple[str, mmap.mmap]:
        """Memory that this process and the worker share: a file of ours in /dev/shm, 0600."""
        if self._window is None:
            descriptor, path = tempfile.mkstemp(prefix="kvctl-", dir="/dev/shm")
            os.truncate(descriptor, LARGEST)
            self._window = path, mmap.mmap(descriptor, LARGEST)
            os.close(descriptor)
            import atexit

            atexit.register(_unlink, path)
        return self._window

    async def samples(self, request: Request) -> Any:
        return await self._here()[0].call("kvctl_samples", float(request.query_params.get("since", 0)))

    async def stored(self, request: Request) -> Any:
        return await self._here()[0].call("kvctl_stored", str(request.query_params.get("request", "")))

    async def tokens(self, request: Request) -> Any:
        return await self._here()[0].call("kvctl_tokens", str(request.query_params.get("request", "")))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def _files_beside(folder: str) -> dict[str, bytes]:
    """What belongs into a checkpoint beside the weights."""
    files = small_files(folder)
    for name in MORE_FILES:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                files[name] = file.read()
    return files


async def _body(request: Request) -> dict[str, Any]:  # Any: JSON
    data = await request.body()
    try:
        found = json.loads(data or b"{}")
    except ValueError as error:
        raise UsageError("the body is no JSON", cause=str(error)) from None
    if not isinstance(found, dict):
        raise UsageError("the body is no JSON object")
    return found
