"""Swaps that break: a smoke test that hangs, a kvctl that is killed, weights that change while they are read, a way
back that fails too. What the user is told, what serves then, and what gets the engine going again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest

from kvctl.core.context import Context
from kvctl.core.errors import ConflictError, KvctlError, NotFoundError, NothingServesError
from kvctl.engines.api import EngineAdapter, SwapRequest
from kvctl.engines.http import EngineClient
from kvctl.engines.registry import open_engine
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from tests.vllm import tiny
from tests.vllm.conftest import eventually, text_of
from tests.vllm.engines import Engine

pytestmark = pytest.mark.engine
PROMPT = tiny.tokens(60, 12)
NO_KV = {"push": False, "pull": False}
LONG = 600  # tokens of an answer that is under way for a while


@dataclass
class World:
    """The shared engine, and `other` weights for it; `old` and `new`: what it says with its own and with those."""

    engine: Engine
    adapter: EngineAdapter
    other: str
    old: list[int]
    new: list[int]

    @property
    def target(self) -> str:
        return f"engine:{self.engine.url}"

    def answer(self, count: int = 8) -> list[int]:
        return self.engine.complete(PROMPT, count, kvctl=NO_KV).tokens

    def health(self) -> int:
        return status(f"{self.engine.url}/health")

    def broken(self) -> str:
        return str(self.adapter.info().details["broken"])

    @contextmanager
    def waiting(self) -> Iterator[list[list[int]]]:
        """A request that waits in line; answered at the end, into what this gives."""
        said: list[list[int]] = []
        asker = threading.Thread(target=lambda: said.append(self.answer()))
        asker.start()
        eventually("a request waits in line", lambda: self.adapter.info().details["held"] == 1)
        yield said
        asker.join()

    def swap(self, *more: str, rc: int = 0) -> Any:  # Any: JSON
        return self.kvctl(self.other, *more, rc=rc)

    def rollback(self) -> Any:  # Any: JSON
        return self.kvctl("--rollback")

    def kvctl(self, *argv: str, rc: int = 0) -> Any:  # Any: JSON
        return ended(self.begin(*argv), rc)

    def begin(self, *argv: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvctl", "-o", "json", "swap", self.target, *argv]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], rc: int) -> Any:  # Any: JSON
    """The document of a kvctl that ends with `rc`, or its error."""
    out, err = process.communicate()
    assert process.returncode == rc, err
    return json.loads(out) if rc == 0 else json.loads(err.strip().splitlines()[-1])["error"]


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()  # without waiting for its end: what it started may have it


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def words(llama: Engine, models: Callable[..., Path]) -> tuple[list[int], list[int]]:
    """What the engine says with its own weights, and with the others."""
    adapter = open_engine(llama.url, Context())
    said = []
    for folder in (models(), models(seed=1)):
        adapter.swap(SwapRequest(str(folder)))
        said.append(llama.complete(PROMPT, kvctl=NO_KV).tokens)
    adapter.swap(SwapRequest(str(models())))
    adapter.close()
    assert said[0] != said[1]
    return said[0], said[1]


@pytest.fixture
def world(llama: Engine, models: Callable[..., Path], words: tuple[list[int], list[int]]) -> Iterator[World]:
    adapter = open_engine(llama.url, Context())
    found = World(llama, adapter, str(models(seed=1)), *words)
    try:
        yield found
        assert found.health() == 200
        assert not found.broken()
    finally:
        with suppress(NotFoundError):
            adapter.rollback()
        if adapter.info().source != str(models()):
            adapter.swap(SwapRequest(str(models())))
        adapter.close()


@dataclass
class Hanging:
    """A smoke test that never ends, nor does what it starts. `command` of it."""

    folder: Path

    @property
    def command(self) -> str:
        script = self.folder / "hang.sh"
        script.write_text(
            f'sleep 86400 &\necho "$$ $!" >"{self.folder}/new"\nmv "{self.folder}/new" "{self.started}"\nwait\n'
        )
        return f"sh {script}"

    @property
    def started(self) -> Path:
        return self.folder / "started"

    def wait(self) -> None:
        eventually("the smoke test runs", self.started.exists)

    def ends(self) -> None:
        """It and its child do, if it came so far as to start."""
        pids = self.started.read_text().split() if self.started.exists() else []
        eventually(f"processes {pids} have ended", lambda: all(over(int(pid)) for pid in pids))

    def end(self) -> None:
        os.killpg(int(self.started.read_text().split()[0]), signal.SIGKILL)


def over(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def hanging(tmp_path: Path) -> Hanging:
    return Hanging(tmp_path)


# -- smoke tests, and who waits for them -------------------------------------------------------------------------


def test_a_smoke_test_that_hangs_is_ended_and_the_old_weights_serve(world: World, hanging: Hanging) -> None:
    error = world.swap("--smoke", hanging.command, "--smoke-timeout", "1s", rc=11)
    assert error["what"] == "the smoke test failed, and the old weights serve"
    assert error["cause"] == f"{hanging.command} took longer than 1 s"
    hanging.ends()
    assert world.answer() == world.old
    assert world.adapter.info().source == str(world.engine.model)


@pytest.mark.parametrize(("signum", "rc"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_kvctl_that_is_stopped_ends_its_smoke_test_and_goes_back(
    world: World, hanging: Hanging, signum: int, rc: int
) -> None:
    process = world.begin(world.other, "--smoke", hanging.command)
    hanging.wait()
    process.send_signal(signum)
    error = ended(process, rc)
    assert "the old weights serve" in error["what"]
    hanging.ends()
    assert world.answer() == world.old


def killed(world: World, hanging: Hanging, *more: str) -> None:
    """A kvctl that holds a swap for its smoke test is, which goes on."""
    process = world.begin(world.other, "--smoke", hanging.command, *more)
    hanging.wait()
    kill(process)


def test_what_a_killed_kvctl_holds_anybody_rolls_back(world: World, hanging: Hanging) -> None:
    killed(world, hanging)
    try:
        with world.waiting() as said:
            error = world.swap(rc=6)
            assert error["code"] == "conflict"
            assert "waits for its smoke test" in error["what"]
            assert "--rollback" in error["hint"]
            assert world.health() == 200
            assert not said
            assert world.rollback()["source"] == str(world.engine.model)
        assert said == [world.old]
    finally:
        hanging.end()


@pytest.mark.slow
def test_what_a_killed_kvctl_holds_goes_back_by_itself(world: World, hanging: Hanging) -> None:
    before = world.engine.said("nobody finished the held swap")
    killed(world, hanging, "--smoke-timeout", "1s")  # and 30 s more
    try:
        assert world.answer() == world.old  # waits in line until then
        assert world.engine.said("nobody finished the held swap") == before + 1
        assert world.adapter.info().source == str(world.engine.model)
    finally:
        hanging.end()


def test_a_swap_that_was_rolled_back_during_its_smoke_test_has_failed(world: World) -> None:
    rollback = f"{sys.executable} -m kvctl swap {world.target} --rollback"
    error = world.swap("--smoke", rollback, rc=11)
    assert f"holds the swap no longer: {world.engine.model} serves" in error["what"]
    assert world.answer() == world.old
    error = world.swap("--smoke", f"sh -c '{rollback} && exit 3'", rc=11)
    assert error["what"] == "the smoke test failed, and the old weights serve"
    assert world.answer() == world.old


def test_what_cannot_be_meant_is_refused_before_anything_happens(world: World) -> None:
    before = world.adapter.info()
    assert world.swap("--smoke", "sh -c 'exit", rc=2)["code"] == "usage"
    assert world.swap("--smoke", "", rc=2)["code"] == "usage"
    assert world.kvctl("--rollback", "--fail-at", "back", rc=2)["code"] == "usage"
    assert world.adapter.info() == before


# -- nothing serves ----------------------------------------------------------------------------------------------


def breaks(world: World) -> None:
    error = world.swap("--fail-at", "back", rc=12)
    assert error["code"] == "nothing_serves"
    assert "nothing serves" in error["what"]
    assert "--rollback" in error["hint"]


@pytest.mark.parametrize("how", ["rollback", "another swap", "a swap that fails", "after more failures"])
def test_when_nothing_serves_it_is_told_and_can_be_mended(world: World, how: str, tmp_path: Path) -> None:
    """Half of the new weights are in the engine: nobody hears a word of them, and nothing goes back to them."""
    weights = world.adapter.weights(lease_seconds=0)
    breaks(world)
    with pytest.raises(ConflictError, match="generation"):
        world.adapter.read(weights, weights.tensors[0].name, 0, memoryview(bytearray(4)))
    with pytest.raises(NothingServesError, match="to read"):
        world.adapter.weights()
    info = world.adapter.info()
    assert (info.digest, info.paused, world.health()) == (None, True, 503)
    assert world.broken().startswith("nothing serves: the swap failed (rehearsed failure at apply; then ")
    assert status(f"{world.engine.url}/v1/models") == 200
    with world.waiting() as said:
        if how == "rollback":
            assert world.rollback()["source"] == str(world.engine.model)
        elif how == "another swap":
            assert world.swap()["source"] == world.other
        elif how == "a swap that fails":
            assert world.swap("--fail-at", "verify", rc=11)["code"] == "swap_failed"
        else:
            breaks(world)
            assert "nothing serves, as before" in world.swap("--fail-at", "stage", rc=12)["what"]
            (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
            world.kvctl(str(tmp_path), rc=7)
            world.swap("-n")
            assert (world.health(), said) == (503, [])
            world.rollback()
    assert said == [world.new if how == "another swap" else world.old]
    assert (world.health(), world.broken(), world.adapter.info().paused) == (200, "", False)
    with pytest.raises(NotFoundError, match="go back to"):
        world.adapter.rollback()


def test_requests_that_were_kept_wait_too_and_end_with_the_old_words(world: World) -> None:
    wanted = world.answer(LONG)
    said: list[list[int]] = []
    asker = threading.Thread(target=lambda: said.append(world.answer(LONG)))
    asker.start()
    eventually("the stream runs", lambda: bool(world.adapter.samples(time.time() - 0.3).samples))
    with pytest.raises(NothingServesError):
        world.adapter.swap(SwapRequest(world.other, in_flight="keep", fail_at="back"))
    assert not said
    world.rollback()
    asker.join()
    assert said == [wanted]


def test_a_rollback_that_fails_can_be_tried_again(world: World) -> None:
    world.swap("--keep-previous")
    client = EngineClient(world.engine.url)
    with pytest.raises(NothingServesError, match="the rollback failed"):
        client.post("/v1/kvctl/swap/rollback", {"fail_at": "back"})
    client.close()
    assert world.health() == 503
    with world.waiting() as said:
        assert world.rollback()["source"] == str(world.engine.model)
    assert said == [world.old]


def test_a_rollback_whose_kvctl_is_killed_goes_on(world: World) -> None:
    """Killed while the engine waits for somebody who reads the weights."""
    world.swap("--keep-previous")
    weights = world.adapter.weights(lease_seconds=600)
    process = world.begin("--rollback")

    def under_way() -> bool:
        try:
            world.adapter.swap(SwapRequest(world.other, check_only=True))
        except ConflictError:
            return True
        return False

    eventually("the rollback is under way", under_way)
    kill(process)
    assert world.adapter.info().generation == weights.generation
    world.adapter.release()
    eventually("it goes on", lambda: world.adapter.info().generation == weights.generation + 1)
    assert world.answer() == world.old
    with pytest.raises(NotFoundError, match="go back to"):
        world.adapter.rollback()


# -- weights that change while they are read -----------------------------------------------------------------------


@pytest.mark.parametrize("conditions", [True, False])
def test_weights_that_are_replaced_while_they_are_staged(world: World, conditions: bool) -> None:
    """`conditions` False: a store that ignores If-Match."""
    with FaultyS3(conditional_get=conditions) as store:
        store.put("m/model.safetensors", (Path(world.other) / "model.safetensors").read_bytes())
        config = text_of(store.store("m"))
        world.adapter.swap(SwapRequest(config))
        reads = len(store.requests("GET", "m/model.safetensors"))
        world.adapter.swap(SwapRequest(str(world.engine.model)))
        store.clear()
        fault = store.add(Fault("replace", key="m/model.safetensors", skip=reads - 1, times=1))
        before = world.adapter.info()
        with pytest.raises(KvctlError, match="could not be loaded, and the old ones serve") as caught:
            world.adapter.swap(SwapRequest(config))
        assert caught.value.exit_code == 11
        assert caught.value.details["code"] == "changed"
        assert "changed while loading" in str(caught.value.cause)
        assert (fault.fired, len(store.requests("GET", "m/model.safetensors"))) == (1, reads)
    assert world.adapter.info() == before
    assert world.answer() == world.old
