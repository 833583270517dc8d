"""Weights into a running engine and out of it: sources, swaps, failures at every step, one generation per reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    ConflictError,
    IncompatibleError,
    KvctlError,
    NotFoundError,
    SwapFailedError,
    UsageError,
)
from kvctl.engines.api import EngineAdapter, Part, ReadsParts, SwapRequest
from kvctl.engines.registry import open_engine
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.seaweed import SeaweedFS
from kvctl.weights.models import digest_model
from tests.vllm import tiny
from tests.vllm.conftest import repo_over, text_of
from tests.vllm.engines import Engine

pytestmark = pytest.mark.engine
PROMPT = tiny.tokens(60, 5)
NO_KV = {"push": False, "pull": False}


@pytest.fixture(scope="module")
def pair(models: Callable[..., Path]) -> tuple[str, str]:
    """Two models of one shape."""
    return str(models()), str(models(seed=1))


@pytest.fixture(scope="module")
def engine(llama: Engine, pair: tuple[str, str]) -> Iterator[Engine]:
    """The shared engine; it has its own weights again afterwards."""
    yield llama
    adapter = open_engine(llama.url, Context())
    adapter.swap(SwapRequest(pair[0]))
    adapter.close()


@pytest.fixture
def adapter(engine: Engine, pair: tuple[str, str]) -> Iterator[EngineAdapter]:
    """Of the engine, with the first model in it."""
    found = open_engine(engine.url, Context())
    if found.info().digest != digest(pair[0]):
        found.swap(SwapRequest(pair[0]))
    yield found
    found.close()


def digest(folder: str) -> str:
    return digest_model(folder, None, None, None, Context())[0].digest


def answer(engine: Engine, **more: Any) -> list[int]:
    return engine.complete(PROMPT, kvctl=NO_KV, **more).tokens


def test_the_engine_speaks_as_transformers_does(engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
    assert answer(engine) == said[0, len(PROMPT) :].tolist()


def test_weights_come_from_every_source(
    engine: Engine, adapter: EngineAdapter, pair: tuple[str, str], seaweed: SeaweedFS, nodes: Sequence[NodeProcess]
) -> None:
    """A folder, an S3 prefix, a storage node, a repo striped over both nodes: the same digest, the same words."""
    from kvctl.transports.registry import open_store
    from kvctl.weights.push import PushRequest, push_weights

    first, second = answer(engine), None
    plain = [seaweed.store("kvctl-vllm", "weights"), nodes[0].store("weights")]
    for config in plain:
        store = open_store(config)
        for path in Path(pair[1]).iterdir():
            store.put(path.name, path.read_bytes())
        store.close()
    repo = repo_over([node.store("models") for node in nodes])
    from kvctl_vllm import places

    push_weights(PushRequest(source=pair[1], name="second", repo=places.repo_stores(places.config(), repo)), Context())
    sources: list[tuple[str, str | None]] = [(pair[1], None), *((text_of(config), None) for config in plain)]
    for address, where in [*sources, ("second", repo)]:
        done = adapter.swap(SwapRequest(address, repo=where))
        assert done.digest == digest(pair[1])
        second = second or answer(engine)
        assert answer(engine) == second != first
        assert adapter.swap(SwapRequest(pair[0])).digest == digest(pair[0])
        assert answer(engine) == first


def test_twenty_swaps_under_requests(engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]) -> None:
    """No word of the wrong model, and memory that does not grow."""
    right = {}
    for folder in (pair[1], pair[0]):
        adapter.swap(SwapRequest(folder))
        right[folder] = answer(engine)
    wrong: list[list[int]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            said = answer(engine)
            if said not in right.values():
                wrong.append(said)

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        sizes = []
        for number in range(20):
            folder = pair[(number + 1) % 2]
            done = adapter.swap(SwapRequest(folder))
            assert done.digest == digest(folder)
            assert done.verified > 0
            assert answer(engine) == right[folder]
            sizes.append(memory_of(engine))
    finally:
        over.set()
        for asker in askers:
            asker.join()
    assert not wrong
    assert max(sizes[10:]) < max(sizes[:10]) + (32 << 20), sizes


def memory_of(engine: Engine) -> int:
    top = psutil.Process(engine.process.pid)
    return sum(process.memory_info().rss for process in (top, *top.children(recursive=True)))


@pytest.mark.parametrize("step", ["stage", "pause", "save", "apply", "apply-late", "verify", "reset", "resume"])
def test_a_failure_at_any_step_leaves_the_old_model(
    engine: Engine, adapter: EngineAdapter, pair: tuple[str, str], step: str
) -> None:
    """Under requests, which hear nothing of it."""
    before, info = answer(engine), adapter.info()
    said: list[list[int]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            said.append(answer(engine))

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        with pytest.raises(SwapFailedError, match="old"):
            adapter.swap(SwapRequest(pair[1], fail_at=step))
    finally:
        over.set()
        asker.join()
    after = adapter.info()
    assert (after.digest, after.source, after.paused) == (info.digest, info.source, False)
    assert answer(engine) == before
    assert said
    assert all(words == before for words in said)
    weights = adapter.weights()
    assert weights.digest == digest(pair[0])
    adapter.release()
    with pytest.raises(NotFoundError, match="go back to"):
        adapter.rollback()


def test_a_failure_before_anything_was_loaded_changes_nothing(
    engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]
) -> None:
    before, info = answer(engine), adapter.info()
    with pytest.raises(KvctlError, match="rehearsed failure at check"):
        adapter.swap(SwapRequest(pair[1], fail_at="check"))
    assert adapter.info() == info
    assert answer(engine) == before


def test_what_does_not_fit_is_refused_before_anything_stops(
    engine: Engine, adapter: EngineAdapter, models: Callable[..., Path], tmp_path: Path
) -> None:
    before = adapter.info()
    with pytest.raises(IncompatibleError, match="do not fit"):
        adapter.swap(SwapRequest(str(models(layers=2))))
    with pytest.raises(IncompatibleError, match="another model"):
        adapter.swap(SwapRequest(str(models(seed=1, rope_theta=1234.0))))
    with pytest.raises(NotFoundError):
        adapter.swap(SwapRequest(str(tmp_path / "nothing")))
    assert adapter.info() == before


def test_rollback_goes_back_to_what_was_kept(engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]) -> None:
    before = answer(engine)
    with pytest.raises(NotFoundError, match="go back to"):
        adapter.rollback()
    adapter.swap(SwapRequest(pair[1], keep_previous=True))
    assert answer(engine) != before
    assert adapter.rollback().source == pair[0]
    assert answer(engine) == before
    with pytest.raises(NotFoundError):
        adapter.rollback()


def test_a_held_swap_lets_only_its_test_through(engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]) -> None:
    before = answer(engine)
    held = adapter.swap(SwapRequest(pair[1], hold=True))
    assert held.state == "held"
    said: list[list[int]] = []
    waiting = threading.Thread(target=lambda: said.append(answer(engine)))
    waiting.start()
    after = answer(engine, headers={"X-Kvctl-Pass": held.token})
    assert after != before
    while not adapter.info().details["held"]:
        time.sleep(0.02)
    assert not said
    with pytest.raises(ConflictError):
        adapter.swap(SwapRequest(pair[0]))
    adapter.finish()
    waiting.join()
    assert said == [after]


def test_a_held_swap_that_nobody_finishes_goes_back(
    engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]
) -> None:
    before = answer(engine)
    adapter.swap(SwapRequest(pair[1], hold=True, hold_seconds=0.5))
    assert answer(engine) == before  # waits in line until the engine has given up
    assert adapter.info().source == pair[0]


@pytest.mark.parametrize("how", ["drain", "abort", "keep"])
def test_requests_under_way(engine: Engine, adapter: EngineAdapter, pair: tuple[str, str], how: str) -> None:
    """Drained ones end with the old model's words; kept ones go on; aborted ones end early."""
    long = engine.complete(PROMPT, 600, kvctl=NO_KV).tokens
    said: list[Any] = []

    def ask() -> None:
        said.append(engine.call("/v1/completions", {
            "model": "m", "prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "kv_transfer_params": {"kvctl": NO_KV},
        })["choices"][0])  # fmt: skip

    before = adapter.samples(0).until
    asker = threading.Thread(target=ask)
    asker.start()
    while not adapter.samples(before).samples:
        time.sleep(0.02)
    adapter.swap(SwapRequest(pair[1], in_flight=how))
    asker.join()
    tokens = said[0]["token_ids"]
    if how == "drain":
        assert tokens == long
    elif how == "abort":
        assert said[0]["finish_reason"] == "abort"
        assert tokens == long[: len(tokens)] != long
    else:
        assert len(tokens) == 600
        assert tokens != long


def read_all(adapter: EngineAdapter, slice_bytes: int = 64 << 10) -> tuple[int, dict[str, bytes]]:
    weights = adapter.weights()
    found: dict[str, bytes] = {}
    for tensor in weights.tensors:
        data = bytearray(tensor.nbytes)
        for start in range(0, tensor.nbytes, slice_bytes):
            adapter.read(weights, tensor.name, start, memoryview(data)[start : start + slice_bytes])
        found[tensor.name] = bytes(data)
    adapter.release()
    return weights.generation, found


def test_weights_leave_the_engine_as_they_came(engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]) -> None:
    from safetensors import safe_open

    adapter.swap(SwapRequest(pair[1]))
    _, found = read_all(adapter)
    with safe_open(f"{pair[1]}/model.safetensors", "np") as file:
        assert found.keys() == set(file.keys())
        for name in found:
            assert found[name] == file.get_tensor(name).tobytes(), name


def test_many_tensors_leave_the_engine_in_one_request(adapter: EngineAdapter) -> None:
    assert isinstance(adapter, ReadsParts)
    weights = adapter.weights()
    parts = [Part(tensor.name, 16, tensor.nbytes // 2) for tensor in weights.tensors if tensor.nbytes >= 64]
    data = memoryview(bytearray(sum(part.length for part in parts)))
    adapter.read_parts(weights, parts, data)
    at = 0
    for part in parts:
        alone = memoryview(bytearray(part.length))
        adapter.read(weights, part.name, part.offset, alone)
        assert alone == data[at : at + part.length], part.name
        at += part.length
    with pytest.raises(UsageError, match="bytes, not"):
        adapter.read_parts(weights, [*parts, Part(parts[0].name, 1 << 40, 1)], memoryview(bytearray(len(data) + 1)))
    adapter.release()


def test_a_tied_model_leaves_whole(gemma: Engine, models: Callable[..., Path]) -> None:
    from safetensors import safe_open

    adapter = open_engine(gemma.url, Context())
    _, found = read_all(adapter)
    adapter.close()
    with safe_open(models("gemma", layers=6) / "model.safetensors", "np") as file:
        assert found.keys() == set(file.keys())
        assert all(found[name] == file.get_tensor(name).tobytes() for name in found)


def test_an_update_waits_for_a_reader_and_then_ends_its_generation(
    engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]
) -> None:
    weights = adapter.weights(lease_seconds=60)
    other = open_engine(engine.url, Context())
    swap = threading.Thread(target=lambda: other.swap(SwapRequest(pair[1])))
    swap.start()
    data = memoryview(bytearray(64))
    adapter.read(weights, weights.tensors[0].name, 0, data)
    assert adapter.info().generation == weights.generation
    adapter.release()
    swap.join()
    with pytest.raises(ConflictError, match="generation"):
        adapter.read(weights, weights.tensors[0].name, 0, data)
    other.close()


def test_a_reader_that_is_gone_holds_nothing_up_for_long(
    engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]
) -> None:
    adapter.weights(lease_seconds=0.2)
    assert adapter.swap(SwapRequest(pair[1])).source == pair[1]


def test_inter_token_times_are_told(engine: Engine, adapter: EngineAdapter) -> None:
    start = adapter.samples(0).until
    began = time.time()
    engine.complete(PROMPT, 50, kvctl=NO_KV)
    took = time.time() - began
    samples = [sample for sample in adapter.samples(start).samples if sample.at >= began]
    assert 45 <= len(samples) <= 50
    assert all(sample.gap > 0 for sample in samples)
    assert sum(sample.gap for sample in samples) <= took


def test_reading_slices_leaves_a_stream_alone(engine: Engine, adapter: EngineAdapter) -> None:
    alone = engine.complete(PROMPT, 100, kvctl=NO_KV).tokens
    said: list[list[int]] = []
    asker = threading.Thread(target=lambda: said.append(engine.complete(PROMPT, 100, kvctl=NO_KV).tokens))
    asker.start()
    read_all(adapter)
    asker.join()
    assert said == [alone]


def test_errors_of_a_source_are_its_own(engine: Engine, adapter: EngineAdapter, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(KvctlError) as caught:
        adapter.swap(SwapRequest(str(tmp_path)))
    assert caught.value.exit_code == 7
    with pytest.raises(KvctlError) as caught:
        adapter.swap(SwapRequest(text_of(StoreConfig("node://127.0.0.1:9/none"))))
    assert caught.value.exit_code == 6


def test_kv_of_other_weights_is_not_used(engine: Engine, adapter: EngineAdapter, pair: tuple[str, str]) -> None:
    """The digest of the weights is a part of every key: after a swap nothing is found, after one back it is."""
    prompt = tiny.tokens(300, 6)
    before = engine.info()["kv"]["stores"]
    first = engine.complete(prompt, kvctl={"pull": False, "push": True})
    engine.stored(before + 1)
    adapter.swap(SwapRequest(pair[1]))
    other = engine.complete(prompt, kvctl={"push": False})
    assert other.kvctl["found"] == 0
    assert other.tokens != first.tokens
    adapter.swap(SwapRequest(pair[0]))
    again = engine.complete(prompt, kvctl={"push": False})
    assert again.kvctl["found"] == 288
    adapter.swap(SwapRequest(pair[0]))
    before = engine.info()["kv"]["stores"]
    engine.complete(tiny.tokens(200, 66), 1, kvctl={"pull": False, "push": True})  # over in one step, the first one
    engine.stored(before + 1)
    assert again.tokens == first.tokens
