"""Files that appear whole: never half, never a device's or a link's place taken, never two writers in one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvctl.core.errors import EnvError
from kvctl.memory.whole import whole_file


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail() -> None:
        with whole_file(str(path)) as file:
            file.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_two_writers_at_once_give_one_of_the_two(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with whole_file(str(path)) as one:
        one.write(b"1" * 10)
        with whole_file(str(path)) as two:
            two.write(b"22")
        assert path.read_bytes() == b"22"
        one.write(b"1" * 10)
    assert path.read_bytes() == b"1" * 20
    assert names(tmp_path) == ["a"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with whole_file(str(tmp_path / "link")) as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    with whole_file(str(path)) as file:
        file.write(b"through")
    reader.join()
    assert got == [b"through"]
    assert path.is_fifo()


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="cannot be written"), whole_file(str(tmp_path)) as file:
        file.write(b"x")
    assert names(tmp_path) == []


def test_the_mode_is_what_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with whole_file(str(tmp_path / "a")) as file:
            file.write(b"secret")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
