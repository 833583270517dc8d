"""The compiled reader where it is not: what is told, and that everything works without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.core.errors import EnvError, UsageError
from kvctl.doctor import transports as findings
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.transport_contract import drive
from kvctl.transports import registry
from kvctl.transports.api import Op, Status
from kvctl.transports.http import pump
from kvctl.transports.http.bulk import HttpTransport


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str | None], None]]:
    """Puts a text in its place, or nothing."""

    def put(content: str | None) -> None:
        file = tmp_path / "_pump.so"
        if content is not None:
            file.write_text(content)
        monkeypatch.setattr(pump, "_FILE", str(file))
        pump._loaded.cache_clear()

    yield put
    monkeypatch.undo()
    pump._loaded.cache_clear()


def test_what_is_missing_is_told(without: Callable[[str | None], None]) -> None:
    for content, reason in ((None, "kvctl was installed where no C compiler was found"), ("text", "it does not load")):
        without(content)
        assert pump.why_not() == reason
        assert pump.lacking() == ("the compiled reader", reason)
        for scheme, name in (("node", "native-tcp"), ("s3", "s3")):
            for asked in ("auto", name):
                choice = registry.choose(scheme, "host", asked)
                assert choice.spec.name == name
                assert choice.passed_over[-1] == ("the compiled reader", reason)
        (finding,) = findings.compiled()
        assert (finding.state, finding.fix) == ("degraded", pump.HINT)
        assert reason in finding.why


def test_one_of_another_version_is_not_used(
    without: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if pump.why_not():
        pytest.skip(f"no compiled reader: {pump.why_not()}")
    monkeypatch.setattr(pump, "_FORM", 0)
    pump._loaded.cache_clear()
    assert pump.why_not() == "it was built from another version of kvctl"


def test_reads_go_on_without_it(without: Callable[[str | None], None], tmp_path: Path) -> None:
    without(None)
    (tmp_path / "node").mkdir()
    node = NodeProcess.start(str(tmp_path / "node"))
    try:
        config = node.store("x")
        store = registry.open_store(config)
        data = bytes(range(256)) * 1000
        version = store.put("k", data).version
        choice = registry.choose("node", "host", "native-tcp", stores=((config, store),))
        with pytest.raises(EnvError, match="no compiled reader"):
            registry.open_transports(config, store, choice, {"compiled": "true"})
        with pytest.raises(UsageError, match="compiled=perhaps"):
            registry.open_transports(config, store, choice, {"compiled": "perhaps"})
        (transport,) = registry.open_transports(config, store, choice, {})
        assert isinstance(transport, HttpTransport)
        buffer = GuardedBuffer(len(data))
        for turn in range(3):
            op = Op(turn, "read", "k", 0, len(data), buffer, 0, version, len(data))
            assert drive(transport, [op])[turn].status is Status.DONE
            assert buffer.view == data
        transport.close()
        store.close()
        del op
        buffer.close()
    finally:
        node.close()
