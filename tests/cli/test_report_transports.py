"""Each command's report says which transport ran at either end, and why every faster one did not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvctl.testing.models import write_llama
from kvctl.testing.nodes import NodeProcess
from kvctl.transports.registry import probe, transport_specs
from tests.cli.inside import program_inside
from tests.cli.kv_files import bundle_at
from tests.cli.program import Kvctl


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess.start(str(tmp_path_factory.mktemp("node")), keys=False) as running:
        yield running


@pytest.fixture(scope="module")
def kvctl(tmp_path_factory: pytest.TempPathFactory, node: NodeProcess) -> Kvctl:
    """A repo on a storage node (the default) and one in a folder; a model, and a session's KV."""
    folder = tmp_path_factory.mktemp("lab")
    run = program_inside(folder)
    (folder / "kvctl.toml").write_text(
        f'default_repo = "far"\n[[repos.far.stores]]\nurl = "{node.store("far").url}"\n'
        '[[repos.near.stores]]\nurl = "./near"\n'
    )
    write_llama(str(folder / "model"))
    bundle_at(folder / "kv.safetensors", 64)
    for repo in ("far", "near"):
        assert run("repo", "init", "-r", repo).code == 0
    return run


def told(kvctl: Kvctl, *args: object) -> dict[str, dict[str, str]]:
    """Transport -> why each faster one was passed over."""
    done = kvctl(*args, "-o", "json")
    assert done.code == 0, done.err
    found: list[Mapping[str, Any]] = done.document["transport"]
    assert all(entry["reason"] for entry in found)
    return {entry["name"]: dict(entry["passed_over"]) for entry in found}


def faster(scheme: str, than: str) -> set[str]:
    """The transports of a scheme that rank above one, all of which have to be explained."""
    specs = transport_specs()
    return {
        spec.name
        for spec in specs.values()
        if (not spec.schemes or scheme in spec.schemes) and spec.rank > specs[than].rank
    }


def best(scheme: str) -> str:
    """What `auto` takes here."""
    usable = [
        spec
        for spec in transport_specs().values()
        if (not spec.schemes or scheme in spec.schemes) and "host" in spec.memory_kinds and probe(spec).available
    ]
    return max(usable, key=lambda spec: spec.rank).name


def test_every_command_that_moves_bytes_tells_both_ends(kvctl: Kvctl) -> None:
    node, file = best("node"), best("file")
    runs = {
        "push-weights": (told(kvctl, "push-weights", "./model", "m"), {file, node}),
        "load-weights": (told(kvctl, "load-weights", "m"), {node}),
        "models cp": (told(kvctl, "models", "cp", "m", "near:m"), {node, file}),
        "models verify": (told(kvctl, "models", "verify", "m"), {node}),
        "kv push": (told(kvctl, "kv", "push", "bundle:kv.safetensors", "alice/chat"), {node}),
        "kv pull": (told(kvctl, "kv", "pull", "alice/chat", "--into", "bundle:back.safetensors"), {node}),
        "kv cp": (told(kvctl, "kv", "cp", "far:alice/chat", "near:alice/chat"), {node, file}),
    }
    for command, (found, names) in runs.items():
        assert set(found) == names, command
        for name, passed in found.items():
            scheme = "node" if name == node else "file"
            assert faster(scheme, name) <= set(passed), command
            assert all(passed.values()), command


def test_the_report_for_people_says_it_too(kvctl: Kvctl) -> None:
    done = kvctl("load-weights", "m")
    assert done.code == 0, done.err
    assert f"transport        {best('node')} (" in done.out or f"{best('node')} (the fastest available" in done.out
    for name in faster("node", best("node")):
        assert f"{name}: " in done.out


def test_one_that_was_asked_for_is_told_as_such(kvctl: Kvctl) -> None:
    done = kvctl("load-weights", "m", "--transport", "store-get", "-o", "json")
    (entry,) = done.document["transport"]
    assert (entry["name"], entry["reason"]) == ("store-get", "asked for")
