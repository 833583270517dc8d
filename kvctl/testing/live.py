"""The contracts as a program: `python -m kvctl.testing.live FILE` runs them on the live store that FILE names and
prints a JSON line when a check starts and when it ends. `kvctl transports check` is its parent. Needs pytest.

FILE is JSON: url, endpoints, options, prefix (under the url; fresh), transports (names), transport_options.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_CHECK = re.compile(r"::(?P<kind>TestStore|TestTransport)::test_(?P<name>\w+)(?:\[(?P<rest>.*)\])?$", re.DOTALL)


def say(**fields: object) -> None:
    os.write(_OUT, (json.dumps(fields) + "\n").encode())


# pytest and the checks may print: lines for the parent have a descriptor of their own
_OUT = os.dup(1)


class Recorder:
    """A pytest plug-in that tells the parent about each check."""

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        say(event="start", **identify(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when in {"setup", "teardown"} and report.outcome != "passed"):
            say(
                event="end",
                when=report.when,
                outcome=report.outcome,
                seconds=report.duration,
                why=reason(report),
                **identify(report.nodeid),
            )


def identify(nodeid: str) -> Mapping[str, str]:
    """Contract, check and parameters of a test's id."""
    found = _CHECK.search(nodeid)
    if found is None:
        return {"contract": "", "check": nodeid, "parameters": ""}
    return {
        "contract": "store" if found["kind"] == "TestStore" else "transport",
        "check": found["name"].replace("_", " "),
        "parameters": found["rest"] or "",
    }


def reason(report: pytest.TestReport) -> str:
    """The last words of a failure: what was expected and what came."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[:2000]


def capabilities() -> Mapping[str, Any]:  # Any: JSON
    """What the store and each transport claim."""
    from kvctl.testing.live_checks import WANTED, WAYS, named, store_config
    from kvctl.testing.live_raw import raw_access
    from kvctl.transports.registry import choose, open_store, open_transports

    config = store_config("capabilities")
    store = open_store(config)
    raw = raw_access(config)
    found: dict[str, Any] = {"store": _fields(store.capabilities), "raw": raw.about, "transports": {}}
    raw.close()
    for way in WAYS:
        choice = choose(config.scheme, "host", way[0])
        for made in open_transports(config, store, choice, WANTED["transport_options"]):
            found["transports"][named(way)] = _fields(made.capabilities)
            made.close()
    store.close()
    return found


def _fields(value: object) -> dict[str, Any]:  # Any: JSON
    from dataclasses import asdict

    assert not isinstance(value, type)
    fields: dict[str, Any] = asdict(value)  # type: ignore[call-overload]  # a frozen dataclass of the seams
    return {name: sorted(item) if isinstance(item, frozenset) else item for name, item in fields.items()}


def main() -> int:
    from kvctl.core.errors import KvctlError

    os.environ["KVCTL_LIVE_CHECK"] = sys.argv[1]
    os.dup2(2, 1)
    import pytest

    # assertions of the contracts explain themselves only when they are rewritten before their import
    pytest.register_assert_rewrite("kvctl.testing.store_contract", "kvctl.testing.transport_contract")
    try:
        say(event="capabilities", **capabilities())
    except KvctlError as error:
        say(event="error", code=error.code, what=error.what, cause=error.cause, hint=error.hint)
        return error.exit_code
    checks = Path(__file__).with_name("live_checks.py")
    folder = os.path.dirname(os.path.abspath(sys.argv[1]))
    # no configuration and no conftest of the folder that the user happens to be in
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, f"--rootdir={folder}", "-W", "ignore"]
    return int(pytest.main([*options, "--import-mode=importlib", str(checks)], plugins=[Recorder()]))


if __name__ == "__main__":
    sys.exit(main())
