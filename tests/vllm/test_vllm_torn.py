"""A vLLM that starts from weights which are replaced under it: it ends, says why, and serves none of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.nodes import NodeProcess
from tests.vllm.conftest import CREDENTIALS, eventually, text_of
from tests.vllm.engines import READY, Engine

pytestmark = pytest.mark.engine
SENT = "kvctl_node_sent_bytes_total"


@pytest.fixture
def model(models: Callable[..., Path]) -> Path:
    return models(hidden=512)  # 42 MB: three ranges


def refused(engine: Engine) -> None:
    assert engine.process.wait(READY) == 1
    why = "VersionChangedError: "
    assert engine.said(why) == engine.said("model.safetensors changed while loading") >= 1  # vLLM says it twice
    assert engine.said("Application startup complete") == 0


def test_an_object_that_is_replaced_while_an_engine_starts(model: Path, tmp_path: Path) -> None:
    with FaultyS3() as store:
        store.put("m/model.safetensors", (model / "model.safetensors").read_bytes())
        fault = store.add(Fault("replace", key="m/model.safetensors", skip=2, times=1))
        environ = {**CREDENTIALS, "HOME": str(tmp_path)}
        with Engine(model, tmp_path / "engine.log", None, source=text_of(store.store("m")), environ=environ) as engine:
            refused(engine)
        assert fault.fired == 1
        assert 412 in {item.status for item in store.requests("GET", "m/model.safetensors")}


@pytest.mark.slow
def test_a_nodes_object_that_is_replaced_while_an_engine_starts(model: Path, tmp_path: Path) -> None:
    """Between two ranges, which a rate keeps seconds apart."""
    with NodeProcess.start(str(tmp_path), keys=False) as node:
        place = Path(node.data) / "m" / "model.safetensors"
        place.parent.mkdir()
        shutil.copy(model / "model.safetensors", place)
        other = place.with_name("other")
        other.write_bytes(place.read_bytes()[::-1])
        loader = json.dumps({"source": text_of(node.store("m")), "max_rate": 2 << 20})
        extra = ("--model-loader-extra-config", loader)
        with Engine(model, tmp_path / "engine.log", None, extra=extra, environ={"HOME": str(tmp_path)}) as engine:
            eventually("the first range is read", lambda: node.metrics()[SENT] > 1 << 20)
            os.rename(other, place)
            refused(engine)
