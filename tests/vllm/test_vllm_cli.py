"""`kvctl swap`, `kv pull --into engine:` and `kv push --from engine:` against a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import tiny
from tests.vllm.engines import Engine

pytestmark = pytest.mark.engine
PROMPT = tiny.tokens(60, 8)
NO_KV = {"push": False, "pull": False}


def kvctl(*argv: str, rc: int = 0) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", "-o", "json", *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == rc, done.stderr
    return json.loads(done.stdout) if rc == 0 else json.loads(done.stderr.strip().splitlines()[-1])["error"]


@pytest.fixture(scope="module")
def other(models: Callable[..., Path]) -> str:
    return str(models(seed=1))


def test_swap_and_rollback(llama: Engine, other: str) -> None:
    target = f"engine:{llama.url}"
    before = llama.complete(PROMPT, kvctl=NO_KV).tokens
    assert kvctl("swap", target, other, "-n")["state"] == "fits"
    assert llama.complete(PROMPT, kvctl=NO_KV).tokens == before
    done = kvctl("swap", target, other, "--keep-previous")
    assert done["state"] == "serving"
    assert done["source"] == other
    assert llama.complete(PROMPT, kvctl=NO_KV).tokens != before
    assert kvctl("swap", target, "--rollback")["source"] == str(llama.model)
    assert llama.complete(PROMPT, kvctl=NO_KV).tokens == before
    assert kvctl("swap", target, "--rollback", rc=4)["code"] == "not_found"


def test_exit_codes_of_swaps(llama: Engine, other: str, models: Callable[..., Path]) -> None:
    target = f"engine:{llama.url}"
    assert kvctl("swap", target, str(models(layers=2)), rc=8)["code"] == "incompatible"
    assert kvctl("swap", target, other, "--fail-at", "verify", rc=11)["code"] == "swap_failed"
    assert kvctl("swap", target, other, "--fail-at", "nonsense", rc=2)["code"] == "usage"
    assert kvctl("swap", "engine:http://127.0.0.1:9", other, rc=6)["code"] == "member_down"


def test_a_smoke_test_decides(llama: Engine, other: str, tmp_path: Path) -> None:
    target = f"engine:{llama.url}"
    before = llama.complete(PROMPT, kvctl=NO_KV).tokens
    smoke = tmp_path / "smoke.py"
    smoke.write_text(f"""
import json, os, sys, urllib.request
body = {{"model": "m", "prompt": {PROMPT}, "max_tokens": 8, "temperature": 0}}
body |= {{"ignore_eos": True, "return_token_ids": True}}
request = urllib.request.Request(
    os.environ["KVCTL_ENGINE_URL"] + "/v1/completions", json.dumps(body).encode(),
    {{"content-type": "application/json", "X-Kvctl-Pass": os.environ["KVCTL_ENGINE_PASS"]}},
)
tokens = json.loads(urllib.request.urlopen(request).read())["choices"][0]["token_ids"]
sys.exit(sys.argv[1] == "no" or tokens == {before})
""")
    command = f"{sys.executable} {smoke}"
    said = kvctl("swap", target, other, "--smoke", f"{command} no", rc=11)
    assert "smoke test failed" in said["what"]
    assert llama.complete(PROMPT, kvctl=NO_KV).tokens == before
    assert kvctl("swap", target, other, "--smoke", f"{command} yes")["state"] == "serving"
    assert llama.complete(PROMPT, kvctl=NO_KV).tokens != before
    kvctl("swap", target, str(llama.model))
    assert llama.complete(PROMPT, kvctl=NO_KV).tokens == before


def test_a_prefix_is_stored_and_an_engine_is_warmed(llama: Engine, node_repo: str, tmp_path: Path) -> None:
    target = f"engine:{llama.url}"
    text = tmp_path / "prompt.txt"
    text.write_text("ka rito munsel dor vi pa lexqua ne shibra oolint ex " * 20)
    stored = kvctl("kv", "push", "--from", target, "bob/system", "--prompt-file", str(text), "--with-tokens")
    assert stored["session"] == "bob/system@1"
    llama.reset()
    warm = kvctl("kv", "pull", "bob/system", "-r", node_repo, "--into", target, "--min-tokens", str(stored["tokens"]))
    assert warm["loaded"] == stored["tokens"]
    assert warm["fetched"] == warm["needed"]
    assert kvctl("kv", "pull", "bob/system", "-r", node_repo, "--into", target, "--min-tokens", "99999", rc=3)[
        "code"
    ] == ("partial")


def test_a_request_of_lately_is_stored_by_its_id(llama: Engine) -> None:
    target = f"engine:{llama.url}"
    before = llama.info()["kv"]["stores"]
    llama.complete(tiny.tokens(300, 9), request_id="lately-one")
    llama.stored(before + 1)
    stored = kvctl("kv", "push", target, "bob/kept", "--request", "lately-one")
    assert (stored["session"], stored["tokens"]) == ("bob/kept@1", 304)
    assert kvctl("kv", "push", target, "bob/kept", "--request", "nobody", rc=4)["code"] == "not_found"
