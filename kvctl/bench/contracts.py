"""The shipped contracts, run live on a user's own store: what it and its transports claim, and whether it holds.

The checks run in a child process (`python -m kvctl.testing.live`), so that one that hangs or crashes is told by
name and the rest of the program goes on. Everything is written under one fresh prefix, which is removed.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import IO, Any, Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, IntegrityError, KvctlError, UsageError
from kvctl.transports import registry
from kvctl.transports.api import Store
from kvctl.transports.retry import RetryStore
from kvctl.transports.scratch import below, fresh_prefix, sweep

SCHEMA: Final = "kvctl.transports-check/1"
JOIN: Final = 5.0  # seconds for the reader of a dead child's output
TICK: Final = 0.2  # seconds between looks at signals and the deadline
SILENCE: Final = 120.0  # seconds: a check that takes longer is called hung; no operation of one waits for more than 60

# Which checks of the contracts prove a flag, by the words of their names.
FLAGS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "store": {
        "conditional_put": ("put if absent", "put if version", "a race of writers has one winner"),
        "conditional_delete": ("delete if version",),
        "strong_list": ("a put is in the next list",),
        "copy": ("copy inside the store",),
        "uploads": ("unfinished uploads",),
    },
    "transport": {
        "alignment": ("a read fills exactly its range",),
        "memory_kinds": ("it takes only memory of its kinds",),
        "ranged_write": ("a write of a part",),
        "writes": ("writes",),
        "one_sided": ("cancelled operations end and are not touched again", "a running operation can be cancelled"),
        "scatter": ("a read fills its parts in turn",),
        "gather": ("a write takes its parts in turn",),
    },
}


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a contract. outcome: 'held', 'broken', 'skipped' or 'hung'; `subject` is 'store' or a transport."""

    contract: str
    subject: str
    check: str
    parameters: str
    outcome: str
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """A transport of the store's scheme: checked, or why not."""

    name: str
    checked: bool
    reason: str = ""
    hint: str = ""


@dataclass(slots=True)
class ContractsResult:
    """What held. `raw`: by what other way objects were compared. `left`: keys that could not be removed."""

    url: str
    prefix: str
    ways: Sequence[Way]
    raw: str = ""
    capabilities: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # Any: JSON, by subject
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)

    def count(self, *outcomes: str) -> int:
        return sum(check.outcome in outcomes for check in self.checks)

    def flags(self) -> list[dict[str, Any]]:  # Any: JSON
        """Each flag that is claimed, and whether the checks that prove it held."""
        found: list[dict[str, Any]] = []
        for subject, claims in self.capabilities.items():
            contract = "store" if subject == "store" else "transport"
            for flag, value in claims.items():
                words = FLAGS[contract].get(flag, ())
                outcomes = {c.outcome for c in self.checks if c.subject == subject and c.check in words}
                verdict = "broken" if outcomes & {"broken", "hung"} else "held" if "held" in outcomes else "not checked"
                found.append({"subject": subject, "flag": flag, "claimed": value, "verdict": verdict})
        return found

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "schema": SCHEMA,
            "url": self.url,
            "prefix": self.prefix,
            "raw": self.raw,
            "seconds": self.seconds,
            "held": self.count("held"),
            "broken": self.count("broken", "hung"),
            "skipped": self.count("skipped"),
            "left": self.left,
            "transports": [
                {"name": way.name, "checked": way.checked, "reason": way.reason, "hint": way.hint} for way in self.ways
            ],
            "flags": self.flags(),
            "checks": [
                {
                    "contract": check.contract,
                    "subject": check.subject,
                    "check": check.check,
                    "parameters": check.parameters,
                    "outcome": check.outcome,
                    "seconds": check.seconds,
                    "why": check.why,
                }
                for check in self.checks
            ],
        }

    def require_held(self) -> None:
        """Raises IntegrityError that names the first broken promise."""
        broken = [check for check in self.checks if check.outcome in {"broken", "hung"}]
        if broken:
            first = broken[0]
            raise IntegrityError(
                f"{len(broken)} of {len(self.checks)} checks did not hold on {self.url}",
                cause=f"{first.subject}: {first.check}{f' [{first.parameters}]' if first.parameters else ''}: "
                f"{first.outcome}: {first.why.splitlines()[0] if first.why else ''}",
                hint="a repo on this store can lose or mix data; `-o json` has every check with its reason",
            )


def check_contracts(
    config: StoreConfig, ctx: Context, *, transport: str = "auto", options: Mapping[str, str] | None = None
) -> ContractsResult:
    """Run both contracts. `transport` 'auto' means every one that can run here. Raises EnvError without pytest, and
    the store's own error when it cannot be written at all.
    """
    if find_spec("pytest") is None:
        raise EnvError("the contracts need pytest", hint="pip install 'kvctl[check]'")
    if config.scheme not in registry.store_specs():
        registry.open_store(config)  # raises with the words for it
    ways = _ways(config, transport)
    if options and transport == "auto":
        raise UsageError("--transport-opt needs --transport: options belong to one", hint="name the transport")
    prefix = fresh_prefix("check")
    result = ContractsResult(config.url, prefix, ways)
    place = below(config, prefix)
    started = time.monotonic()

    def wrapped(store: Store) -> Store:
        return RetryStore(store, ctx.retry)

    _try_writing(place, ctx)
    ctx.progress.note(f"checking with test objects of up to 300 KB under {place.url}/, removed afterwards")
    try:
        _run(place, prefix, config, [way.name for way in ways if way.checked], options or {}, result, ctx)
    finally:
        result.left = sweep(place, wrapped)
        result.seconds = time.monotonic() - started
    return result


def _ways(config: StoreConfig, name: str) -> list[Way]:
    scheme = config.scheme
    if name != "auto":
        registry.choose(scheme, "host", name)  # raises when it cannot run here
        return [Way(name, checked=True)]
    found: list[Way] = []
    for spec in sorted(registry.transport_specs().values(), key=lambda item: (-item.rank, item.name)):
        if spec.schemes and scheme not in spec.schemes:
            continue
        if "host" not in spec.memory_kinds:
            kinds = ", ".join(sorted(spec.memory_kinds))
            found.append(Way(spec.name, checked=False, reason=f"it moves bytes to {kinds} memory only"))
            continue
        if spec.rank < 0:
            hint = f"--transport {spec.name}"
            found.append(Way(spec.name, checked=False, reason="it runs only when asked for by name", hint=hint))
            continue
        probed = registry.probe(spec)
        reason, hint = probed.reason, probed.hint or spec.install_hint
        if probed.available:
            reason, hint = _unserved(spec, config), ""
        found.append(Way(spec.name, checked=not reason, reason=reason, hint=hint))
    return found


def _unserved(spec: registry.TransportSpec, config: StoreConfig) -> str:
    """Why the store's server does not offer what the transport needs."""
    store = registry.open_store(config)
    try:
        return registry.unserved(spec, ((config, store),))
    finally:
        store.close()


def _try_writing(place: StoreConfig, ctx: Context) -> None:
    """One object there and back: a store that cannot be reached or written says so once, in its own words."""
    store = RetryStore(registry.open_store(place), ctx.retry, cancel=ctx.cancel)
    try:
        store.put("first", b"kvctl transports check")
        store.delete(["first"])
    finally:
        store.close()


def _run(
    place: StoreConfig,
    prefix: str,
    config: StoreConfig,
    transports: Sequence[str],
    options: Mapping[str, str],
    result: ContractsResult,
    ctx: Context,
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvctl-check-") as folder:
        asked = os.path.join(folder, "asked.json")
        with open(asked, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "url": config.url,
                    "endpoints": list(config.endpoints),
                    "options": dict(config.options),
                    "prefix": prefix,
                    "transports": list(transports),
                    "transport_options": dict(options),
                },
                file,
            )
        with open(os.path.join(folder, "log"), "w+b") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "kvctl.testing.live", asked],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env=_environment(),
                start_new_session=True,
            )
            lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            reader = threading.Thread(target=_pump, args=(child.stdout, lines), daemon=True)
            reader.start()
            try:
                running = _listen(lines, result, ctx)
            finally:
                if child.poll() is None:
                    child.kill()
                child.wait()
                reader.join(JOIN)
            if running is not None and not ctx.cancel.stopping:
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()
                result.checks.append(_hung(running, result, child.returncode, said[-1] if said else ""))
            elif not result.checks and not ctx.cancel.stopping:
                log.seek(0)
                raise KvctlError(
                    "the contracts did not run", cause=log.read().decode(errors="replace").strip()[-500:] or "no output"
                )
    ctx.cancel.check("checking the contracts")


def _environment() -> dict[str, str]:
    """The same modules as here, wherever the child's folder is; nothing of the user's pytest."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _listen(
    lines: queue.SimpleQueue[bytes], result: ContractsResult, ctx: Context
) -> Mapping[str, Any] | None:  # Any: JSON
    """Take down what the child says; the check that was running when it fell silent or died, None in order."""
    running: Mapping[str, Any] | None = None  # Any: JSON
    heard = time.monotonic()
    while not ctx.cancel.stopping:
        try:
            line = lines.get(timeout=TICK)
        except queue.Empty:
            if time.monotonic() - heard > SILENCE:
                return running or {"contract": "store", "check": "start", "parameters": ""}
            continue
        if not line:
            return running
        heard = time.monotonic()
        said = json.loads(line)
        if said["event"] == "error":
            raise EnvError(said["what"], cause=said["cause"], hint=said["hint"])
        if said["event"] == "capabilities":
            result.raw = said["raw"]
            result.capabilities = {"store": said["store"], **said["transports"]}
        elif said["event"] == "start":
            running = said
        else:
            _ended(said, result)
            running = None
    return running


def _pump(source: IO[bytes] | None, lines: queue.SimpleQueue[bytes]) -> None:
    assert source is not None
    with source:
        for line in source:
            lines.put(line)
    lines.put(b"")


def _ended(said: Mapping[str, Any], result: ContractsResult) -> None:  # Any: JSON
    subject, parameters = _subject(said, result)
    outcome = {"passed": "held", "failed": "broken", "skipped": "skipped"}[said["outcome"]]
    if said["when"] == "teardown" and outcome == "broken":
        last = result.checks[-1]
        if last.outcome == "held":
            result.checks.pop()  # it held, but what it wrote could not be removed
    result.checks.append(
        Check(said["contract"], subject, said["check"], parameters, outcome, said["seconds"], said["why"])
    )


def _subject(said: Mapping[str, Any], result: ContractsResult) -> tuple[str, str]:  # Any: JSON
    """(subject, the rest of the parameters): pytest joins them by '-', and a transport's name has some too."""
    text: str = said["parameters"]
    if said["contract"] == "store":
        return "store", text
    names = sorted((name for name in result.capabilities if name != "store"), key=len, reverse=True)
    for name in names:
        if text == name or text.startswith(f"{name}-"):
            return name, text[len(name) + 1 :]
        if text.endswith(f"-{name}"):
            return name, text[: -len(name) - 1]
    return text, ""


def _hung(running: Mapping[str, Any], result: ContractsResult, status: int, last_words: str) -> Check:  # Any: JSON
    """`status` is the child's; -9 when we ended it."""
    subject, parameters = _subject(running, result)
    why = f"no end within {SILENCE:g} s" if status in {-9, 0} else f"its process ended with {status}: {last_words}"
    return Check(running["contract"], subject, running["check"], parameters, "hung", SILENCE, why)
