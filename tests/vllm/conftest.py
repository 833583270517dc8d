"""Fixtures of the tests with a real vLLM: tiny models, and engines that many tests share. Without vLLM (the main
environment) they are skipped; `scripts/engine-env` makes one that has it, and `scripts/test` runs them there.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvctl.cli.demo_models import fetch_smollm2
from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.repo.repo import Repo
from kvctl.testing.nodes import NodeProcess
from kvctl.testing.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedFS
from kvctl_vllm.plugin import version
from tests.vllm import tiny
from tests.vllm.engines import Engine

HERE = Path(__file__).parent
_NUMBERS = itertools.count()
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if version():  # asked of the installed packages: this very folder can be imported as `vllm`
        return
    missing = pytest.mark.skip(reason="vLLM is not installed here: run it by `scripts/test`, or see scripts/engine-env")
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("engine"):
            item.add_marker(missing)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def models(place: Path) -> Callable[..., Path]:
    """A tiny model's folder, made when first asked for: models("llama", seed=1)."""

    def make(kind: str = "llama", seed: int = 0, **more: Any) -> Path:
        folder = place / f"{kind}-{seed}" / ("-".join(f"{name}-{value}" for name, value in more.items()) or "plain")
        return folder if folder.exists() else tiny.make(folder, kind, seed=seed, **more)

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in BF16, from the user's cache; the first time it is fetched and made, which takes a while.
    Of the session's scope, as each test has a home of its own.
    """
    return Path(fetch_smollm2(print))


@pytest.fixture(scope="session")
def nodes(place: Path) -> Iterator[Sequence[NodeProcess]]:
    """Two storage nodes."""
    started = []
    try:
        for number in range(2):
            folder = place / f"node-{number}"
            folder.mkdir()
            started.append(NodeProcess.start(str(folder), keys=False))
        yield started
    finally:
        for node in started:
            node.close()


def repo_over(stores: Sequence[StoreConfig]) -> str:
    """A fresh repo over these stores; the text that names it in settings and on command lines."""
    Repo.init(list(stores), ctx=Context()).close()
    return ",".join(text_of(store) for store in stores)


def text_of(store: StoreConfig) -> str:
    from kvctl_vllm.places import url_of

    return url_of(store)


def stores_of(repo: str) -> tuple[StoreConfig, ...]:
    """The stores of the repo that this text names."""
    from kvctl_vllm import places

    return places.repo_stores(places.config(), repo)


@pytest.fixture(scope="session")
def node_repo(nodes: Sequence[NodeProcess]) -> str:
    """A repo over both storage nodes."""
    return repo_over([node.store(f"kv{next(_NUMBERS)}") for node in nodes])


@pytest.fixture(scope="session")
def s3_repo(seaweed: SeaweedFS) -> str:
    """A repo on SeaweedFS."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        return repo_over([seaweed.store("kvctl-vllm", f"kv{next(_NUMBERS)}")])


@pytest.fixture(scope="session")
def launch(place: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine and waits for it: launch(model, settings); it ends with the session at the latest."""
    running: list[Engine] = []
    credentials = {**CREDENTIALS, "HOME": str(place)}

    def start(
        model: Path, settings: dict[str, Any] | None = None, *, environ: Mapping[str, str] | None = None, **more: Any
    ) -> Engine:
        log = place / f"engine-{next(_NUMBERS)}.log"
        engine = Engine(model, log, settings, environ={**credentials, **(environ or {})}, **more)
        running.append(engine)
        return engine.wait()

    try:
        yield start
    finally:
        for engine in running:
            engine.stop()


@pytest.fixture(scope="session")
def llama(models: Callable[..., Path], launch: Callable[..., Engine], node_repo: str) -> Engine:
    """A Llama-shaped model, its KV on two storage nodes."""
    return launch(models(), {"repo": node_repo, "min_tokens": 16})


@pytest.fixture(scope="session")
def gemma(models: Callable[..., Path], launch: Callable[..., Engine], s3_repo: str) -> Engine:
    """A Gemma-3-shaped model with sliding windows, its KV on SeaweedFS."""
    return launch(models("gemma", layers=6), {"repo": s3_repo, "min_tokens": 16})


def eventually(what: str, holds: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference of log-probabilities."""
    return max(abs(mine - other) for mine, other in zip(ours, theirs, strict=True))


def kv_files(node: NodeProcess) -> list[Path]:
    """The chunks of the repos on a node."""
    root = Path(node.data)
    return sorted(
        path for path in root.glob("*/chunks/*/*") if path.is_file() and not os.path.basename(path).startswith(".")
    )
