"""Fixtures of the tests of `kvctl kv ..`: two repos with a few sessions, fresh for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.inside import program_inside
from tests.cli.kv_files import bundle_at
from tests.cli.program import Kvctl

CONFIG = 'default_repo = "a"\n' + "".join(f'[[repos.{name}.stores]]\nurl = "./{name}"\n' for name in "ab")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repos a (the default) and b; a holds alice/chat@1 (100 tokens), alice/chat@2 (130, the same first 100) and
    bob/other@1, which were pushed from the bundles beside them.
    """
    folder = tmp_path_factory.mktemp("kv")
    kvctl = program_inside(folder)
    (folder / "kvctl.toml").write_text(CONFIG)
    for name in "ab":
        assert kvctl("repo", "init", "-r", name).code == 0
    for count, seed, session in ((100, 0, "alice/chat"), (130, 0, "alice/chat"), (64, 1, "bob/other")):
        source = bundle_at(folder / f"{seed}-{count}.safetensors", count, seed=seed)
        done = kvctl("kv", "push", f"bundle:{source}", session, "--with-tokens")
        assert done.code == 0, done.err
    return folder


@pytest.fixture
def lab(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def kvctl(tmp_path: Path) -> Kvctl:
    return program_inside(tmp_path)
