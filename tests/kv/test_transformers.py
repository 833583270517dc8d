"""Caches of transformers through a repo: another process goes on with the same tokens and the same logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.core.addresses import parse_store
from kvctl.core.context import Context
from kvctl.core.errors import IncompatibleError, IntegrityError, KvctlError, UsageError
from kvctl.kv.identity import Lora
from kvctl.repo.repo import Repo

WHY = "needs torch and transformers: pip install 'kvctl[transformers]'"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

from kvctl_transformers import PulledCache, pull_cache, push_cache, weights_digest  # noqa: E402
from tests.kv import hf_models  # noqa: E402

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
]
ROOT = Path(__file__).resolve().parents[2]
TOKENS = 150  # more than gemma's window, and no whole block
CASES = [("llama", "float32"), ("llama", "bfloat16"), ("gemma3", "float32"), ("deepseek", "float32"),
         ("qwen3_next", "bfloat16")]  # fmt: skip
if hasattr(transformers, "DeepseekV32Config"):  # the newest shape, which older releases lack
    CASES.append(("deepseek_v32", "float32"))


@dataclass
class Pushed:
    """A session in a repo, and what its own process generated after it."""

    folder: str
    repo: str
    session: str
    weights: str
    dtype: str
    ids: list[int]
    tokens: list[int]
    logits: str
    report: dict[str, Any]  # Any: JSON
    size: int


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models on busy cores: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_repo(folder: Path) -> str:
    place = str(folder)
    Repo.init([parse_store(place)], ctx=Context()).close()
    return place


def cache_size(cache: Any) -> int:
    """Bytes of keys, values and states of one sequence, as transformers holds them."""
    size = 0
    for layer in cache.layers:
        found = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        for name in ("conv_states", "recurrent_states"):
            found += list((getattr(layer, name, None) or {}).values())
        size += sum(tensor.numel() * tensor.element_size() for tensor in found if tensor is not None)
    return size


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pushed]:
    base = tmp_path_factory.mktemp("hf")
    repo = make_repo(base / "repo")
    made = {}
    for shape, dtype in CASES:
        folder = str(base / f"{shape}-{dtype}")
        hf_models.make(shape, dtype).save_pretrained(folder)
        model = hf_models.load(folder, dtype)  # as the other process does: where weights lie changes the last bits
        weights = weights_digest(folder)
        ids = hf_models.prompt(TOKENS + 1)
        cache = hf_models.prefill(model, ids)
        session = f"alice/{shape}-{dtype}"
        size = cache_size(cache)
        report = push_cache(model, cache, ids, repo=repo, session=session, weights=weights, folder=folder)
        tokens, logits = hf_models.go_on(model, cache, ids[-1])
        made[shape, dtype] = Pushed(folder, repo, session, weights, dtype, ids, tokens, logits, report.to_json(), size)
    return made


@pytest.fixture(scope="module")
def resumed(pushed: dict[tuple[str, str], Pushed]) -> dict[tuple[str, str], dict[str, Any]]:
    """What a fresh process generated from each session."""
    jobs = [
        {name: getattr(one, name) for name in ("folder", "repo", "session", "weights", "dtype", "ids")}
        for one in pushed.values()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kv.hf_child"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(pushed, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_fresh_process_goes_on_with_the_same_tokens_and_logits(
    case: tuple[str, str], pushed: dict[tuple[str, str], Pushed], resumed: dict[tuple[str, str], dict[str, Any]]
) -> None:
    assert resumed[case]["usable"] == TOKENS
    assert resumed[case]["tokens"] == pushed[case].tokens
    assert resumed[case]["logits"] == pushed[case].logits


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_exactly_what_the_cache_holds_is_moved(
    case: tuple[str, str], pushed: dict[tuple[str, str], Pushed], resumed: dict[tuple[str, str], dict[str, Any]]
) -> None:
    report = resumed[case]["report"]
    assert report["bytes"] == pushed[case].size
    assert report["verified"]["state"] != "none"


def push_llama(folder: Path, tokens: int = 64, **options: Any) -> tuple[Any, list[int], str]:
    """(model, ids, repo) of a session bob/chat of the weights 'ab..'."""
    model = hf_models.make("llama")
    ids = hf_models.prompt(tokens + 1)
    repo = make_repo(folder)
    cache = hf_models.prefill(model, ids)
    push_cache(model, cache, ids, repo=repo, session="bob/chat", weights="ab" * 32, **options)
    return model, ids, repo


def pull(model: Any, ids: list[int], repo: str, **options: Any) -> PulledCache:
    return pull_cache(model, ids, repo=repo, session="bob/chat", **{"weights": "ab" * 32, **options})


def test_other_weights_are_refused_by_name_of_the_field(tmp_path: Path) -> None:
    model, ids, repo = push_llama(tmp_path)
    with pytest.raises(IncompatibleError, match="weights") as refused:
        pull(model, ids, repo, weights="cd" * 32)
    assert "abab" in str(refused.value)
    assert "cdcd" in str(refused.value)


def test_an_adapter_is_part_of_the_meaning(tmp_path: Path) -> None:
    model, ids, repo = push_llama(tmp_path, lora=[Lora("11" * 32, "2")])
    with pytest.raises(IncompatibleError, match="lora"):
        pull(model, ids, repo)
    assert pull(model, ids, repo, lora=[Lora("11" * 32, "2")]).tokens == 64


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    model, ids, repo = push_llama(tmp_path)
    with pytest.raises(IncompatibleError, match="dtype is BF16 here and F32 there"):
        pull(model.to(torch.bfloat16), ids, repo)


def test_a_longer_transcript_gets_the_prefix_and_the_rest_is_computed(tmp_path: Path) -> None:
    model, ids, repo = push_llama(tmp_path)
    longer = ids + hf_models.prompt(20, seed=9)
    pulled = pull(model, longer, repo)
    assert pulled.tokens == 64
    with torch.no_grad():
        rest = torch.tensor([longer[pulled.tokens :]])
        ours = model(rest, past_key_values=pulled.cache, use_cache=True).logits[0, -1]
        all_at_once = model(torch.tensor([longer])).logits[0, -1]
    assert torch.allclose(ours, all_at_once, atol=1e-5)


def test_another_transcript_gets_what_is_common(tmp_path: Path) -> None:
    model, ids, repo = push_llama(tmp_path)
    other = [*ids[:40], *hf_models.prompt(30, seed=3)]
    pulled = pull(model, other, repo)
    assert pulled.tokens == 32  # whole blocks
    assert pulled.cache.get_seq_length() == 32


def test_nothing_in_common_gives_an_empty_cache(tmp_path: Path) -> None:
    model, _, repo = push_llama(tmp_path)
    pulled = pull(model, hf_models.prompt(30, seed=3), repo)
    assert pulled.tokens == 0
    assert pulled.cache.get_seq_length() == 0


def test_without_a_transcript_all_that_is_stored_comes(tmp_path: Path) -> None:
    model, _, repo = push_llama(tmp_path)
    assert pull_cache(model, repo=repo, session="bob/chat", weights="ab" * 32).tokens == 64


def test_damage_shortens_the_prefix_and_strict_refuses(tmp_path: Path) -> None:
    model, ids, repo = push_llama(tmp_path, tokens=96, pack_bytes=16 * 3 * 2 * 2 * 16 * 4)  # one block a pack
    chunks = sorted((tmp_path / "chunks").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
    assert len(chunks) == 6
    victim = chunks[3]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.chmod(0o600)
    victim.write_bytes(data)
    pulled = pull(model, ids, repo)
    assert pulled.problem is not None
    assert pulled.tokens in {0, 16, 32, 48, 64, 80}
    assert pulled.cache.get_seq_length() == pulled.tokens
    last = ids[pulled.tokens]
    again = hf_models.prefill(model, ids[: pulled.tokens + 1]) if pulled.tokens else None
    if again is not None:
        assert hf_models.go_on(model, pulled.cache, last)[0] == hf_models.go_on(model, again, last)[0]
    with pytest.raises(IntegrityError):
        pull(model, ids, repo, strict=True)


def test_the_raw_salt_is_nowhere(tmp_path: Path) -> None:
    model, ids, repo = push_llama(tmp_path, salt=b"pepper-and-salt", with_tokens=True)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"pepper-and-salt" not in path.read_bytes(), path
    with pytest.raises(IncompatibleError, match="salt"):
        pull(model, ids, repo)
    assert pull(model, ids, repo, salt=b"pepper-and-salt").tokens == 64


def test_the_second_push_writes_no_pack_again(tmp_path: Path) -> None:
    model, ids, repo = push_llama(tmp_path)
    longer = [*ids, *hf_models.prompt(16, seed=4)]
    report = push_cache(
        model, hf_models.prefill(model, longer), longer, repo=repo, session="bob/chat", weights="ab" * 32
    )
    assert report.extra["generation"] == 2
    assert report.extra["blocks_shared"] == 4


def batch_of_two(model: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7], [8, 9, 10]]), past_key_values=cache, use_cache=True)
    return cache


def static(model: Any) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache, use_cache=True)
    return cache


def empty(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (batch_of_two, UsageError, "batch of 2"),
        (static, IncompatibleError, "Static"),
        (empty, UsageError, "no one length"),
    ],
    ids=["batch", "static", "empty"],
)
def test_what_is_no_session_is_refused(make: Any, kind: type[KvctlError], says: str, tmp_path: Path) -> None:
    model = hf_models.make("llama")
    with pytest.raises(kind, match=says):
        push_cache(model, make(model), [5, 6, 7], repo=str(tmp_path), session="bob/chat", weights="ab" * 32)


def test_fewer_tokens_than_the_cache_has_seen_are_refused(tmp_path: Path) -> None:
    model = hf_models.make("llama")
    cache = hf_models.prefill(model, hf_models.prompt(10))
    with pytest.raises(UsageError, match="has seen 9 tokens"):
        push_cache(model, cache, [1, 2, 3], repo=str(tmp_path), session="bob/chat", weights="ab" * 32)


def test_a_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    cache = hf_models.prefill(hf_models.make("llama"), hf_models.prompt(10))
    with pytest.raises(IncompatibleError, match="heads"):
        push_cache(
            hf_models.make("deepseek"), cache, hf_models.prompt(10), repo=str(tmp_path), session="bob/chat",
            weights="ab" * 32,
        )  # fmt: skip
