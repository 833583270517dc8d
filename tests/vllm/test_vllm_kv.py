"""KV of a real engine: stored at the end of a request, restored in the same engine, after a restart, in another one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvctl.core.context import Context
from kvctl.core.errors import NotFoundError
from kvctl.kv.inspecting import InspectRequest, inspect_session
from kvctl.kv.names import parse_session
from kvctl.kv.pull import PullSession, pull_session
from kvctl.kv.reading import StoredSession
from kvctl.kv.seams import MemorySink
from kvctl.repo.repo import Repo
from kvctl.testing.nodes import NodeProcess
from tests.vllm import tiny
from tests.vllm.conftest import apart, eventually, kv_files, repo_over, stores_of
from tests.vllm.engines import Engine

pytestmark = pytest.mark.engine
OWN, COLD = 1e-5, 1e-4  # log-probabilities apart: from the engine's own prefix hit, and from a cold run


def restored(engine: Engine, tokens: int, session: str) -> tuple[Any, Any, Any]:
    """(cold, own prefix hit, restored) of one prompt, which is stored as it ends."""
    prompt = tiny.tokens(tokens, tokens)
    before = engine.info()["kv"]["stores"]
    cold = engine.complete(prompt, kvctl={"pull": False, "push": False})
    own = engine.complete(prompt, kvctl={"push": False, "pull": False})
    engine.complete(prompt, 1, kvctl={"session": session, "pull": False})
    engine.stored(before + 1)
    engine.reset()
    again = engine.complete(prompt, kvctl={"session": session, "push": False})
    return cold, own, again


@pytest.mark.parametrize("tokens", [130, 700, 1500])
def test_a_llama_goes_on_from_the_store_as_if_nothing_had_happened(llama: Engine, tokens: int) -> None:
    cold, own, again = restored(llama, tokens, f"alice/llama-{tokens}")
    assert (cold.cached, own.cached) == (0, (tokens - 1) // 128 * 128)
    assert tokens - 16 <= again.cached <= tokens
    assert cold.tokens == own.tokens == again.tokens
    assert apart(again.logprobs, own.logprobs) <= OWN
    assert apart(again.logprobs, cold.logprobs) <= COLD


@pytest.mark.parametrize("tokens", [130, 700, 1500])
def test_a_gemma_with_windows_goes_on_from_the_store(gemma: Engine, tokens: int) -> None:
    """Windows of 192 tokens: shorter prompts lie inside, longer ones have blocks that are gone."""
    cold, own, again = restored(gemma, tokens, f"alice/gemma-{tokens}")
    assert tokens - 16 <= again.cached < tokens
    assert cold.tokens == own.tokens == again.tokens
    assert apart(again.logprobs, own.logprobs) <= OWN
    assert apart(again.logprobs, cold.logprobs) <= COLD


def test_a_gemma_goes_on_with_the_next_turn(gemma: Engine) -> None:
    """Its windows are stored as they are at the end of a turn; the next one begins there."""
    first = tiny.tokens(600, 40)
    before = gemma.info()["kv"]["stores"]
    answer = gemma.complete(first, 12)
    gemma.stored(before + 1)
    gemma.reset()
    turn = [*first, *answer.tokens, *tiny.tokens(40, 39)]
    found = gemma.complete(turn, kvctl={"push": False})
    assert found.cached == 608
    gemma.reset()
    cold = gemma.complete(turn, kvctl={"push": False, "pull": False})
    assert cold.cached == 0
    assert found.tokens == cold.tokens
    assert apart(found.logprobs, cold.logprobs) <= COLD


def test_the_next_turn_finds_its_prefix_without_a_name(llama: Engine) -> None:
    first = tiny.tokens(500, 41)
    before = llama.info()["kv"]
    answer = llama.complete(first)
    llama.stored(before["stores"] + 1)
    llama.reset()
    turn = [*first, *answer.tokens, *tiny.tokens(30, 42)]
    found = llama.complete(turn, kvctl={"push": False})
    assert found.cached == 496  # 507 tokens of KV were there, 16 at a time
    llama.reset()
    assert llama.complete(turn, kvctl={"pull": False, "push": False}).tokens == found.tokens


def test_what_the_engine_has_itself_is_not_fetched(llama: Engine) -> None:
    prompt = tiny.tokens(1024, 43)
    before = llama.info()["kv"]
    llama.complete(prompt)
    llama.stored(before["stores"] + 1)
    llama.reset()
    llama.complete(prompt[:600], kvctl={"push": False, "pull": False})  # 512 tokens are in whole blocks of the engine
    before = llama.info()["kv"]
    found = llama.complete(prompt, kvctl={"push": False})
    after = llama.info()["kv"]
    assert found.kvctl == {"here": 512, "found": 512, "stores": 0}
    assert after["tokens"] - before["tokens"] == 512
    assert after["needed"] - before["needed"] == 512 * 4 * 2 * 2 * 32 * 4  # tokens, layers, K and V, heads, dim, F32


def test_a_whole_restore_fetches_exactly_what_it_needs(llama: Engine) -> None:
    prompt = tiny.tokens(1024, 44)
    before = llama.info()["kv"]
    llama.complete(prompt, 1)
    llama.stored(before["stores"] + 1)
    llama.reset()
    before = llama.info()["kv"]
    assert llama.complete(prompt, kvctl={"push": False}).kvctl["found"] == 1024
    after = llama.info()["kv"]
    assert after["fetched"] - before["fetched"] == after["needed"] - before["needed"] == 1024 * 2048


def test_a_salt_keeps_tenants_apart(llama: Engine) -> None:
    prompt = tiny.tokens(300, 45)
    before = llama.info()["kv"]["stores"]
    llama.complete(prompt, cache_salt="one")
    llama.stored(before + 1)
    llama.reset()
    assert llama.complete(prompt, cache_salt="two", kvctl={"push": False}).kvctl["found"] == 0
    assert llama.complete(prompt, kvctl={"push": False}).kvctl["found"] == 0
    llama.reset()
    assert llama.complete(prompt, cache_salt="one", kvctl={"push": False}).kvctl["found"] == 288


def test_a_request_may_decline_both_ways(llama: Engine) -> None:
    prompt = tiny.tokens(300, 46)
    before = llama.info()["kv"]
    llama.complete(prompt, kvctl={"push": False})
    assert llama.complete(prompt, kvctl={"push": False}).kvctl["found"] == 0
    assert llama.info()["kv"]["stores"] == before["stores"]


def test_many_restore_while_others_decode(llama: Engine) -> None:
    prompts = [tiny.tokens(400 + 10 * number, 50 + number) for number in range(4)]
    before = llama.info()["kv"]["stores"]
    cold = [llama.complete(prompt) for prompt in prompts]
    llama.stored(before + 4)
    stream = llama.complete(tiny.tokens(20, 60), 200, kvctl={"push": False})
    llama.reset()
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        if number < 0:
            answers[number] = llama.complete(tiny.tokens(20, 60), 200, kvctl={"push": False})
        else:
            answers[number] = llama.complete(prompts[number], kvctl={"push": False})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(-1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[-1].tokens == stream.tokens
    for number in range(4):
        assert answers[number].tokens == cold[number].tokens
        assert answers[number].kvctl["found"] >= 384


def test_the_bytes_are_those_of_transformers(llama: Engine, node_repo: str, models: Callable[..., Path]) -> None:
    """What the CPU backend keeps transposed is canonical in the store: as transformers' own cache has it."""
    same_as_transformers(llama, node_repo, models(), 300, "alice/canonical")


def test_windows_are_those_of_transformers(gemma: Engine, s3_repo: str, models: Callable[..., Path]) -> None:
    same_as_transformers(gemma, s3_repo, models("gemma", layers=6), 500, "alice/canonical")


def same_as_transformers(engine: Engine, repo: str, folder: Path, count: int, session: str) -> None:
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        prompt = tiny.tokens(count, 61)
        before = engine.info()["kv"]["stores"]
        engine.complete(prompt, 1, kvctl={"session": session})
        engine.stored(before + 1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([prompt]), past_key_values=cache, use_cache=True)
    sink = MemorySink()
    pull_session(PullSession(stores_of(repo), session, sink), Context())
    assert sink.descriptor is not None
    assert sink.layout is not None
    compared = 0
    for slot in sink.layout.slots:
        kv, layer = sink.layers[slot.group, slot.layer], cache.layers[slot.layer]
        held = layer.keys.shape[2]
        for mine, theirs in ((kv.k, layer.keys), (kv.v, layer.values)):
            first = max(slot.start, count - held)  # both hold it from there on
            ours = np.frombuffer(mine, dtype="<f4").reshape(slot.heads, slot.end - slot.start, -1)
            ours = ours[:, first - slot.start :]
            reference = theirs[0].numpy()[:, first - (count - held) : slot.end - (count - held)]
            assert ours.shape[1] > 100
            assert ours.shape == reference.shape
            assert float(np.abs(ours - reference).max()) < 1e-4
            compared += 1
    sink.close()
    assert compared == 2 * sum(len(group.layers) for group in sink.descriptor.groups)


def test_the_session_tells_who_made_it(llama: Engine, node_repo: str) -> None:
    before = llama.info()["kv"]["stores"]
    llama.complete(tiny.tokens(200, 62), kvctl={"session": "alice/told", "with_tokens": True})
    llama.stored(before + 1)
    found = inspect_session(InspectRequest(stores_of(node_repo), "alice/told"), Context())
    assert found.descriptor.weights == llama.info()["digest"]
    assert found.descriptor.dtype == "F32"
    assert found.to_json()["producer"]["engine"] == "vllm"


def test_restarted_and_elsewhere_any_engine_picks_the_session_up(
    models: Callable[..., Path], launch: Callable[..., Engine], tmp_path: Path
) -> None:
    """Prefill in one engine, which ends; decode in another, which loads layer by layer. Then the store is damaged, and
    at last gone for a while.
    """
    node = NodeProcess.start(str(tmp_path), keys=False)
    try:
        _handed_over(models(), launch, node)
    finally:
        node.close()


def _handed_over(model: Path, launch: Callable[..., Engine], node: NodeProcess) -> None:
    repo = repo_over([node.store("kv")])
    prompt = tiny.tokens(900, 63)
    prefill = launch(model, {"repo": repo, "push": "ask", "min_tokens": 16})
    cold = prefill.complete(prompt)
    assert prefill.info()["kv"]["stores"] == 0  # nobody asked
    prefill.complete(prompt, 1, kvctl={"session": "alice/handed", "push": True})
    prefill.stored(1)
    prefill.stop(kill=True)
    decode = launch(model, {"repo": repo, "mode": "layers", "push": "never", "min_tokens": 16, "rest": 0.5})
    found = decode.complete(prompt, kvctl={"session": "alice/handed"})
    assert found.cached >= 880
    assert found.tokens == cold.tokens
    assert apart(found.logprobs, cold.logprobs) <= COLD
    damage(decode, node, prompt, cold)
    unreachable(decode, node, prompt, cold)


def damage(engine: Engine, node: NodeProcess, prompt: list[int], cold: Any) -> None:
    """A torn, a missing and a foreign pack: that part is computed, the output is the same."""
    (pack,) = sorted(kv_files(node), key=lambda path: path.stat().st_size)[-1:]
    whole = pack.read_bytes()
    torn = bytearray(whole)
    torn[len(torn) // 2] ^= 1
    for name, data in (
        ("torn", bytes(torn)),
        ("short", whole[: len(whole) // 2]),
        ("foreign", whole[::-1]),
        ("gone", None),
    ):
        before = engine.info()["kv"]
        if data is None:
            pack.unlink()
        else:
            pack.chmod(0o644)
            pack.write_bytes(data)
        engine.reset()
        found = engine.complete(prompt, kvctl={"session": "alice/handed"})
        assert found.tokens == cold.tokens, name
        assert apart(found.logprobs, cold.logprobs) <= COLD, name
        assert engine.info()["kv"]["tokens"] - before["tokens"] < 880, name
    pack.write_bytes(whole)
    engine.reset()
    eventually("the repaired pack is used", lambda: _reload(engine, prompt) >= 880)


def _reload(engine: Engine, prompt: list[int]) -> int:
    engine.reset()
    return int(engine.complete(prompt, kvctl={"session": "alice/handed"}).kvctl["found"])


def unreachable(engine: Engine, node: NodeProcess, prompt: list[int], cold: Any) -> None:
    """With the store gone the engine computes, says so once, and finds back by itself."""
    node.close()
    for _ in range(4):
        engine.reset()
        assert engine.complete(prompt).tokens == cold.tokens
    assert engine.said("does not answer (") == 1
    again = NodeProcess.start(node.folder, keys=False, port=node.port)
    try:
        eventually("the engine finds back", lambda: _reload(engine, prompt) >= 880)
        assert engine.said("answers again") == 1
    finally:
        again.close()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("how", ["torn", "missing", "foreign"])
def test_damage_is_computed_around(request: pytest.FixtureRequest, kind: str, how: str) -> None:
    """Of loads beside the steps: block by block where blocks have one group, else the whole load."""
    engine: Engine = request.getfixturevalue(kind)
    repo: str = request.getfixturevalue({"llama": "node_repo", "gemma": "s3_repo"}[kind])
    number = ["torn", "missing", "foreign"].index(how)
    prompt, session = tiny.tokens(700, 70 + number), f"alice/{how}"
    before = engine.info()["kv"]["stores"]
    cold = engine.complete(prompt, kvctl={"push": False, "pull": False})
    engine.complete(prompt, 1, kvctl={"session": session, "pull": False})
    engine.stored(before + 1)
    spoil(repo, session, how)
    engine.reset()
    before = engine.info()["kv"]
    found = engine.complete(prompt, kvctl={"session": session, "push": False})
    assert found.tokens == cold.tokens
    assert apart(found.logprobs, cold.logprobs) <= COLD
    after = engine.info()["kv"]
    assert after["tokens"] == before["tokens"]
    assert after["lost"] > before["lost"]
    assert not after["resting"]


def spoil(repo: str, session: str, how: str) -> None:
    """Every pack of a session: one bit flipped, gone, or the bytes of something else."""
    stores = stores_of(repo)
    with (
        Repo.open(stores, Context()) as opened,
        StoredSession.open(opened, parse_session(session), Context()) as stored,
    ):
        for ref in {stored.ref(row) for row in stored.manifest.packs}:
            for member in opened.locate(ref.digest):
                try:
                    data = bytearray(member.store.get(ref.key))
                except NotFoundError:
                    continue
                if how == "missing":
                    member.store.delete([ref.key])
                    continue
                data[len(data) // 2] ^= 1
                member.store.put(ref.key, bytes(data) if how == "torn" else bytes(data[::-1]))


def test_a_node_that_dies_is_computed_around(llama: Engine, nodes: list[NodeProcess]) -> None:
    """One of the repo's two members freezes, without replicas: half of everything is out of reach."""
    prompt = tiny.tokens(700, 64)
    before = llama.info()["kv"]["stores"]
    cold = llama.complete(prompt)
    llama.stored(before + 1)
    nodes[0].stop()
    try:
        llama.reset()
        assert llama.complete(prompt, kvctl={"push": False}).tokens == cold.tokens
    finally:
        nodes[0].resume()

    def back() -> bool:
        llama.reset()
        return bool(llama.complete(prompt, kvctl={"push": False}).kvctl["found"])

    eventually("the engine uses the store again", back)
