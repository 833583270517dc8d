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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvctl.testing.nodes import NodeProcess

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


def interference(runs: int, seed: int) -> Outcome:
    """`runs` rounds of scripts/bench/interference.py in its short form, on the model and the engine of the long one."""
    outcome = Outcome([seed], runs)
    with tempfile.TemporaryDirectory(prefix="kvinterference-") as place:
        done = subprocess.run(
            [ROOT / "scripts" / "bench" / "run", "interference", "--rounds", str(runs), "--out", place],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            outcome.failures.append({"seed": seed, "error": done.stderr[-2000:]})
        else:
            outcome.facts = {"bench": json.loads((Path(place) / "interference.json").read_text(encoding="utf-8"))}
    return outcome


def node(runs: int, seed: int) -> Outcome:
    """A storage node under load for `runs` minutes, restarted twice: by SIGTERM after a third, by SIGKILL after two."""
    from kvctl.testing.nodes import NodeProcess
    from tests.node.load import Load, run_load

    outcome = Outcome([seed], runs)
    clients, seconds, samples = 64, runs * 60.0, list[dict[str, float]]()
    started = time.monotonic()
    with _own_home() as home:
        (home / "node").mkdir()
        nodes = [NodeProcess.start(str(home / "node"))]

        def between(load: Load) -> None:
            ends = ["kill", "terminate"]
            while (passed := time.monotonic() - started) < seconds and not load.wrong:
                if ends and passed > (3 - len(ends)) * seconds / 3:
                    if ends.pop() == "kill":
                        nodes[-1].kill()
                    else:
                        nodes[-1].terminate(120)
                    nodes.append(NodeProcess.start(str(home / "node"), port=nodes[0].port))
                with suppress(OSError):  # it may be too busy to tell
                    samples.append(_node_sample(nodes[-1], passed, load.done))
                    _say(f"node: {samples[-1]}")
                time.sleep(seconds / 20)

        try:
            load = run_load(nodes[0], clients, lambda _: time.monotonic() - started < seconds, between, seed=seed)
            last = nodes[-1].metrics()
        finally:
            for item in nodes:
                item.close()
        temps = [path.name for path in (home / "node" / "data").rglob("*.kvctl-tmp")]
    outcome.failures += [{"seed": seed, "error": text} for text in load.wrong]
    if len(temps) > clients:  # the kill may have met each client's upload between its temp name and its own
        outcome.failures.append({"seed": seed, "error": f"{len(temps)} temp files were left: {temps[:5]}"})
    # the last process, warmed up, against its end; up to 256 objects are kept open for a second
    own = [sample for sample in samples if sample["seconds"] > seconds * 0.75]
    for name, slack in (("node_rss", 16e6), ("node_fds", 320), ("client_rss", 32e6), ("client_fds", 64)):
        if len(own) > 1 and own[-1][name] > own[0][name] + slack:
            outcome.failures.append({"seed": seed, "error": f"{name} grew from {own[0][name]} to {own[-1][name]}"})
    errors = {name: value for name, value in last.items() if 'status="5' in name}
    outcome.facts = {
        "clients": clients, "turns": load.done, "broken_off": load.aborted, "restarts": len(nodes) - 1,
        "temp_files": len(temps), "errors_of_the_last_process": errors, "samples": samples,
    }  # fmt: skip
    return outcome


def _node_sample(running: NodeProcess, passed: float, turns: int) -> dict[str, float]:
    """Memory in bytes and descriptors of the node and of this process, which is all the clients."""
    from kvctl.node.metrics import resident_bytes

    metrics = running.metrics()
    return {
        "seconds": round(passed, 1), "turns": turns,
        "node_rss": metrics["process_resident_memory_bytes"], "node_fds": metrics["process_open_fds"],
        "client_rss": resident_bytes(), "client_fds": len(os.listdir("/proc/self/fd")),
    }  # fmt: skip


HYPOTHESIS = ("tests/weights", "tests/repo/test_repo_pure.py", "tests/cases/test_any_model.py")
SOAKS: dict[str, tuple[Callable[[int, int], Outcome], int]] = {
    "kill-push-weights": (kills("push-weights"), 50),
    "kill-load-weights": (kills("load-weights"), 50),
    "kill-gc": (kills("gc"), 50),
    "hypothesis": (
        pytest_with(lambda seed: [*HYPOTHESIS, f"--hypothesis-seed={seed}"]), 20,
    ),
    "gc-interleavings": (pytest_with(lambda _: ["-m", "slow", "tests/repo/test_gc_interleavings.py"]), 1),
    "node": (node, 10),
    "swaps": (swaps, 1000),
    "engine-swaps": (engine_swaps, 200),
    "interference": (interference, 3),
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
