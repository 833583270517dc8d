"""Which stores and transports exist, and which one a load uses.

Plug-ins declare small spec objects under the entry-point groups `kvctl.stores` (name = URL scheme) and
`kvctl.transports` (name = transport). A spec module imports nothing heavy: factories and probes are named as
"module:attribute" and imported when they are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kvctl.core.errors import EnvError, UsageError
from kvctl.transports.api import HOST_KINDS, Store, StoreConfig, Transport


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a store or transport: its name, what it means, its default in words."""

    name: str
    summary: str
    default: str = ""


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """`factory`: "module:func", called as func(config: StoreConfig) -> Store."""

    scheme: str
    summary: str
    factory: str
    options: tuple[Option, ...] = ()
    install_hint: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a transport can run here: `available`, else why not and how to get it."""

    available: bool
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """`factory`: "module:func", called as func(config: StoreConfig, store: Store, endpoint: str | None,
    options: Mapping[str, str]) -> Transport. `probe`: "module:func", called as func() -> Probe, cheap.

    `rank` orders `auto`: the available transport of the highest rank runs. Ranks in use: 0 store-get,
    10 plain (file, s3, native-tcp, mem), 20 a faster path over the same medium (nixl-posix, nixl-obj),
    30 RDMA (native-rdma, nixl-ucx), 40 straight into GPU memory (nixl-gds). `schemes` empty: any store.
    """

    name: str
    summary: str
    factory: str
    schemes: tuple[str, ...] = ()
    memory_kinds: frozenset[str] = HOST_KINDS
    rank: int = 10
    options: tuple[Option, ...] = ()
    requirements: str = ""
    install_hint: str = ""
    probe: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport that runs and why: `passed_over` names each faster one and the reason."""

    spec: TransportSpec
    reason: str
    passed_over: tuple[tuple[str, str], ...] = field(default=())


def load_object(path: str) -> Any:  # Any: whatever the plug-in names
    """The attribute behind "module:attribute". Raises EnvError with the import's own words."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EnvError(f"plug-in {path} cannot be loaded", cause=str(error)) from error


@cache
def store_specs() -> Mapping[str, StoreSpec]:
    """Scheme -> spec, from entry points; two plug-ins for one scheme are an EnvError."""
    return {spec.scheme: spec for spec in _specs("kvctl.stores", StoreSpec)}


@cache
def transport_specs() -> Mapping[str, TransportSpec]:
    return {spec.name: spec for spec in _specs("kvctl.transports", TransportSpec)}


def _specs(group: str, kind: type[Any]) -> list[Any]:  # Any: StoreSpec or TransportSpec
    found: dict[str, Any] = {}
    for point in sorted(entry_points(group=group), key=lambda entry: entry.name):
        spec = load_object(point.value)
        if not isinstance(spec, kind):
            raise EnvError(f"plug-in {point.name!r} of group {group} gives {type(spec).__name__}, not {kind.__name__}")
        if point.name in found:
            raise EnvError(f"two plug-ins claim {point.name!r} in group {group}", hint="uninstall one of them")
        found[point.name] = spec
    return list(found.values())


def open_store(config: StoreConfig) -> Store:
    """The bare store behind a URL (no wrappers). Raises UsageError for an unknown scheme."""
    spec = store_specs().get(config.scheme)
    if spec is None:
        known = ", ".join(f"{scheme}://" for scheme in sorted(store_specs()))
        raise UsageError(
            f"no store knows {config.scheme}:// ({config.url})",
            hint=f"known here: {known}; others come as plug-ins (see `kvctl help plugins`)",
        )
    factory = load_object(spec.factory)
    store: Store = factory(config)
    return store


def probe(spec: TransportSpec) -> Probe:
    if not spec.probe:
        return Probe(available=True)
    result: Probe = load_object(spec.probe)()
    return result


def choose(scheme: str, memory_kind: str, name: str = "auto", *, failed: Mapping[str, str] | None = None) -> Choice:
    """The transport for a store's scheme and a memory kind. Raises UsageError or EnvError, never falls back
    from a name that was asked for. `failed`: transports that failed in this run and why; they are passed over.
    """
    specs = transport_specs()
    if name != "auto":
        spec = specs.get(name)
        if spec is None:
            raise UsageError(f"no transport is called {name!r}", hint=f"known here: {', '.join(sorted(specs))}")
        refusal = _refusal(spec, scheme, memory_kind)
        if refusal:
            raise UsageError(f"transport {name} cannot serve this: {refusal}")
        result = probe(spec)
        if not result.available:
            raise EnvError(
                f"transport {name} is not available",
                cause=result.reason,
                hint=result.hint or spec.install_hint,
            )
        return Choice(spec, "asked for")
    passed: list[tuple[str, str]] = []
    for spec in sorted(specs.values(), key=lambda item: (-item.rank, item.name)):
        if spec.schemes and scheme not in spec.schemes:
            continue
        refusal = _refusal(spec, scheme, memory_kind) or (failed or {}).get(spec.name, "")
        if not refusal:
            result = probe(spec)
            refusal = "" if result.available else result.reason
        if not refusal:
            return Choice(spec, "the fastest available for this store and memory", tuple(passed))
        passed.append((spec.name, refusal))
    raise EnvError(
        f"no transport moves bytes between {scheme}:// and {memory_kind} memory",
        cause=str(passed) if passed else None,
    )


def _refusal(spec: TransportSpec, scheme: str, memory_kind: str) -> str:
    if spec.schemes and scheme not in spec.schemes:
        return f"it serves {', '.join(spec.schemes)}, not {scheme}"
    if memory_kind not in spec.memory_kinds:
        return f"it moves bytes to {', '.join(sorted(spec.memory_kinds))} memory, not {memory_kind}"
    return ""


def open_transports(
    config: StoreConfig, store: Store, choice: Choice, options: Mapping[str, str] | None = None
) -> Sequence[Transport]:
    """One transport per endpoint of the store (one where it names none)."""
    factory = load_object(choice.spec.factory)
    endpoints: Sequence[str | None] = config.endpoints or (None,)
    return [factory(config, store, endpoint, dict(options or {})) for endpoint in endpoints]
