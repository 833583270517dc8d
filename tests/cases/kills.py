"""kill -9 in the middle of a command, and what must hold afterwards. Used by the tests with a few points, by the soak
with many.

After each kill: `check --read-data all` finds no problem, only garbage; the command run again succeeds; the model's
bytes are right; and gc (grace 0) leaves no garbage.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvctl.core.addresses import StoreConfig
from kvctl.core.errors import KvctlError
from kvctl.repo.admin import CheckOptions, check_repo, gc_repo
from kvctl.repo.check import CheckResult, Share
from kvctl.repo.gc import GcOptions
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.weights.load import run_load
from kvctl.weights.models import remove_model
from kvctl.weights.request import LoadRequest
from tests.cases.world import as_option, files_of, folders, kvctl, make_repo, push, quick

ROOT = Path(__file__).resolve().parents[2]
SHAPE = LlamaShape(layers=2, hidden=256, heads=4, kv_heads=4, head_dim=64, inner=704, vocab=1024)
STRIPE = 512 * 1024
COMMANDS = ("push-weights", "load-weights", "gc")


@dataclass
class World:
    """A repo of three folders, two copies of each chunk, and a model beside it."""

    root: Path
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def stores(self) -> list[StoreConfig]:
        return folders(self.root, "a", "b", "c")

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @classmethod
    def make(cls, root: Path, command: str) -> World:
        """The state before `command`: for a push a related model is there, for gc one that was removed."""
        world = cls(root)
        world.files = write_llama(str(world.model), SHAPE, shards=2, seed=1)
        make_repo(world.stores, replicas=2, stripe=STRIPE)
        if command == "push-weights":
            other = LlamaShape(layers=1, hidden=256, heads=4, kv_heads=4, head_dim=64, inner=704, vocab=1024)
            write_llama(str(root / "other"), other, seed=1)
            push(root / "other", world.stores, "other")
        else:
            push(world.model, world.stores)
        if command == "gc":
            write_llama(str(root / "other"), SHAPE, shards=3, seed=2)
            push(root / "other", world.stores, "other")
            remove_model(world.stores, ["other"], quick())
        return world

    def arguments(self, command: str) -> list[str]:
        repo = ["-r", as_option(self.stores), "-q", "-o", "json"]
        if command == "push-weights":
            return [command, str(self.model), "m", *repo]
        if command == "load-weights":
            return [command, "m", "--into", f"dir:{self.out}", *repo]
        return ["repo", "gc", "--grace", "0s", "-y", *repo]

    def check(self) -> CheckResult:
        return check_repo(self.stores, quick(), CheckOptions(Share()))


def start(arguments: Sequence[str], point: int, count: Path) -> tuple[int, str]:
    """How the command ended that was to be killed at `point`, and what it said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVCTL_STATE_DIR": str(count.parent / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cases.killed", str(point), str(count), *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def scratch(fallback: Path) -> Path:
    """A folder for many worlds: in memory where there is room, since every change there is synced to disk."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30:
        return Path(tempfile.mkdtemp(prefix="kvctl-kills-", dir=memory))
    return fallback


def points(command: str, root: Path, count: int, seed: int) -> tuple[int, list[int]]:
    """(how many points there are, `count` of them drawn from `seed`): the run that is not killed tells. Leaves the
    world before the command in `root`/template.
    """
    template = World.make(root / "template", command)
    shutil.copytree(template.root, root / "counted")
    world = World(root / "counted", template.files)
    code, said = start(world.arguments(command), 0, root / "count")
    assert code == 0, said
    total = int((root / "count").read_text())
    shutil.rmtree(root / "counted")
    return total, sorted(random.Random(f"{command}/{seed}").sample(range(1, total + 1), min(count, total)))


def kill(command: str, point: int, root: Path) -> bool:
    """Kill the command at the point; True when the point was reached. Raises AssertionError for what must not be."""
    shutil.copytree(root / "template", root / str(point))
    world = World(root / str(point), files_of(root / "template" / "model"))
    code, said = start(world.arguments(command), point, root / "count")
    assert code in {0, -signal.SIGKILL}, said
    after = world.check()
    assert after.problems == [], after.problems
    if command == "load-weights":
        assert not world.out.exists() or files_of(world.out) == world.files
    # both orders: what a kill left is collected before, or after, the command has run again
    steps: list[Callable[[World, str], None]] = [again, collected]
    if point % 2:
        steps.reverse()
    for step in steps:
        step(world, command)
    if command == "gc":
        collected(world, command)
    loaded(world)
    shutil.rmtree(world.root)
    return code != 0


def again(world: World, command: str) -> None:
    done = kvctl(*world.arguments(command))
    assert done.code == 0, done.err
    if command == "load-weights":
        assert files_of(world.out) == world.files
        left = [item.name for item in world.root.iterdir() if item.name.startswith(".")]
        assert left == [], left


def collected(world: World, command: str) -> None:
    """gc with no grace takes all that the dead left behind, at once."""
    gc_repo(world.stores, quick(), GcOptions(grace=0))
    result = world.check()
    assert result.problems == [], result.problems
    assert {name: count for name, count in result.garbage.items() if count} == {}


def loaded(world: World) -> None:
    """The model is whole: its files are rebuilt bit for bit."""
    target = world.root / "again"
    run_load(LoadRequest("m", repo=tuple(world.stores), into=f"dir:{target}", verify="full"), quick())
    assert files_of(target) == world.files


def explain(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, (AssertionError, KvctlError)) else repr(error)
