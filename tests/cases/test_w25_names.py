"""W25: names as people write them: served literally, or refused; never a path outside the target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvctl.testing.models import file_bytes, raw_header
from tests.cases.world import as_option, files_of, folders, kvctl, make_repo, refused

DATA = file_bytes([("a", "F32", (8, 8))])
LITERAL = [
    "with space",
    "naïve-模型-🦙",
    "a.b..c",
    "...",
    "org/model",
    "100%",
    "a%2Fb",
    "[x]*?",
    "a;b|c$(d)",
    "CON",
    "Ω" * 20,
]
REFUSED = ["..", ".", "../out", "a/../b", "/etc/passwd", "//x", "a//b", "a/", "~root", "-x", "--help", " lead",
           "trail ", "new\nline", "nul\0l", "tab\t", "back\\slash", "x@y@z", "a" * 300, "a\u2028b"]  # fmt: skip


@pytest.mark.parametrize("name", LITERAL)
def test_a_name_is_pushed_listed_loaded_and_removed_literally(name: str, tmp_path: Path) -> None:
    stores = folders(tmp_path, "a")
    make_repo(stores)
    repo = ("-r", as_option(stores), "-o", "json")
    (tmp_path / "model.safetensors").write_bytes(DATA)
    done = kvctl("push-weights", "./model.safetensors", name, *repo)
    assert done.code == 0, done.err
    assert [item["name"] for item in kvctl("models", "ls", *repo).document["models"]] == [name]
    # a name with '/' is no path only when a repo is named before it
    (tmp_path / "kvctl.toml").write_text(f'[[repos.lab.stores]]\nurl = "{stores[0].url}"\n')
    done = kvctl("load-weights", f"lab:{name}", "--into", "dir:out", "-o", "json")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == {"model.safetensors": DATA}
    inside = {item for item in tmp_path.rglob("*") if item.is_file()}
    assert all(
        item.relative_to(tmp_path).parts[0] in {"a", "out", "state", "kvctl.toml", "model.safetensors"}
        for item in inside
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_could_be_a_path_or_an_option_is_refused(name: str, tmp_path: Path) -> None:
    stores = folders(tmp_path, "a")
    make_repo(stores)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "model.safetensors").write_bytes(DATA)
    done = kvctl("push-weights", "-r", as_option(stores), "-o", "json", "--", "./model.safetensors", name)
    refused(done, 2)
    after = sorted(item for item in tmp_path.rglob("*") if item.name != "model.safetensors")
    assert [item for item in after if "state" not in item.parts] == before


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/tmp/evil.safetensors", "a/b.safetensors", "..", "", "a\\b"])
def test_an_index_cannot_name_a_file_elsewhere(shard: str, tmp_path: Path) -> None:
    model = tmp_path / "deep" / "model"
    model.mkdir(parents=True)
    (tmp_path / "deep" / "evil.safetensors").write_bytes(DATA)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    refused(kvctl("load-weights", str(model), "--into", "dir:out", "-o", "json"), 7, "'a'")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "", " ", "a b", "ünï", "-x", "%2e%2e%2f"])
def test_a_tensors_name_is_never_a_path(name: str, tmp_path: Path) -> None:
    data = raw_header({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}) + b"abcd"
    (tmp_path / "model.safetensors").write_bytes(data)
    done = kvctl("load-weights", "./model.safetensors", "--into", "dir:out", "-o", "json")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == {"model.safetensors": data}


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/dev/shm/x", ""])
def test_shared_memory_takes_plain_names_only(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(DATA)
    refused(kvctl("load-weights", "./model.safetensors", "--into", f"shm:{name}", "-o", "json"), 2)


def test_a_hostile_manifest_cannot_write_outside_the_target(tmp_path: Path) -> None:
    stores = folders(tmp_path, "a")
    make_repo(stores)
    repo = ("-r", as_option(stores), "-o", "json")
    (tmp_path / "model.safetensors").write_bytes(DATA)
    assert kvctl("push-weights", "./model.safetensors", "m", *repo).code == 0
    manifest = next((tmp_path / "a" / "models").rglob("*.json"))
    document = json.loads(manifest.read_text())
    for evil in ("../evil.safetensors", "/tmp/kvctl-evil.safetensors", "a/b.safetensors", "..", ""):
        document["files"][0]["name"] = evil
        manifest.write_text(json.dumps(document))
        done = kvctl("load-weights", "m", *repo, "--into", "dir:out")
        assert done.code in {2, 7}, (evil, done)
        assert not (tmp_path / "evil.safetensors").exists()
        assert not Path("/tmp/kvctl-evil.safetensors").exists()
        assert not (tmp_path / "out").exists()
