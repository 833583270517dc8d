"""The contracts bound to a live store: what `kvctl.testing.live` has pytest collect. The environment variable
KVCTL_LIVE_CHECK names the file that says which store, under which prefix, and over which transports.

Each check works in a prefix of its own under the run's and removes what it wrote.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import RetryPolicy
from kvctl.testing.live_raw import Raw, raw_access
from kvctl.testing.store_contract import StoreCase, StoreContract
from kvctl.testing.transport_contract import TransportCase, TransportContract
from kvctl.transports.api import Transport
from kvctl.transports.registry import choose, open_store, open_transports
from kvctl.transports.retry import RetryStore
from kvctl.transports.scratch import sweep

VARIABLE: Final = "KVCTL_LIVE_CHECK"
_PAGE: Final = 9  # where the store lets its pages be made small: two of them are listed without 2,000 objects
_NUMBERS: Final = itertools.count()


def wanted() -> dict[str, Any]:  # Any: JSON of our own parent
    with open(os.environ[VARIABLE], encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


WANTED: Final = wanted()
WAYS: Final = [(name, endpoint) for name in WANTED["transports"] for endpoint in WANTED["endpoints"] or [None]]


def store_config(prefix: str) -> StoreConfig:
    """The store under `prefix`, a folder of the run's own."""
    url = f"{WANTED['url'].rstrip('/')}/{WANTED['prefix']}/{prefix}"
    return StoreConfig(url, tuple(WANTED["endpoints"]), WANTED["options"])


def named(way: tuple[str, str | None]) -> str:
    return way[0] if way[1] is None else f"{way[0]} over {way[1]}"


@pytest.fixture
def place() -> Iterator[tuple[StoreConfig, Raw]]:
    """A fresh prefix and the raw way to it; both removed after the check."""
    config = store_config(str(next(_NUMBERS)))
    raw = raw_access(config)
    yield config, raw
    raw.close()
    sweep(config)


class TestStore(StoreContract):
    @pytest.fixture
    def case(self, place: tuple[StoreConfig, Raw]) -> Iterator[StoreCase]:
        config, raw = place
        store = open_store(config)
        page = 20
        if hasattr(store, "page_size"):
            store.page_size = page = _PAGE
        yield StoreCase(store, raw.put, raw.get, raw.start_upload, page)
        store.close()

    def test_unfinished_uploads(self, case: StoreCase) -> None:
        if case.store.capabilities.uploads and case.start_upload is None:
            pytest.skip("an unfinished upload cannot be made from outside this store")
        super().test_unfinished_uploads(case)


class TestTransport(TransportContract):
    @pytest.fixture(params=WAYS, ids=named)
    def case(self, request: pytest.FixtureRequest, place: tuple[StoreConfig, Raw]) -> Iterator[TransportCase]:
        name, endpoint = request.param
        config, raw = place
        store = RetryStore(open_store(config), RetryPolicy())
        one = config if endpoint is None else replace(config, endpoints=(endpoint,))

        def put(key: str, data: bytes) -> str:
            raw.put(key, data)
            return store.stat(key).version

        def opened() -> Transport:
            (made,) = open_transports(one, store, choose(config.scheme, "host", name), WANTED["transport_options"])
            return made

        yield TransportCase(opened, put, raw.get)
        store.close()
