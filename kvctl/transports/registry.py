"""Which stores and transports exist, and which one a load uses.

Plug-ins declare small spec objects under the entry-point groups `kvctl.stores` (name = URL scheme) and
`kvctl.transports` (name = transport). A spec module imports nothing heavy: factories and probes are named as
"module:attribute" and imported when they are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from kvctl.core.errors import EnvError, KvctlError, TransientError, UsageError
from kvctl.transports.api import HOST_KINDS, Store, StoreConfig, Transport

_STORES: Final = "kvctl.stores"
_TRANSPORTS: Final = "kvctl.transports"
_ASKED: Final = 8  # servers at once


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a store or transport: its name, what it means, its default in words. `unusable`: "module:func",
    called as func(config: StoreConfig) -> str where a store may not take it: why, empty when it does.
    """

    name: str
    summary: str
    default: str = ""
    unusable: str = ""


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
    options: Mapping[str, str]) -> Transport. `probe`: "module:func", called as func() -> Probe, cheap. `serves`:
    "module:func", called as func(config: StoreConfig, store: Store) -> str where a transport depends on what the server
    offers: why it does not offer this, empty when it does. `auto` asks; one that is asked for by name just runs.
    `lacks`: "module:func", called as func() -> (a part of it that makes it faster, why that is not here), or None.

    `rank` orders `auto`: the available transport of the highest rank runs. Ranks in use: below 0 what runs only when
    asked for by name (s3-rdma), 0 store-get,
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
    serves: str = ""
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport that runs and why: `passed_over` names each faster one, or faster part of it, and the reason."""

    spec: TransportSpec
    reason: str
    passed_over: tuple[tuple[str, str], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An entry point that cannot be used: its group, its name (scheme or transport), and why."""

    group: str
    name: str
    reason: str


def load_object(path: str) -> Any:  # Any: whatever the plug-in names
    """The attribute behind "module:attribute". Raises EnvError with the import's own words."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a plug-in's import runs foreign code: it may fail in any way
        raise EnvError(f"plug-in {path} cannot be loaded", cause=f"{type(error).__name__}: {error}") from error


def store_specs() -> Mapping[str, StoreSpec]:
    """Scheme -> spec, from entry points. What is broken is in `broken_plugins` and disturbs nothing else."""
    return _scan(_STORES, StoreSpec)[0]


def transport_specs() -> Mapping[str, TransportSpec]:
    return _scan(_TRANSPORTS, TransportSpec)[0]


def broken_plugins() -> tuple[BrokenPlugin, ...]:
    """Entry points of both groups that give no usable spec."""
    return tuple(_scan(_STORES, StoreSpec)[1].values()) + tuple(_scan(_TRANSPORTS, TransportSpec)[1].values())


@cache
def _scan(group: str, kind: type[Any]) -> tuple[dict[str, Any], dict[str, BrokenPlugin]]:  # Any: a spec of `kind`
    found: dict[str, Any] = {}
    broken: dict[str, BrokenPlugin] = {}
    for point in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        name = point.name
        try:
            spec = load_object(point.value)
        except EnvError as error:
            broken[name] = BrokenPlugin(group, name, str(error))
            continue
        own = getattr(spec, "scheme", None) or getattr(spec, "name", None)
        if name in found:
            del found[name]
            broken[name] = BrokenPlugin(group, name, "two plug-ins claim this name: uninstall one of them")
        elif not isinstance(spec, kind):
            broken[name] = BrokenPlugin(group, name, f"{point.value} is a {type(spec).__name__}, not a {kind.__name__}")
        elif own != name:
            broken[name] = BrokenPlugin(group, name, f"its spec calls itself {own!r}")
        elif name not in broken:
            found[name] = spec
    return found, broken


def clear_cache() -> None:
    """Look at the entry points again: after plug-ins were installed or removed in this process."""
    _scan.cache_clear()


def open_store(config: StoreConfig) -> Store:
    """The bare store behind a URL (no wrappers). Raises UsageError for an unknown scheme, EnvError for one whose
    plug-in is broken.
    """
    spec = store_specs().get(config.scheme)
    if spec is None:
        broken = _scan(_STORES, StoreSpec)[1].get(config.scheme)
        if broken is not None:
            raise EnvError(f"the plug-in for {config.scheme}:// is broken", cause=broken.reason)
        known = ", ".join(f"{scheme}://" for scheme in sorted(store_specs()))
        raise UsageError(
            f"no store knows {config.scheme}:// ({config.url})",
            hint=f"known here: {known}; for others install a plug-in (see `kvctl help plugins`)",
        )
    factory = load_object(spec.factory)
    store: Store = factory(config)
    return store


def probe(spec: TransportSpec) -> Probe:
    """Whether it can run here. A probe that fails itself means no."""
    if not spec.probe:
        return Probe(available=True)
    try:
        result: Probe = load_object(spec.probe)()
    except Exception as error:
        return Probe(available=False, reason=f"its probe failed: {error}", hint=spec.install_hint)
    return result


def choose(
    scheme: str,
    memory_kind: str,
    name: str = "auto",
    *,
    failed: Mapping[str, str] | None = None,
    stores: Sequence[tuple[StoreConfig, Store]] = (),
) -> Choice:
    """The transport for a store's scheme and a memory kind. Raises UsageError or EnvError, never falls back
    from a name that was asked for. `failed`: transports that failed in this run and why; they are passed over.
    `stores`: those of this scheme that it has to serve, all of them.
    """
    specs = transport_specs()
    if name != "auto":
        spec = specs.get(name)
        if spec is None:
            broken = _scan(_TRANSPORTS, TransportSpec)[1].get(name)
            if broken is not None:
                raise EnvError(f"the plug-in for transport {name} is broken", cause=broken.reason)
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
        return Choice(spec, "asked for", _lacking(spec))
    passed = [(name, broken.reason) for name, broken in _scan(_TRANSPORTS, TransportSpec)[1].items()]
    for spec in sorted(specs.values(), key=lambda item: (-item.rank, item.name)):
        if spec.schemes and scheme not in spec.schemes:
            continue
        refusal = _refusal(spec, scheme, memory_kind) or (failed or {}).get(spec.name, "")
        if not refusal:
            result = probe(spec)
            refusal = unserved(spec, stores) if result.available else result.reason
        if not refusal:
            return Choice(spec, "the fastest available for this store and memory", (*passed, *_lacking(spec)))
        passed.append((spec.name, refusal))
    raise EnvError(
        f"no transport moves bytes between {scheme}:// and {memory_kind} memory",
        cause=str(passed) if passed else None,
    )


def _lacking(spec: TransportSpec) -> tuple[tuple[str, str], ...]:
    found: tuple[str, str] | None = load_object(spec.lacks)() if spec.lacks else None
    return () if found is None else (found,)


def _refusal(spec: TransportSpec, scheme: str, memory_kind: str) -> str:
    if spec.schemes and scheme not in spec.schemes:
        return f"it serves {', '.join(spec.schemes)}, not {scheme}"
    if memory_kind not in spec.memory_kinds:
        return f"it moves bytes to {', '.join(sorted(spec.memory_kinds))} memory, not {memory_kind}"
    return ""


def unserved(spec: TransportSpec, stores: Sequence[tuple[StoreConfig, Store]]) -> str:
    """Why a store's server does not offer what the transport needs. One that does not answer is no reason: it answers
    no other transport either.
    """
    if not spec.serves or not stores:
        return ""
    ask = load_object(spec.serves)

    def asked(place: tuple[StoreConfig, Store]) -> str:
        try:
            reason: str = ask(*place)
        except TransientError:
            return ""
        except KvctlError as error:
            return str(error)
        return reason

    if len(stores) == 1:
        return asked(stores[0])
    with ThreadPoolExecutor(min(_ASKED, len(stores)), thread_name_prefix="kvctl-serves") as pool:
        return next((reason for reason in pool.map(asked, stores) if reason), "")


def unusable(transport: str, option: str, config: StoreConfig) -> str:
    """Why a store does not take an option of a transport; empty when it does. For who would set it unasked."""
    spec = transport_specs().get(transport)
    found = next((item for item in (spec.options if spec is not None else ()) if item.name == option), None)
    if found is None:
        return f"transport {transport} has no option {option!r}"
    reason: str = load_object(found.unusable)(config) if found.unusable else ""
    return reason


def open_transports(
    config: StoreConfig, store: Store, choice: Choice, options: Mapping[str, str] | None = None
) -> Sequence[Transport]:
    """One transport per endpoint of the store (one where it names none)."""
    factory = load_object(choice.spec.factory)
    endpoints: Sequence[str | None] = config.endpoints or (None,)
    return [factory(config, store, endpoint, dict(options or {})) for endpoint in endpoints]
