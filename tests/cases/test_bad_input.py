"""Bad input that is no file of weights: configuration, addresses, targets without space or rights."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.testing.models import LlamaShape, file_bytes, write_llama
from tests.cases.world import as_option, files_of, folders, kvctl, kvctl_process, make_repo, nothing_left, push, refused
from tests.cli.program import PROGRAM, Done

MIB = 1 << 20
DATA = file_bytes([("a", "U8", (24 * MIB,))])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    return path


def test_without_any_config_a_models_name_is_two_and_says_what_to_write() -> None:
    error = refused(kvctl("load-weights", "llama", "-o", "json"), 2, "no repo")
    assert "-r" in error["hint"]
    refused(kvctl("load-weights", "lab:llama", "-o", "json"), 2, "'lab'", "no config file")
    refused(kvctl("push-weights", "./x", "llama", "-o", "json"), 2, "no repo")
    refused(kvctl("repo", "gc", "-o", "json"), 2, "no repo")


def test_a_config_that_is_no_toml_is_two_with_line_and_column(tmp_path: Path, model: Path) -> None:
    (tmp_path / "kvctl.toml").write_text('verify = "leaves"\ndefault_repo = lab\n')
    refused(kvctl("load-weights", "m", "-o", "json"), 2, "kvctl.toml", "line 2, column 16")


def test_an_unknown_scheme_lists_the_known_ones_and_what_to_install() -> None:
    error = refused(kvctl("load-weights", "gs://bucket/m", "-o", "json"), 2, "gs")
    said = json.dumps(error)
    for scheme in ("file", "s3", "mem"):
        assert scheme in said
    assert "install" in said


@pytest.mark.parametrize(
    "address",
    ["s3://AKIA:sEcReT@bucket/m", "https://me:sEcReT@host/m", "s3://bucket/m?endpoint=http://me:sEcReT@host"],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(address: str) -> None:
    for args in (
        ("load-weights", address),
        ("push-weights", address, "m", "-r", "./a"),
        ("repo", "status", "-r", address),
    ):
        done = kvctl(*args, "-o", "json")
        refused(done, 2)
        assert "sEcReT" not in done.err


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_target_without_space_is_nine_before_the_first_byte(model: Path, full: Path) -> None:
    error = refused(kvctl("load-weights", model, "--into", f"dir:{full}/out", "-o", "json"), 9, str(full))
    assert error["code"] == "capacity"
    assert list(full.iterdir()) == []  # not even what was reserved


def test_a_member_without_space_is_nine_and_nothing_half_is_visible(model: Path, full: Path, tmp_path: Path) -> None:
    stores = folders(full, "a")
    make_repo(stores)
    error = refused(kvctl("push-weights", model, "m", "-r", as_option(stores), "-o", "json"), 9, str(full))
    assert error["code"] == "capacity"
    assert not (full / "a" / "models").exists()
    small = tmp_path / "small.safetensors"
    small.write_bytes(file_bytes([("b", "U8", (MIB,))]))
    # what the failed push wrote is garbage: gc makes room for another
    assert kvctl("repo", "gc", "--grace", "0s", "-y", "-r", as_option(stores)).code == 0
    assert kvctl("push-weights", small, "m", "-r", as_option(stores)).code == 0
    assert kvctl("repo", "check", "--read-data", "all", "-r", as_option(stores)).code == 0


def limited(*args: object, file_size: int) -> Done:
    """`kvctl ARGS` in a process that may write no file longer than `file_size`."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    done = subprocess.run(
        [PROGRAM, *map(str, args)], capture_output=True, text=True, timeout=120, check=False, preexec_fn=limit
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_file_size_limit_is_no_space_too(model: Path, tmp_path: Path) -> None:
    done = limited("load-weights", model, "--into", "dir:out", "-o", "json", file_size=4 * MIB)
    refused(done, 9, "model.safetensors")
    nothing_left(tmp_path)
    stores = folders(tmp_path, "a")
    make_repo(stores, stripe=16 * MIB)
    done = limited("push-weights", model, "m", "-r", as_option(stores), "-o", "json", file_size=4 * MIB)
    refused(done, 9, "chunks/")
    assert kvctl("repo", "check", "-r", as_option(stores)).code == 0


def test_the_same_load_goes_on_when_there_is_space(model: Path, tmp_path: Path) -> None:
    assert limited("load-weights", model, "--into", "dir:out", file_size=4 * MIB).code == 9
    done = kvctl("load-weights", model, "--into", "dir:out", "-o", "json")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == {"model.safetensors": DATA}


PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def bound_by_modes(*args: object) -> Done:
    """`kvctl ARGS` in a process that obeys the modes of files even where root runs it."""
    libc = ctypes.CDLL(None)

    def drop() -> None:
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)

    done = subprocess.run(
        [PROGRAM, *map(str, args)], capture_output=True, text=True, timeout=120, check=False, preexec_fn=drop
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder on a read-only mount, with a repo of one member in it."""
    place = tmp_path / "fixed"
    place.mkdir()
    write_llama(str(tmp_path / "source"), LlamaShape())
    stores = folders(place, "a")
    make_repo(stores)
    push(tmp_path / "source", stores)
    made = subprocess.run(["mount", "--bind", place, place], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"cannot make a read-only mount here: {made.stderr.strip()}")
    subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_read_only_target_is_five_and_reading_from_there_works(model: Path, read_only: Path, tmp_path: Path) -> None:
    refused(
        kvctl("load-weights", model, "--into", f"dir:{read_only}/out", "-o", "json"), 5, str(read_only), "read-only"
    )
    stores = folders(read_only, "a")
    refused(kvctl("push-weights", model, "new", "-r", as_option(stores), "-o", "json"), 5, str(read_only), "read-only")
    done = kvctl("load-weights", "m", "-r", as_option(stores), "--into", "dir:out", "-o", "json")
    assert done.code == 0, done.err
    assert files_of(tmp_path / "out") == files_of(tmp_path / "source")


def test_a_folder_and_a_file_without_rights_are_five(model: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o555)
    refused(bound_by_modes("load-weights", model, "--into", f"dir:{private}/out", "-o", "json"), 5, str(private))
    model.chmod(0)
    refused(bound_by_modes("load-weights", model, "-o", "json"), 5, "model.safetensors")
    nothing_left(tmp_path)


def test_a_target_that_is_taken_is_two_and_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    refused(kvctl("load-weights", model, "--into", "dir:out", "-o", "json"), 2, str(out), "not empty")
    assert files_of(out) == {"precious": b"mine"}
    (tmp_path / "file").write_text("mine")
    refused(kvctl("load-weights", model, "--into", "dir:file", "-o", "json"), 2, "file")
    refused(kvctl("load-weights", model, "--into", "dir:file/out", "-o", "json"), 2, "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_shared_memory_has_the_files_under_its_name_and_only_then(model: Path, tmp_path: Path) -> None:
    name = f"kvctl-case-{os.getpid()}"
    place = Path("/dev/shm") / name
    try:
        assert kvctl_process("load-weights", model, "--into", f"shm:{name}").code == 0
        assert files_of(place) == {"model.safetensors": DATA}
    finally:
        for item in place.iterdir() if place.is_dir() else ():
            item.unlink()
        if place.is_dir():
            place.rmdir()
    nothing_left(tmp_path, name)


def test_members_of_two_repos_are_eight_and_named(tmp_path: Path) -> None:
    one, two = folders(tmp_path, "a"), folders(tmp_path, "b")
    make_repo(one)
    make_repo(two)
    for args in (("load-weights", "m"), ("push-weights", "./x.safetensors", "m"), ("repo", "status")):
        (tmp_path / "x.safetensors").write_bytes(file_bytes([("a", "U8", (1,))]))
        error = refused(
            kvctl(*args, "-r", as_option([*one, *two]), "-o", "json"), 8, "different repos", one[0].url, two[0].url
        )
        assert error["code"] == "incompatible"


def test_one_member_listed_twice_is_two(tmp_path: Path) -> None:
    stores = folders(tmp_path, "a", "b")
    make_repo(stores)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    twice = [*stores, *folders(tmp_path, "link")]
    refused(kvctl("repo", "status", "-r", as_option(twice), "-o", "json"), 2, "link")
    same = as_option(folders(tmp_path, "c", "c"))
    refused(kvctl("repo", "init", "-r", same, "--replicas", "1", "-o", "json"), 2, "c")


def test_a_tensor_parallel_size_that_does_not_divide_is_eight_and_names_tensor_and_numbers(tmp_path: Path) -> None:
    write_llama(str(tmp_path / "llama"), LlamaShape())
    error = refused(kvctl("load-weights", "./llama", "--tp-size", "3", "--into", "dir:out", "-o", "json"), 8, "3")
    assert "_proj" in error["what"] or "embed" in error["what"]
    nothing_left(tmp_path)
