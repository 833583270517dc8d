"""Finding the adapter of a running engine: it says what it is under /v1/kvctl/engine, and an entry point of the group
`kvctl.engines` (name -> "module:ENGINE", an EngineSpec) makes the client. Nothing is imported before that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final, cast

from kvctl.core.context import Context
from kvctl.core.errors import EnvError, IncompatibleError
from kvctl.engines.api import SCHEMA, EngineAdapter
from kvctl.engines.http import EngineClient

GROUP: Final = "kvctl.engines"
DOOR: Final = "/v1/kvctl/engine"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`factory`: "module:function", called with an EngineClient and a Context."""

    name: str
    summary: str
    factory: str

    def open(self, client: EngineClient, ctx: Context) -> EngineAdapter:
        module, _, attribute = self.factory.partition(":")
        make = cast(
            "Callable[[EngineClient, Context], EngineAdapter]", getattr(importlib.import_module(module), attribute)
        )
        return make(client, ctx)


def engine_specs() -> dict[str, EngineSpec]:
    """By name. A plug-in that cannot be imported is an EnvError that names it."""
    found: dict[str, EngineSpec] = {}
    for entry in entry_points(group=GROUP):
        try:
            spec = entry.load()
        except ImportError as error:
            raise EnvError(f"the engine plug-in {entry.name} cannot be loaded", cause=str(error)) from error
        found[entry.name] = spec
    return found


def open_engine(url: str, ctx: Context, *, api_key: str | None = None) -> EngineAdapter:
    """The adapter for the engine at `url` (http://host:port). Raises MemberDownError, AuthError, and IncompatibleError
    for an engine without kvctl's plug-in.
    """
    client = EngineClient(url, api_key=api_key)
    try:
        said = client.get(DOOR, missing="it has no kvctl plug-in, or VLLM_PLUGINS does not name it: `kvctl help vllm`")
        name = str(said.get("engine", ""))
        if said.get("schema") != SCHEMA:
            raise IncompatibleError(
                f"the engine at {client.url} speaks {said.get('schema')!r}, this kvctl speaks {SCHEMA}",
                hint="use the same release of kvctl on both sides",
            )
        specs = engine_specs()
        if name not in specs:
            raise IncompatibleError(
                f"there is no adapter for engine {name!r}", cause=f"known: {', '.join(sorted(specs)) or 'none'}"
            )
        return specs[name].open(client, ctx)
    except BaseException:
        client.close()
        raise
