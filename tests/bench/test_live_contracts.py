"""`kvctl transports check`: the contracts, live."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvctl.bench import contracts
from kvctl.bench.contracts import check_contracts
from kvctl.core.addresses import parse_store
from kvctl.core.context import Context
from kvctl.core.errors import EnvError, IntegrityError, InterruptedRunError
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.store_contract import StoreContract
from kvctl.testing.transport_contract import TransportContract
from kvctl.transports import registry
from kvctl.transports.api import Capabilities, StoreCapabilities
from tests.cli.program import Kvctl

LIAR = """
import os, time
from kvctl.transports.mem import MemStore, MemTransport
from kvctl.transports.registry import StoreSpec, TransportSpec

class Liar(MemStore):
    def put(self, key, data, *, if_absent=False, if_version=None):
        return super().put(key, data)  # conditions are claimed, and ignored

class Deadly(MemTransport):
    name = "deadly"
    def perform(self, op):
        if op.key == "no/such":
            DEED
        return super().perform(op)

def open_store(config):
    return Liar(config.url.partition("://")[2])

def open_transport(config, store, endpoint, options):
    return Deadly(open_store(config))

STORE = StoreSpec("lies", "a store that lies", "liar:open_store")
DEADLY = TransportSpec("deadly", "ends its process", "liar:open_transport", schemes=("lies",))
"""
POINTS = "[kvctl.stores]\nlies = liar:STORE\n[kvctl.transports]\ndeadly = liar:DEADLY\n"


def test_a_folder_and_its_transports_keep_every_promise(
    kvctl: Kvctl, tmp_path: Path, valid: Callable[[str, Mapping[str, Any]], None]
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine.bin").write_bytes(b"mine")
    done = kvctl("transports", "check", "./store", "-o", "json")
    assert done.code == 0, done.err
    document = done.document
    valid("transports-check", document)
    assert (document["broken"], document["left"]) == (0, [])
    assert document["raw"] == "the file system"
    assert {"store", "file", "store-get"} <= {check["subject"] for check in document["checks"]}
    verdicts = {(flag["subject"], flag["flag"]): (flag["claimed"], flag["verdict"]) for flag in document["flags"]}
    assert verdicts["store", "conditional_delete"] == (True, "held")
    assert verdicts["file", "ranged_write"] == (False, "held")
    assert verdicts["file", "durable"] == (True, "not checked")
    # what was there is there, and nothing else
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["mine.bin"]
    assert document["prefix"] in done.err


def test_a_denied_ability_has_to_be_refused(kvctl: Kvctl) -> None:
    done = kvctl("transports", "check", "mem://box?conditional_put=false", "--transport", "mem", "-o", "json")
    assert done.code == 0, done.err
    flags = {(flag["subject"], flag["flag"]): flag for flag in done.document["flags"]}
    assert flags["store", "conditional_put"]["claimed"] is False
    assert flags["store", "conditional_put"]["verdict"] == "held"
    assert {check["subject"] for check in done.document["checks"]} == {"store", "mem"}


def test_a_lie_and_a_crash_are_named(kvctl: Kvctl, plug_in: Callable[[str, str, str], Path]) -> None:
    site = plug_in("liar", LIAR.replace("DEED", "os._exit(3)"), POINTS)
    env = {"PYTHONPATH": str(site)}
    done = kvctl("transports", "check", "lies://box", "--transport", "deadly", "-o", "json", env=env)
    assert done.code == 7
    document = done.document
    broken = {check["check"] for check in document["checks"] if check["outcome"] == "broken"}
    assert {"put if absent", "put if version"} <= broken
    flags = {flag["flag"]: flag["verdict"] for flag in document["flags"] if flag["subject"] == "store"}
    assert flags["conditional_put"] == "broken"
    hung = [check for check in document["checks"] if check["outcome"] == "hung"]
    assert [(check["subject"], check["check"]) for check in hung] == [
        ("deadly", "a missing object is not found by name")
    ]
    assert "ended with 3" in hung[0]["why"]
    assert "store: put if absent" in done.error["cause"]


@pytest.mark.slow
def test_a_hang_is_named(
    plug_in: Callable[[str, str, str], Path], kvctl: Kvctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = plug_in("liar", LIAR.replace("DEED", "time.sleep(600)"), POINTS)
    monkeypatch.syspath_prepend(str(site))
    registry.clear_cache()
    monkeypatch.setattr(contracts, "SILENCE", 15.0)
    try:
        result = check_contracts(parse_store("lies://box"), Context(), transport="deadly")
    finally:
        monkeypatch.undo()
        registry.clear_cache()
    hung = [check for check in result.checks if check.outcome == "hung"]
    assert [(check.subject, check.check) for check in hung] == [("deadly", "a missing object is not found by name")]
    with pytest.raises(IntegrityError, match="did not hold"):
        result.require_held()


def test_a_store_that_cannot_be_reached_says_so_once(kvctl: Kvctl) -> None:
    env = {"KVCTL_RETRIES": "1", "KVCTL_STALL_TIMEOUT": "5s"}
    done = kvctl("transports", "check", "node://127.0.0.1:1/x", "-o", "json", env=env)
    assert done.code == 6
    assert done.out == ""
    assert "127.0.0.1:1" in done.error["what"] + str(done.error["cause"])


def test_options_need_a_transport_by_name(kvctl: Kvctl) -> None:
    done = kvctl("transports", "check", "./x", "--transport-opt", "threads=2", "-o", "json")
    assert (done.code, done.error["code"]) == (2, "usage")


def test_what_cannot_run_is_refused_by_name(kvctl: Kvctl) -> None:
    done = kvctl("transports", "check", "./x", "--transport", "s3", "-o", "json")
    assert done.code == 2
    assert "serves s3" in done.error["what"]


def test_without_pytest_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contracts, "find_spec", lambda name: None)
    with pytest.raises(EnvError) as caught:
        check_contracts(parse_store(str(tmp_path)), Context())
    assert caught.value.hint == "pip install 'kvctl[check]'"


def test_a_storage_node_and_its_transports_keep_every_promise(kvctl: Kvctl, tmp_path: Path) -> None:
    with NodeProcess.start(str(tmp_path)) as node:
        config = node.store("mine")
        done = kvctl("transports", "check", f"{config.url}?key_file={config.options['key_file']}", "-o", "json")
        assert done.code == 0, done.err
        document = done.document
        assert {check["subject"] for check in document["checks"]} >= {"store", "native-tcp", "store-get"}
        assert document["raw"] == "a second instance of the node store"
        skipped = {check["check"] for check in document["checks"] if check["outcome"] == "skipped"}
        assert skipped == {"unfinished uploads"}  # one cannot be made from outside
        assert [path for path in Path(node.data).rglob("*") if path.is_file()] == []


def test_an_interrupted_check_leaves_nothing_behind(tmp_path: Path) -> None:
    ctx = Context()
    place = tmp_path / "store"
    place.mkdir()

    def stop() -> None:
        deadline = time.monotonic() + 60
        while not list(place.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        ctx.cancel.request(2)

    watcher = threading.Thread(target=stop)
    watcher.start()
    with pytest.raises(InterruptedRunError):
        check_contracts(parse_store(str(place)), ctx)
    watcher.join()
    assert list(place.iterdir()) == []


def test_every_flag_has_its_checks_or_cannot_be_seen_from_outside() -> None:
    unseen = {"max_in_flight", "durable", "zero_copy"}
    for kind, contract, claims in (
        ("store", StoreContract, StoreCapabilities),
        ("transport", TransportContract, Capabilities),
    ):
        assert {field.name for field in dataclasses.fields(claims)} == set(contracts.FLAGS[kind]) | (
            unseen if kind == "transport" else set()
        )
        names = {name.removeprefix("test_").replace("_", " ") for name in dir(contract) if name.startswith("test_")}
        for flag, checks in contracts.FLAGS[kind].items():
            assert set(checks) <= names, flag
