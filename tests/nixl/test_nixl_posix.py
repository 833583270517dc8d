"""nixl-posix, and what all NIXL transports share: finding NIXL, loading it quietly, saying what is missing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import EnvError, SizeMismatchError, UsageError, VersionChangedError
from kvctl.memory.buffers import HostBuffer
from kvctl.testing.buffers import GuardedBuffer
from kvctl.testing.transport_contract import drive
from kvctl.transports.api import Op, Status
from kvctl.transports.registry import Probe, choose, open_store, probe, transport_specs
from kvctl_nixl import files, gds, library, memory, posix, probes
from kvctl_nixl.agent import Agent
from kvctl_nixl.posix import NixlPosix, open_transport
from kvctl_nixl.quarantine import QUARANTINE
from tests.nixl.cases import read_one

SIZE = 300_000
DATA = bytes(range(1, 251)) * (SIZE // 250)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "k").write_bytes(DATA)
    return tmp_path


@contextmanager
def opened(folder: Path, **options: str) -> Iterator[NixlPosix]:
    config = StoreConfig(f"file://{folder}")
    with closing(open_transport(config, open_store(config), None, options)) as transport:
        yield transport


def test_long_ranges_are_split_below_what_a_back_end_takes(tmp_path: Path) -> None:
    """Of more than 65,536 descriptors NIXL takes none."""
    assert files.PIECE // files.SMALLEST < 65_536
    size = files.PIECE + 3 * 4096 + 5
    with open(tmp_path / "k", "wb") as file:
        file.truncate(size)
        for place in (0, files.PIECE - 1, files.PIECE, size - 1):
            os.pwrite(file.fileno(), b"x", place)
    buffer = HostBuffer(size)
    with opened(tmp_path, direct="true", chunk="4096", queue="64", threads="1") as transport:
        assert drive(transport, [Op(1, "read", "k", 0, size, buffer)])[1].status is Status.DONE
    found = [place for place in (0, 1, files.PIECE - 1, files.PIECE, size - 1) if buffer.view[place] == ord("x")]
    assert found == [0, files.PIECE - 1, files.PIECE, size - 1]
    assert bytes(buffer.view).count(b"x") == 4


def test_a_file_cut_off_while_it_is_read_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size was right when the file was opened; NIXL has one word for what came then."""
    fill = NixlPosix.fill

    def cut(self: NixlPosix, op: Op, fd: int, path: str) -> None:
        os.truncate(path, 100_000)
        fill(self, op, fd, path)

    with opened(folder) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(NixlPosix, "fill", cut)
            done = drive(transport, [Op(1, "read", "k", 0, SIZE, HostBuffer(SIZE))])[1]
        assert done.status is Status.FAILED
        assert isinstance(done.error, SizeMismatchError)
        assert "100000" in str(done.error)
        assert str(SIZE) in str(done.error)
        # NIXL's queue is not to be trusted after an error; the transport is
        assert read_one(transport, "k", 0, 100_000)[0] == DATA[:100_000]


def test_a_file_written_to_while_it_is_read_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = NixlPosix.fill

    def write(self: NixlPosix, op: Op, fd: int, path: str) -> None:
        fill(self, op, fd, path)
        with open(path, "r+b") as file:
            file.write(b"new")
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(NixlPosix, "fill", write)
    version = open_store(StoreConfig(f"file://{folder}")).stat("k").version
    with opened(folder) as transport:
        done = drive(transport, [Op(1, "read", "k", 0, SIZE, HostBuffer(SIZE), version=version)])[1]
    assert isinstance(done.error, VersionChangedError)


def test_an_error_among_several_reads_in_flight_leaves_the_memory_in_quarantine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct reads are many at once: after the first error NIXL does not say when the others end."""
    move = NixlPosix.move

    def cut(self: NixlPosix, *rest: object) -> None:
        os.truncate(folder / "k", 8192)
        move(self, *rest)  # type: ignore[arg-type]

    buffer = HostBuffer(SIZE)
    with opened(folder, direct="true", chunk="4096") as transport:
        assert transport.capabilities.one_sided
        with monkeypatch.context() as patch:
            patch.setattr(NixlPosix, "move", cut)
            done = drive(transport, [Op(1, "read", "k", 0, SIZE // 4096 * 4096, buffer)])[1]
        assert done.status is Status.UNKNOWN
        assert isinstance(done.error, SizeMismatchError)
        assert len(QUARANTINE) == 1
        buffer.close()
        assert buffer._map[0] is not None, "still mapped"
        assert read_one(transport, "k", 0, 8192)[0] == DATA[:8192]
    QUARANTINE._kept.clear()


def test_buffered_reads_never_leave_anything_in_flight(folder: Path) -> None:
    with opened(folder) as transport:
        assert not transport.capabilities.one_sided
        assert transport.chunk == 0


def test_a_buffer_is_registered_once_and_forgotten_when_its_owner_says_so(folder: Path) -> None:
    buffer = HostBuffer(SIZE)
    with opened(folder, threads="1") as transport:
        registration = transport.register(buffer)
        for offset in range(0, SIZE, 50_000):
            op = Op(1, "read", "k", offset, 50_000, buffer, offset)
            assert drive(transport, [op])[1].status is Status.DONE
        (desk,) = transport._known._desks
        assert desk.generation == 1
        registration.close()
        assert desk._held == {}
        assert drive(transport, [Op(1, "read", "k", 0, 10, buffer)])[1].status is Status.DONE
        assert desk.generation == 2
    assert bytes(buffer.view) == DATA


def test_a_file_system_without_direct_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    with opened(folder, direct="true") as transport:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            done = drive(transport, [Op(1, "read", "k", 0, SIZE, HostBuffer(SIZE))])[1]
        assert isinstance(done.error, EnvError)
        assert done.error.hint == "leave direct=true out"


def test_a_write_that_is_held_back_asks_before_each_piece(folder: Path) -> None:
    asked: list[int] = []
    buffer = HostBuffer((2 << 20) + 5)
    buffer.view[-1] = 7
    with opened(folder) as transport:
        op = Op(1, "write", "new", 0, buffer.nbytes, buffer, object_size=buffer.nbytes, pace=asked.append)
        assert drive(transport, [op])[1].status is Status.DONE
    assert asked == [1 << 20, 1 << 20, 5]
    assert (folder / "new").read_bytes() == bytes(buffer.view)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api": "posix_aio"}, "use uring or aio"),
        ({"chunk": "8192"}, "buffered transfer"),
        ({"direct": "true", "chunk": "100"}, "4096"),
        ({"thread": "1"}, "threads"),
    ],
)
def test_options_that_cannot_be_meant(folder: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as found, opened(folder, **options):
        pass
    assert words in f"{found.value} {found.value.hint}"


def test_a_kernel_that_forbids_io_uring(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "io_uring_refusal", lambda: "io_uring: Operation not permitted")
    with pytest.raises(EnvError) as found, opened(folder):
        pass
    assert "api=aio" in str(found.value.hint)
    with opened(folder, api="aio") as transport:
        assert read_one(transport, "k", 0, SIZE)[0] == DATA


def test_auto_takes_our_own_paths_where_they_are_as_fast() -> None:
    """Ranks are what was measured: see the README of the plug-in."""
    assert choose("file", "host").spec.name == "file"
    assert choose("s3", "host").spec.name == "s3"
    ranks = {name: spec.rank for name, spec in transport_specs().items()}
    assert ranks["nixl-posix"] < ranks["file"] < ranks["nixl-gds"]
    assert ranks["nixl-obj"] < ranks["s3"]


def _without_nixl(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None or name != "nixl-cu12":
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(probes, "version", version)
    monkeypatch.setattr(probes, "installed", lambda build: not probes._lack(build))
    monkeypatch.setattr(library, "installed", lambda build: not probes._lack(build))
    monkeypatch.setattr(library, "_LOADED", {})


@pytest.mark.parametrize("name", ["nixl-posix", "nixl-obj", "nixl-ucx", "nixl-gds"])
def test_without_nixl_each_transport_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_nixl(monkeypatch, None)
    spec = transport_specs()[name]
    found = probe(spec)
    assert not found.available
    assert found.hint == "pip install 'kvctl[nixl]'"
    with pytest.raises(EnvError) as error:
        choose(spec.schemes[0], min(spec.memory_kinds), name)
    assert name in str(error.value)
    assert "not installed" in str(error.value.cause)
    with pytest.raises(EnvError):
        library.load()


def test_an_old_nixl_is_refused_since_it_hides_short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_nixl(monkeypatch, "1.4.0")
    found = probes.probe_nixl()
    assert not found.available
    assert "1.4.0" in found.reason
    assert "short reads" in found.reason


def test_gds_is_refused_before_anything_that_could_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> Agent:
        raise AssertionError("the back end must not be made")

    monkeypatch.setattr(files, "Agent", never)
    config = StoreConfig(f"file://{folder}")
    if not os.path.exists("/dev/nvidiactl"):
        with pytest.raises(EnvError) as found:
            gds.open_transport(config, open_store(config), None, {})
        assert "no NVIDIA driver" in str(found.value)
    real = os.path.exists
    here = {probes.CUDA_DRIVER}
    monkeypatch.setattr(probes, "has_library", lambda name: name in here)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl" or real(path))
    assert "libcudart.so.1" in probes.probe_gds().reason
    here |= {"libcudart.so.12", "libcudart.so.13"}
    assert "libcufile" in probes.probe_gds().reason
    monkeypatch.setattr(probes, "has_library", lambda name: True)
    if not real("/proc/driver/nvidia-fs"):
        assert "nvidia-fs" in probes.probe_gds().reason
    monkeypatch.setenv("CUFILE_USE_PCIP2PDMA", "true")
    assert probes.probe_gds().available


def test_gds_keeps_to_file_systems_that_it_supports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StoreConfig(f"file://{tmp_path}")
    store = open_store(config)
    monkeypatch.setattr(gds, "file_system_of", lambda path: "tmpfs")
    assert "tmpfs" in gds.serves(config, store)
    monkeypatch.setattr(gds, "file_system_of", lambda path: "xfs")
    assert gds.serves(config, store) == ""
    monkeypatch.undo()
    if os.path.ismount("/proc"):
        assert gds.file_system_of("/proc/self") == "proc"


def test_libraries_in_wheels_are_found_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "nvidia" / "cufile" / "lib" / "libkvctl-none.so.0"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probes.wheel_library("libkvctl-none.so.0") == str(place)
    assert probes.has_library("libkvctl-none.so.0")
    assert not probes.has_library("libkvctl-none.so.1")
    with pytest.raises(EnvError) as found:
        gds._preload("libkvctl-none.so.1", "libkvctl-none.so.0")
    assert "libkvctl-none.so.0 cannot be loaded" in str(found.value)


class OutOfReach:
    """Stands in for GPU memory: an address, and no view."""

    kind = "cuda"

    def __init__(self, nbytes: int) -> None:
        self.inner = HostBuffer(nbytes)
        self.nbytes, self.address = nbytes, self.inner.address

    @property
    def view(self) -> memoryview:
        raise TypeError("memory of a GPU has no view")

    def close(self) -> None:
        self.inner.close()


def test_gds_moves_bytes_without_looking_at_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the back end: that needs a GPU, so NIXL's POSIX one takes its place."""
    asked: list[tuple[str, dict[str, str]]] = []

    def posix_instead(backend: str, params: dict[str, str], *, build: str) -> Agent:
        asked.append((backend, params))
        return Agent("POSIX", {"use_uring": "true"}, build=build)

    monkeypatch.setattr(files, "Agent", posix_instead)
    monkeypatch.setattr(gds, "probe_gds", lambda: Probe(available=True))
    monkeypatch.setattr(gds, "has_library", lambda name: True)
    monkeypatch.setattr(gds, "wheel_library", lambda name: None)
    monkeypatch.setattr(gds, "device_of", lambda address: 0)
    monkeypatch.setattr(gds, "_set_up", lambda options: None)
    monkeypatch.setitem(memory.KINDS, "cuda", "DRAM")
    config = StoreConfig(f"file://{folder}")
    store = open_store(config)
    buffer = OutOfReach(65536)
    with closing(gds.open_transport(config, store, None, {"request": "1048576"})) as transport:
        assert asked == [("GDS", {"max_request_size": "1048576"})]
        transport.register(buffer)
        version = store.stat("k").version
        ops = [
            Op(1, "read", "k", 4096, 8192, buffer, 4096, version, SIZE),
            Op(2, "write", "new", 0, 12288, buffer, object_size=12288),
            Op(3, "read", "k", 0, SIZE + 4096, buffer),
            Op(4, "read", "none", 0, 4096, buffer),
        ]
        done = {op.id: drive(transport, [op])[op.id] for op in ops}
    assert [done[number].status for number in (1, 2, 3, 4)] == [Status.DONE, Status.DONE, Status.FAILED, Status.FAILED]
    assert bytes(buffer.inner.view[4096:12288]) == DATA[4096:12288]
    assert (folder / "new").read_bytes() == bytes(4096) + DATA[4096:12288]
    with pytest.raises(EnvError):
        transport.register(HostBuffer(10))


def test_cufile_gets_a_log_of_its_own_and_no_silent_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUFILE_LOGFILE_PATH", "CUFILE_ALLOW_COMPAT_MODE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    gds._set_up({})
    assert os.path.isabs(os.environ["CUFILE_LOGFILE_PATH"])
    assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    gds._set_up({"compat": "true"})
    assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "true"
    gds._set_up({})
    assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "true", "what the user's environment says stays"


@pytest.mark.parametrize("level", [None, "INFO"])
def test_nothing_of_nixl_reaches_stdout_and_the_process_ends_in_order(level: str | None) -> None:
    program = (
        "import logging\nfrom kvctl_nixl.agent import Agent\n"
        "agents = [Agent('UCX', {}), Agent('POSIX', {'use_uring': 'true'})]\n"
        "assert logging.raiseExceptions\nprint('mine')\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NIXL_", "UCX_"))}
    if level is not None:
        env |= {"NIXL_LOG_LEVEL": level, "UCX_LOG_LEVEL": level.lower()}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert (done.returncode, done.stdout) == (0, "mine\n")
    assert (done.stderr == "") is (level is None)


def test_two_builds_are_not_loaded_into_one_process() -> None:
    first = next(build for build in probes.BUILDS if probes.installed(build))
    library.load()
    other = "cu13" if first == "cu12" else "cu12"
    with pytest.raises(EnvError) as found:
        library.load(other)
    assert "beside" in str(found.value)


def test_a_back_end_that_cannot_be_made_is_one_clear_error() -> None:
    with pytest.raises(EnvError) as found:
        Agent("GUSLI", {})
    assert "GUSLI" in str(found.value)
    with pytest.raises(EnvError) as found:
        Agent("NONE", {})
    assert "has no plug-in NONE" in str(found.value)


def test_other_memory_is_not_taken(folder: Path) -> None:
    with opened(folder) as transport:
        buffer = GuardedBuffer(10)
        buffer.kind = "cuda"
        with pytest.raises(EnvError):
            transport.register(buffer)
