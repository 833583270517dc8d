"""The real program in a process of its own, with its own home and state."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvctl.testing.models import write_llama
from tests.cli.program import PROGRAM, Done, Kvctl


def own_environment(folder: Path) -> dict[str, str]:
    """An environment whose home, config and state are in `folder`."""
    home = folder / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(("KVCTL_", "XDG_"))}
    return {**kept, "HOME": str(home), "KVCTL_STATE_DIR": str(folder / "state")}


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    return own_environment(tmp_path)


@pytest.fixture
def kvctl(tmp_path: Path, surroundings: dict[str, str]) -> Kvctl:
    return program_in(tmp_path, surroundings)


def program_in(folder: Path, surroundings: Mapping[str, str]) -> Kvctl:
    """Runs the program in `folder`."""

    def run(*args: object, env: Mapping[str, str] | None = None, stdin: str = "", cwd: Path | None = None) -> Done:
        done = subprocess.run(
            [PROGRAM, *map(str, args)],
            env={**surroundings, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            cwd=cwd or folder,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


def made_once(factory: pytest.TempPathFactory, name: str, config: str, *commands: Sequence[str]) -> Path:
    """A folder with models, a config and repos that the commands made."""
    folder = factory.mktemp(name)
    write_llama(str(folder / "model"), shards=3)
    write_llama(str(folder / "tuned"), shards=3, seed=1)
    (folder / "kvctl.toml").write_text(config)
    run = program_in(folder, own_environment(folder))
    for args in commands:
        done = run(*args)
        assert done.code == 0, done.err
    shutil.rmtree(folder / "home")
    shutil.rmtree(folder / "state", ignore_errors=True)
    return folder


@pytest.fixture(scope="session")
def made_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = 'default_repo = "lab"\n' + "".join(f'[[repos.lab.stores]]\nurl = "./r/{name}"\n' for name in "abc")
    init, push = ("repo", "init", "--replicas", "2"), ("push-weights", "./model", "m")
    return made_once(tmp_path_factory, "repo", config, init, push)


@pytest.fixture
def repo(made_repo: Path, tmp_path: Path) -> Path:
    """Three folders with two replicas and the model m, called 'lab' and default in kvctl.toml; `./model` is m."""
    shutil.copytree(made_repo, tmp_path, dirs_exist_ok=True)
    return tmp_path / "r"


@pytest.fixture(scope="session")
def made_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = 'default_repo = "a"\n' + "".join(f'[[repos.{name}.stores]]\nurl = "./{name}"\n' for name in "ab")
    return made_once(
        tmp_path_factory,
        "two",
        config,
        ("repo", "init"),
        ("repo", "init", "-r", "b"),
        ("push-weights", "./model", "m"),
        ("push-weights", "./tuned", "m"),
        ("push-weights", "./model", "n", "--revision", "abc"),
    )


@pytest.fixture
def two(made_two: Path, tmp_path: Path) -> None:
    """Repos 'a' (default, with the models m@1, m@2 and n@1) and 'b' (empty), one folder each."""
    shutil.copytree(made_two, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_llama(str(folder), shards=3)
    return folder
