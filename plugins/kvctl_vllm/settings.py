"""The connector's settings, out of `kv_connector_extra_config` (JSON) and the requests' `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from kvctl.agent.settings import default_socket
from kvctl.core.errors import UsageError
from kvctl.core.units import parse_size
from kvctl.kv.names import parse_session

PUSH: Final = ("end", "ask", "never")
MODES: Final = ("prefix", "layers")
PARAMS: Final = "kvctl"  # the key in kv_transfer_params


@dataclass(frozen=True, slots=True)
class Settings:
    """`repo`: a configured repo's name, or paths or URLs between commas (default: default_repo of the config). `push`:
    'end' stores every request that ends, 'ask' those that ask for it. `mode`: a prefix loads as a whole, beside other
    requests, or layer by layer while its own request waits at each layer. `min_tokens`: fewer are computed. `lookup`:
    seconds after which a request computes rather than wait for an answer. `staging`: bytes of host memory for KV on its
    way, per direction: a session with more is not pushed. `rest`: seconds that a store which did not answer is left
    alone. `agent`: true or a socket: this host's agent, whose KV tiers are ahead of the repo. `weights`: the model
    digest, where the engine's own loader read them and no folder tells.
    """

    repo: str | None = None
    config: str | None = None
    tenant: str = "engine"
    kv_key_file: str | None = None
    push: str = "end"
    pull: bool = True
    mode: str = "prefix"
    min_tokens: int = 64
    lookup: float = 5.0
    staging: int = 1 << 30
    rest: float = 5.0
    codec: str = "none"
    with_tokens: bool = False
    expires: float | None = None
    agent: str | bool = False
    weights: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def socket(self) -> str | None:
        """Of the agent; None without one."""
        if isinstance(self.agent, str):
            return self.agent or None
        return default_socket() if self.agent else None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:  # Any: JSON
        """Raises UsageError."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise UsageError(
                f"KvctlConnector knows no setting {unknown[0]!r}", hint=f"known are {', '.join(sorted(known))}"
            )
        values = dict(extra)
        if isinstance(values.get("staging"), str):
            values["staging"] = parse_size(values["staging"])
        found = cls(**values)
        if not isinstance(found.agent, str | bool):
            raise UsageError(f"agent {found.agent!r} is neither true nor a socket's path")
        if found.push not in PUSH:
            raise UsageError(f"push {found.push!r} is none of {', '.join(PUSH)}")
        if found.mode not in MODES:
            raise UsageError(f"mode {found.mode!r} is none of {', '.join(MODES)}")
        return found


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request says: `{"kvctl": {"session": "alice/chat1", "push": true, "pull": false, "with_tokens": true}}`.
    `session`: TENANT/NAME[@GENERATION], None for a name that the connector makes.
    """

    tenant: str
    session: str | None
    push: bool
    pull: bool
    with_tokens: bool

    @property
    def target(self) -> str | None:
        """The session without its generation: what a push makes the next generation of."""
        return None if self.session is None else self.session.partition("@")[0]

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None, settings: Settings) -> Ask:  # Any: JSON
        """Raises UsageError for what is no session or no such field."""
        said = (params or {}).get(PARAMS) or {}
        if not isinstance(said, Mapping) or set(said) - {"session", "push", "pull", "with_tokens"}:
            raise UsageError(f"kv_transfer_params[{PARAMS!r}] is {said!r}", hint="session, push, pull, with_tokens")
        session = said.get("session")
        tenant = settings.tenant
        if session is not None:
            tenant = parse_session(str(session)).session.tenant
        push = settings.push == "end" if settings.push != "ask" else False
        return cls(
            tenant,
            None if session is None else str(session),
            bool(said.get("push", push)) and settings.push != "never",
            bool(said.get("pull", settings.pull)),
            bool(said.get("with_tokens", settings.with_tokens)),
        )
