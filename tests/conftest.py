"""Fixtures for all tests: an environment of their own, and real SeaweedFS servers, started when first wanted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.testing.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedFS

_PREFIXES = itertools.count()

with suppress(ImportError):  # the engines' environments have no hypothesis, and no test that needs it
    from hypothesis import HealthCheck, settings

    # how long an example takes says something about the machine, nothing about the code
    settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any-machine")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads the user's config or credentials; those of the test servers are in place."""
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    for name in [name for name in os.environ if name.startswith(("AWS_", "KVCTL_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(home),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(home / "no-aws-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(home / "no-aws-credentials"),
    }.items():
        monkeypatch.setenv(name, value)


class _Pool:
    """Servers of one test session; the first n are always the same ones."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._servers: list[SeaweedFS] = []

    def first(self, count: int) -> Sequence[SeaweedFS]:
        fresh = []
        for number in range(len(self._servers), count):
            place = self._folder / f"server-{number}"
            place.mkdir()
            fresh.append(self._stack.enter_context(SeaweedFS.launch(str(place))))
        for server in fresh:
            server.wait()
        self._servers += fresh
        return self._servers[:count]


@pytest.fixture(scope="session")
def _seaweed_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Pool]:
    with ExitStack() as stack:
        yield _Pool(tmp_path_factory.mktemp("seaweed"), stack)


@pytest.fixture(scope="session")
def seaweed(_seaweed_pool: _Pool) -> SeaweedFS:
    """One real SeaweedFS server for the whole session."""
    return _seaweed_pool.first(1)[0]


@pytest.fixture(scope="session")
def seaweed3(_seaweed_pool: _Pool) -> Sequence[SeaweedFS]:
    """Three independent SeaweedFS servers (the first is `seaweed`)."""
    return _seaweed_pool.first(3)


@pytest.fixture
def seaweed_store(seaweed: SeaweedFS) -> Callable[[], StoreConfig]:
    """Each call gives an empty s3:// store on `seaweed`: one bucket, a fresh prefix."""
    return lambda: seaweed.store("kvctl-tests", f"p{next(_PREFIXES)}")


@pytest.fixture
def seaweed3_stores(seaweed3: Sequence[SeaweedFS]) -> Callable[[], tuple[StoreConfig, ...]]:
    """Each call gives three empty s3:// stores, one per server: the members of a repo."""

    def make() -> tuple[StoreConfig, ...]:
        prefix = f"p{next(_PREFIXES)}"
        return tuple(server.store("kvctl-tests", prefix) for server in seaweed3)

    return make


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests counted and timed belongs into the log, also of a run where everything passed."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    figures = [pair for report in reports for pair in report.user_properties]
    if figures:
        terminalreporter.section("figures")
        for name, value in figures:
            terminalreporter.line(f"{name}: {value}")
