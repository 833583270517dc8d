"""Memory: models larger than the memory that is allowed; staging is bounded by the cgroup, not by the host's RAM."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvctl.memory.budget import memory_available, staging_budget
from kvctl.testing.models import LlamaShape, header_document, raw_header
from tests.cases.test_w18_ranks import pattern
from tests.cases.world import as_option, folders, make_repo, push
from tests.cli.program import PROGRAM, Done

MIB = 1 << 20
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
# 132 MiB
SHAPE = LlamaShape(layers=1, hidden=2048, heads=16, kv_heads=16, head_dim=128, inner=3072, vocab=8192)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(raw_header(header_document(SHAPE.tensors())))
        for tensor in SHAPE.tensors():
            file.write(pattern(tensor))
    (folder / "config.json").write_text(json.dumps(SHAPE.config()))
    return folder


Limited = Callable[..., Done]


@pytest.fixture
def limited() -> Iterator[Limited]:
    """`kvctl` in a memory cgroup of its own."""
    base = V1 if (V1 / "memory.limit_in_bytes").exists() else V2
    group = base / f"kvctl-case-{os.getpid()}"
    limit = "memory.limit_in_bytes" if base is V1 else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 * MIB))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")

    def run(allowed: int, *args: object) -> Done:
        (group / limit).write_text(str(allowed))
        enter = ["sh", "-c", 'echo $$ > "$1"; shift; exec "$@"', "sh", str(group / "cgroup.procs")]
        done = subprocess.run(
            [*enter, PROGRAM, *map(str, args)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    yield run
    group.rmdir()


def same(one: Path, other: Path) -> bool:
    return subprocess.run(["cmp", one, other], check=False).returncode == 0


def test_a_model_larger_than_the_cgroup_loads_into_a_folder(limited: Limited, model: Path, tmp_path: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    allowed = 80 * MIB
    assert size > 1.5 * allowed
    done = limited(allowed, "load-weights", model, "--into", "dir:out", "-o", "json")
    assert done.code == 0, done
    assert same(tmp_path / "out" / "model.safetensors", model / "model.safetensors")
    # slices are staged: the arena is cut to what the cgroup leaves
    done = limited(allowed, "load-weights", model, "--into", "dir:ranks", "--tp-size", 2, "-o", "json")
    assert done.code == 0, done
    assert done.document["bytes"] >= size - MIB


def test_a_model_larger_than_the_cgroup_goes_into_a_repo_and_out_again(
    limited: Limited, model: Path, tmp_path: Path
) -> None:
    stores = folders(tmp_path, "a", "b")
    make_repo(stores, stripe=4 * MIB)
    allowed = 80 * MIB
    done = limited(allowed, "push-weights", model, "m", "-r", as_option(stores), "-o", "json")
    assert done.code == 0, done
    done = limited(allowed, "load-weights", "m", "-r", as_option(stores), "--into", "dir:out", "-o", "json")
    assert done.code == 0, done
    assert done.document["verified"]["state"] == "leaves"
    assert same(tmp_path / "out" / "model.safetensors", model / "model.safetensors")


def peak_of(*args: object) -> int:
    """The largest private memory that a run of `kvctl ARGS` was seen with, in bytes. Pages of files do not count."""
    peak = 0
    with subprocess.Popen([PROGRAM, *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            for line in status.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) * 1024)
            time.sleep(0.002)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    return peak


def test_memory_of_our_own_stays_bounded_whatever_the_model_measures(model: Path, tmp_path: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    stores = folders(tmp_path, "a")
    make_repo(stores)
    push(model, stores)
    repo = as_option(stores)
    # what lands where it belongs takes no memory of ours; what is staged takes what it may
    for args, staged in (
        ((model, "--into", "dir:plain"), 0),
        (("m", "-r", repo, "--into", "dir:stored"), 0),
        (("m", "-r", repo, "--into", "dir:ranks", "--tp-size", 4, "--max-in-flight", "32MiB"), 32 * MIB),
        (("m", "-r", repo, "--into", "none", "--max-in-flight", "32MiB"), 32 * MIB),
    ):
        peak = peak_of("load-weights", *args)
        assert peak < staged + 64 * MIB < size, args
    assert same(tmp_path / "stored" / "model.safetensors", model / "model.safetensors")


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


HOST = {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"}


def test_the_budget_follows_the_smallest_cgroup_above(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        **HOST, "proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/memory.max": "1073741824\n",
        "sys/fs/cgroup/pod/memory.current": "268435456\n", "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": "1\n",
    })  # fmt: skip
    assert memory_available(root) == 768 * MIB
    assert staging_budget(256 * MIB, root) == 192 * MIB
    assert staging_budget(64 * MIB, root) == 64 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_that_can_be_dropped_is_no_use(version: int, tmp_path: Path) -> None:
    if version == 2:
        files = {
            "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{1024 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{1020 * MIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 1\nfile 1\ninactive_file {500 * MIB}\nactive_file {400 * MIB}\n",
        }  # fmt: skip
    else:
        files = {
            "proc/self/cgroup": "4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{1024 * MIB}\n",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{1020 * MIB}\n",
            "sys/fs/cgroup/memory/x/memory.stat": (
                f"cache 1\ninactive_file 0\ntotal_cache 1\ntotal_inactive_file {500 * MIB}\n"
                f"total_active_file {400 * MIB}\n"
            ),
        }  # fmt: skip
    assert memory_available(tree(tmp_path, {**HOST, **files})) == 904 * MIB


def test_without_cgroup_or_proc_the_host_or_nothing_limits(tmp_path: Path) -> None:
    assert memory_available(tree(tmp_path, HOST)) == 32 << 30
    assert staging_budget(MIB, str(tmp_path / "none")) == MIB
