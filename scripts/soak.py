"""Long runs of the seeded tests; see scripts/soak. A result is {name, seeds, runs, failures, seconds, machine}."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Outcome:
    """`failures` say which seed or point failed, and how."""

    seeds: list[int]
    runs: int = 0
    failures: list[dict[str, object]] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)


def kills(command: str) -> Callable[[int, int], Outcome]:
    """kill -9 at `runs` points of the command."""

    def soak(runs: int, seed: int) -> Outcome:
        from tests.cases.kills import explain, kill, points, scratch

        outcome = Outcome([seed])
        with _own_home() as home:
            root = scratch(home)
            try:
                total, chosen = points(command, root, runs, seed)
                killed = 0
                for point in chosen:
                    try:
                        killed += kill(command, point, root)
                    except Exception as error:
                        outcome.failures.append({"point": point, "error": explain(error)})
                    outcome.runs += 1
                    _say(f"{command}: point {point} of {total}, {outcome.runs}/{len(chosen)} done")
                outcome.facts = {"points": chosen, "points_there": total, "killed": killed}
            finally:
                shutil.rmtree(root, ignore_errors=True)
        return outcome

    return soak


def pytest_with(arguments: Callable[[int], Iterable[str]]) -> Callable[[int, int], Outcome]:
    """`runs` runs of pytest, each with the arguments for its seed."""

    def soak(runs: int, seed: int) -> Outcome:
        outcome = Outcome(list(range(seed, seed + runs)))
        for number in outcome.seeds:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments(number)],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            outcome.runs += 1
            if done.returncode:
                outcome.failures.append({"seed": number, "error": done.stdout[-2000:]})
            _say(
                f"seed {number}: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]}"
            )
        return outcome

    return soak


def swaps(runs: int, seed: int) -> Outcome:
    """`runs` swaps of an agent's slot."""
    from dataclasses import asdict

    from tests.agent.swaps import Marathon

    outcome = Outcome([seed], runs)
    with _own_home() as home, tempfile.TemporaryDirectory(prefix="kvswaps-") as place:
        try:
            outcome.facts = asdict(Marathon(Path(place), home, seed).run(runs, kill_agents=0.01))
        except Exception as error:
            outcome.failures.append({"seed": seed, "error": f"{type(error).__name__}: {error}"})
    return outcome


def engine_swaps(runs: int, seed: int) -> Outcome:
    """`runs` swaps of a real vLLM under requests."""
    outcome = Outcome([seed], runs)
    done = subprocess.run(
        [ROOT / "scripts" / "hot_swap", str(runs)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        outcome.facts = json.loads(lines[-1])
    if done.returncode:
        outcome.failures.append({"seed": seed, "error": "\n".join(lines[-5:]) or f"it ended with {done.returncode}"})
    return outcome


HYPOTHESIS = ("tests/weights", "tests/repo/test_repo_pure.py", "tests/cases/test_any_model.py")
SOAKS: dict[str, tuple[Callable[[int, int], Outcome], int]] = {
    "kill-push-weights": (kills("push-weights"), 50),
    "kill-load-weights": (kills("load-weights"), 50),
    "kill-gc": (kills("gc"), 50),
    "hypothesis": (
        pytest_with(lambda seed: [*HYPOTHESIS, f"--hypothesis-seed={seed}"]), 20,
    ),
    "gc-interleavings": (pytest_with(lambda _: ["-m", "slow", "tests/repo/test_gc_interleavings.py"]), 1),
    "swaps": (swaps, 1000),
    "engine-swaps": (engine_swaps, 200),
    "slow-endpoint": (pytest_with(lambda _: ["tests/cases/test_slow_endpoint.py"]), 20),
}  # fmt: skip


@contextmanager
def _own_home() -> Iterator[Path]:
    """A home without anybody's configuration or credentials."""
    with tempfile.TemporaryDirectory(prefix="kvctl-soak-") as folder:
        for name in [name for name in os.environ if name.startswith(("AWS_", "KVCTL_", "XDG_"))]:
            del os.environ[name]
        os.environ |= {"HOME": folder, "KVCTL_STATE_DIR": f"{folder}/state"}
        yield Path(folder)


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOAKS)} (default: all)")
    parser.add_argument("--runs", type=int, help="runs, points or seeds (default: each one's own)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "soak")
    options = parser.parse_args()
    if unknown := set(options.names) - SOAKS.keys():
        parser.error(f"no soak is called {', '.join(sorted(unknown))}")
    options.out.mkdir(exist_ok=True)
    failed = 0
    for name in options.names or SOAKS:
        soak, runs = SOAKS[name]
        started = time.monotonic()
        outcome = soak(options.runs or runs, options.seed)
        document = {
            "name": name,
            "seeds": outcome.seeds,
            "runs": outcome.runs,
            "failures": outcome.failures,
            "seconds": round(time.monotonic() - started, 1),
            "machine": machine(),
            **outcome.facts,
        }
        (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        _say(f"{name}: {outcome.runs} runs, {len(outcome.failures)} failures")
        failed += len(outcome.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
