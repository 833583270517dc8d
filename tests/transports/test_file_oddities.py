"""What people's folders hold beside files: pipes, links in circles, sockets, times that no calendar has."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import NotFoundError, UsageError
from kvctl.testing.models import file_bytes
from kvctl.transports.registry import open_store
from tests.cli.inside import program_inside


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder whose only file is `a`."""
    place = tmp_path / "odd"
    place.mkdir()
    (place / "a").write_bytes(b"a")
    os.mkfifo(place / "pipe")
    (place / "nothing").symlink_to("gone")
    (place / "itself").symlink_to("itself")
    (place / "circle").mkdir()
    (place / "circle" / "back").symlink_to("../circle")
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(place)  # a socket's path is short
        try:
            made.bind("s")
        finally:
            os.chdir(here)
    return place


def test_only_files_are_objects_and_a_pipe_blocks_nobody(odd: Path) -> None:
    store = open_store(StoreConfig(f"file://{odd}"))
    assert [info.key for info in store.list()] == ["a"]
    for key in ("pipe", "nothing", "circle"):
        with pytest.raises(NotFoundError):
            store.stat(key)
        with pytest.raises(NotFoundError):
            store.get(key)
    assert list(store.uploads()) == []


@pytest.mark.parametrize("seconds", [-1, 253_402_300_800, (1 << 62) // 10**9])
def test_a_time_that_no_calendar_has_is_no_obstacle(seconds: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"a")
    try:
        os.utime(path, (seconds, seconds))
    except OSError as error:
        pytest.skip(f"this file system has no such time: {error.strerror}")
    info = open_store(StoreConfig(f"file://{tmp_path}")).stat("a")
    assert 1970 <= info.modified.year <= 3000


def test_a_folder_called_like_a_file_and_a_pipe_called_so_are_no_weights(tmp_path: Path) -> None:
    kvctl = program_inside(tmp_path)
    (tmp_path / "m" / "model.safetensors").mkdir(parents=True)
    os.mkfifo(tmp_path / "m" / "other.safetensors")
    assert kvctl("load-weights", "./m").code == 4
    assert kvctl("load-weights", "./m/other.safetensors").code == 4
    (tmp_path / "m" / "real.safetensors").write_bytes(file_bytes([("a", "U8", (4,))]))
    done = kvctl("load-weights", "./m", "-o", "json")
    assert (done.code, done.document["tensors"]) == (0, 1)


def test_a_file_where_a_folder_should_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    kvctl = program_inside(tmp_path)
    for place in ("./file", "./file/deeper"):
        done = kvctl("repo", "init", "-r", place, "-o", "json")
        assert (done.code, "a file is in its way" in done.error["what"]) == (2, True)
    store = open_store(StoreConfig(f"file://{tmp_path}"))
    store.put("a", b"a")
    with pytest.raises(UsageError, match="a file is in its way"):
        store.put("a/b", b"b")
    assert (tmp_path / "file").read_bytes() == b"mine"
