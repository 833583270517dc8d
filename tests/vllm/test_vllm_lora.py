"""KV of requests that use a LoRA: the adapter's tensors and its scale are a part of every key; its name is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import IncompatibleError
from kvctl.engines.api import SwapRequest
from kvctl.engines.registry import open_engine
from kvctl.kv.inspecting import InspectRequest, inspect_session
from tests.vllm import tiny
from tests.vllm.conftest import apart, stores_of
from tests.vllm.engines import Answer, Engine

pytestmark = pytest.mark.engine
RANK = 8
PROMPT = tiny.tokens(300, 90)
WHOLE = 288  # tokens of it in whole blocks of 16, but for its last token


@pytest.fixture(scope="module")
def engine(models: Callable[..., Path], launch: Callable[..., Engine], node_repo: str) -> Engine:
    """One that serves adapters, two at a time, and takes others while it runs."""
    extra = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)]
    environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return launch(models(), {"repo": node_repo, "min_tokens": 16}, extra=extra, environ=environ)


def load(engine: Engine, name: str, folder: Path) -> None:
    engine.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def unload(engine: Engine, name: str) -> None:
    engine.ask("/v1/unload_lora_adapter", {"lora_name": name})


def stored(engine: Engine, model: str, session: str) -> Answer:
    """An answer that was computed, its KV stored."""
    engine.reset()
    before = engine.info()["kv"]["stores"]
    found = engine.complete(PROMPT, model=model, kvctl={"session": session, "pull": False})
    engine.stored(before + 1)
    return found


def again(engine: Engine, model: str) -> Answer:
    """The same out of the store, by the index alone."""
    engine.reset()
    return engine.complete(PROMPT, model=model, kvctl={"push": False})


def test_two_adapters_under_one_name_never_share(engine: Engine, node_repo: str, tmp_path: Path) -> None:
    one, two = tiny.adapter(tmp_path / "one", seed=1, rank=RANK), tiny.adapter(tmp_path / "two", seed=2, rank=RANK)
    louder = tiny.adapter(tmp_path / "louder", seed=1, rank=RANK, alpha=4 * RANK)
    plain = stored(engine, "m", "lora/plain")
    said: dict[Path, Answer] = {}
    for folder in (one, two, louder):
        load(engine, "mine", folder)
        assert again(engine, "mine").kvctl["found"] == 0, folder
        said[folder] = stored(engine, "mine", f"lora/{folder.name}")
        found = again(engine, "mine")
        assert found.kvctl["found"] == WHOLE
        assert found.tokens == said[folder].tokens
        assert apart(found.logprobs, said[folder].logprobs) <= 1e-4
        unload(engine, "mine")
    assert len({tuple(answer.logprobs) for answer in (plain, *said.values())}) == 4
    assert again(engine, "m").kvctl["found"] == WHOLE
    load(engine, "yours", one)  # another name for the first: its KV is found
    found = again(engine, "yours")
    unload(engine, "yours")
    assert found.kvctl["found"] == WHOLE
    assert found.tokens == said[one].tokens
    loras = [
        inspect_session(InspectRequest(stores_of(node_repo), f"lora/{name}"), Context()).descriptor.lora
        for name in ("plain", "one", "two", "louder")
    ]
    assert loras[0] == ()
    assert [lora[0].scale for lora in loras[1:]] == ["2", "2", "4"]
    assert loras[1][0].digest == loras[3][0].digest != loras[2][0].digest


def test_an_adapter_that_changes_where_it_lies_is_left_alone(engine: Engine, tmp_path: Path) -> None:
    """vLLM names its own blocks after the folder: what it would store may be of either adapter."""
    place, other = tiny.adapter(tmp_path / "place", seed=3, rank=RANK), tiny.adapter(tmp_path / "o", seed=4, rank=RANK)
    kept = tmp_path / "kept"
    shutil.copytree(place, kept)
    load(engine, "moving", place)
    first = stored(engine, "moving", "lora/moving")
    unload(engine, "moving")
    before = engine.info()["kv"]["stores"]
    for source in (other, kept):  # even when the old one comes back
        shutil.copytree(source, place, dirs_exist_ok=True)
        load(engine, "moving", place)
        engine.reset()
        found = engine.complete(PROMPT, model="moving", kvctl={"session": "lora/moving"})
        unload(engine, "moving")
        assert found.kvctl == {"here": 0, "found": 0, "stores": 0}
        assert (found.tokens == first.tokens) == (source == kept)
    assert engine.info()["kv"]["stores"] == before
    assert engine.said("was changed while the engine ran") >= 2
    load(engine, "moved", kept)
    found = again(engine, "moved")
    unload(engine, "moved")
    assert found.kvctl["found"] == WHOLE
    assert found.tokens == first.tokens


def test_an_engine_with_adapters_refuses_a_swap_and_serves_on(engine: Engine, models: Callable[..., Path]) -> None:
    before = engine.complete(PROMPT, kvctl={"push": False, "pull": False}).tokens
    adapter = open_engine(engine.url, Context())
    info = adapter.info()
    with pytest.raises(IncompatibleError, match="does not name"):
        adapter.swap(SwapRequest(str(models(seed=1))))
    assert adapter.info() == info
    adapter.close()
    assert engine.complete(PROMPT, kvctl={"push": False, "pull": False}).tokens == before
