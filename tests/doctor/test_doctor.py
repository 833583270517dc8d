"""The program, its stores, and its deadlines."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import jsonschema
import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.doctor import stores
from kvctl.doctor.examine import examine
from kvctl.doctor.findings import Finding, Machine, Probe
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.nodes import NodeProcess
from tests.cli.program import Kvctl

SCHEMA = Path(__file__).resolve().parent.parent.parent / "kvctl" / "cli" / "schemas" / "doctor.schema.json"


def found(*configs: StoreConfig) -> dict[str, Finding]:
    diagnosis = examine(stores.probes({"lab": configs}, Machine()))
    return {item.name: item for item in diagnosis.findings}


def test_a_machine_is_looked_at_and_nothing_hangs(kvctl: Kvctl) -> None:
    done = kvctl("doctor", "-o", "json")
    document = done.document
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert {item["area"] for item in document["findings"]} == {"host", "transports", "rdma", "gpu", "nixl", "stores"}
    for item in document["findings"]:
        assert item["state"] == "ok" or item["why"], item
    assert done.code == (10 if document["state"] == "broken" else 0), done.err


def test_only_the_areas_that_were_asked_for(kvctl: Kvctl) -> None:
    done = kvctl("doctor", "--area", "host", "-o", "json")
    assert {item["area"] for item in done.document["findings"]} == {"host"}


def test_a_configured_folder_that_is_gone_is_broken_with_the_fix(kvctl: Kvctl, tmp_path: Path) -> None:
    (tmp_path / "kvctl.toml").write_text('[[repos.lab.stores]]\nurl = "./gone"\n')
    done = kvctl("doctor", "--area", "stores", "-o", "json")
    assert done.code == 10
    (finding,) = done.document["findings"]
    assert (finding["state"], finding["value"]) == ("broken", "does not exist")
    assert "lab" in done.error["what"]
    shown = kvctl("doctor", "--area", "stores")
    assert "fix: mount it" in shown.out


def test_a_repo_in_a_folder_tells_its_room(kvctl: Kvctl, tmp_path: Path) -> None:
    assert kvctl("repo", "init", "-r", "./r").code == 0
    (finding,) = kvctl("doctor", "--area", "stores", "-r", "./r", "-o", "json").document["findings"]
    assert finding["state"] in {"ok", "degraded"}
    assert "free of" in finding["value"]


def test_each_endpoint_of_a_store_is_looked_at(tmp_path: Path) -> None:
    with FaultyS3() as server:
        server.put("pre/repo.json", b"{}")
        good = server.store("pre")
        dead = StoreConfig(good.url, (*good.endpoints, "http://127.0.0.1:1"), good.options)
        lines = found(dead)
    name = f"lab {good.url} over {good.endpoints[0]}"
    assert lines[name].state == "ok"
    assert lines[name].value.startswith("a repo answers")
    assert lines[f"{name} clock"].state == "ok"
    broken = lines[f"lab {good.url} over http://127.0.0.1:1"]
    assert (broken.state, broken.value) == ("broken", "cannot be reached")
    assert broken.fix


@pytest.mark.parametrize(
    ("status", "code", "value"),
    [
        (403, "AccessDenied", "refuses the credentials"),
        (503, "SlowDown", "is overloaded"),
        (500, "InternalError", "does not answer as it should"),
    ],
)
def test_a_server_that_refuses_is_broken_in_its_own_words(status: int, code: str, value: str) -> None:
    with FaultyS3() as server:
        server.add(Fault("status", methods=("GET", "HEAD"), status=status, code=code))
        (line,) = found(server.store("pre")).values()
    assert (line.state, line.value) == ("broken", value)
    assert code in line.why


def test_a_place_without_a_repo_is_degraded() -> None:
    with FaultyS3() as server:
        lines = list(found(server.store("pre")).values())
    assert (lines[0].state, lines[0].fix) == ("degraded", "`kvctl repo init`, or check the prefix")


def test_a_node_and_its_key(tmp_path: Path) -> None:
    with NodeProcess.start(str(tmp_path)) as node:
        config = node.store("pre")
        lines = list(found(config).values())
        assert lines[0].value.startswith("answers, holds no repo")
        assert lines[1].state == "ok"
        (refused,) = found(StoreConfig(config.url)).values()
        assert (refused.state, refused.value) == ("broken", "refuses the credentials")
        node.kill()
        (gone,) = found(config).values()
        assert (gone.state, gone.value) == ("broken", "cannot be reached")


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "SECONDS", 1.0)
    with NodeProcess.start(str(tmp_path)) as node:
        config = node.store("pre")
        node.stop()
        (line,) = found(config).values()
        node.resume()
    assert (line.state, line.value) == ("broken", "no answer")


@pytest.mark.parametrize(
    ("skew", "state"), [(0.4, "ok"), (-1.0, "ok"), (45.0, "degraded"), (-45.0, "degraded"), (3600.0, "broken")]
)
def test_clock_skew(skew: float, state: str) -> None:
    line = stores._skew("lab", skew, 0.1)
    assert line.state == state
    if state != "ok":
        assert ("ahead" in line.value) is (skew > 0)


def test_probes_run_at_once_and_each_has_its_deadline() -> None:
    never = threading.Event()
    both = threading.Barrier(2)

    def meets(name: str) -> list[Finding]:
        both.wait(60)
        return [Finding("host", name, "ok", "met")]

    def fails() -> list[Finding]:
        raise RuntimeError("boom")

    def waits() -> list[Finding]:
        never.wait()
        return []

    diagnosis = examine(
        [
            Probe("host", "one", lambda: meets("one"), 60),
            Probe("host", "two", lambda: meets("two"), 60),
            Probe("host", "bad", fails, 60),
            Probe("host", "stuck", waits, 0.2),
        ]
    )
    never.set()
    states = {item.name: (item.state, item.value) for item in diagnosis.findings}
    assert states == {
        "one": ("ok", "met"),
        "two": ("ok", "met"),
        "bad": ("broken", "cannot be looked at"),
        "stuck": ("broken", "no answer"),
    }
    assert diagnosis.state == "broken"
