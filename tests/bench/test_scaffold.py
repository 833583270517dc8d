"""`kvctl transports new`: what it writes installs, is found, and passes the contracts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import Done, Kvctl


def install(folder: Path, site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(site), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip("building a package without the network needs setuptools >= 77: pip install 'setuptools>=77'")
    assert done.returncode == 0, done.stderr


def contracts_of(folder: Path, site: Path, surroundings: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", str(folder / "tests")],
        cwd=folder,
        env={**surroundings, "PYTHONPATH": str(site), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def lint(folder: Path) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,I,UP,B,RUF", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_store_with_its_transport(kvctl: Kvctl, tmp_path: Path, surroundings: dict[str, str]) -> None:
    made = kvctl("transports", "new", "ice-box", "-o", "json")
    assert made.code == 0, made.err
    folder, site = tmp_path / "kvctl-ice-box", tmp_path / "site"
    assert {str(path.relative_to(tmp_path)) for path in folder.rglob("*") if path.is_file()} == set(
        made.document["files"]
    )
    assert "@@" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert lint(folder).code == 0, lint(folder).out
    install(folder, site)
    contracts_of(folder, site, surroundings)
    env = {"PYTHONPATH": str(site)}
    listed = kvctl("transports", "ls", "-o", "json", env=env).document
    assert "ice-box" in {row["scheme"] for row in listed["stores"]}
    assert listed["broken"] == []
    probed = kvctl("transports", "probe", "ice-box", "-o", "json", env=env)
    assert probed.code == 0, probed.err
    # and the program can use it: a model goes through a repo in it
    here = f"ice-box://main/repo?folder={tmp_path / 'boxes'}"
    from kvctl.testing.models import write_llama

    write_llama(str(tmp_path / "model"))
    for args in (("repo", "init"), ("push-weights", "./model", "m"), ("load-weights", "m", "--into", "dir:./copy")):
        done = kvctl(*args, "-r", here, env=env)
        assert done.code == 0, done.err
    for file in (tmp_path / "model").glob("*.safetensors"):
        assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()


def test_a_transport_for_a_scheme_that_is_there(kvctl: Kvctl, tmp_path: Path, surroundings: dict[str, str]) -> None:
    made = kvctl("transports", "new", "slowly", "--for", "file", "--into", "./plug", "-o", "json")
    assert made.code == 0, made.err
    site = tmp_path / "site"
    assert lint(tmp_path / "plug").code == 0
    install(tmp_path / "plug", site)
    contracts_of(tmp_path / "plug", site, surroundings)
    env = {"PYTHONPATH": str(site)}
    done = kvctl("transports", "check", "./store", "--transport", "slowly", "-o", "json", env=env)
    assert done.code == 0, done.err


def test_names_and_places_are_checked(kvctl: Kvctl, tmp_path: Path) -> None:
    for name in ("Foo", "foo_bar", "-x", "a--b", "a/b", "1a"):
        done = kvctl("transports", "new", "-o", "json", "--", name)
        assert done.code == 2, name
    assert "taken" in kvctl("transports", "new", "s3", "-o", "json").error["what"]
    assert "no store knows" in kvctl("transports", "new", "x", "--for", "gopher", "-o", "json").error["what"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert kvctl("transports", "new", "x", "--into", "full", "-o", "json").code == 2
