"""Time to first token of a real vLLM: computed, from its own prefix cache, restored from host memory (a repo on tmpfs),
files, S3 (SeaweedFS) and two storage nodes; and what a running stream feels while others restore.

    scripts/bench/run engine [--model tiny,smollm2,FOLDER] [--places memory,files,s3,nodes] [--out FILE]
                             [--tokens 512,1024,..] [--rounds 100] [--concurrency 1,4] [--others 24]

One engine per model and place, one after the other; in each the ways are interleaved round by round: the same prompt
from the engine's own cache, restored, and in one of four or seven rounds computed. Of computed, which has nothing to do
with the place, all places' samples count together. `rounds` are requests of each way: four at once make a quarter of
the rounds. smollm2 is SmolLM2-135M-Instruct as `scripts/demo --llm` leaves it in its cache. JSON to stdout (or --out),
the tables by `scripts.bench.engine_table`, progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parent.parent.parent
PLACES = ("memory", "files", "s3", "nodes")
SHORT: Final = (32, 64, 96, 128, 192, 256, 384, 512)  # tokens; among these the crossover is looked for
SHORT_ROUNDS: Final = 20
BASE: Final = 16  # tokens; computing them takes what any request takes


@dataclass(frozen=True, slots=True)
class Plan:
    """`cold_every`: rounds. `others`: prompts that come in beside a stream, 0 for no stream."""

    tokens: tuple[int, ...]
    rounds: int
    widths: tuple[int, ...]
    cold_every: int
    others: int


TINY: Final = Plan((512, 1024, 2048, 4096, 8192), 100, (1, 4), 4, 24)
LARGER: Final = Plan((512, 1024, 2048), 20, (1,), 7, 0)  # a prompt of 2,048 takes seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny,smollm2", help="tiny, smollm2, or folders that vLLM can serve")
    parser.add_argument("--tokens", help="lengths of prompts (default: tiny 512 to 8192, others 512 to 2048)")
    parser.add_argument("--rounds", type=int, help="requests of each way (default: tiny 100, others 20)")
    parser.add_argument("--concurrency", help="how many at once (default: tiny 1,4, others 1)")
    parser.add_argument("--others", type=int, help="prompts beside a stream (default: tiny 24, others 0)")
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    try:
        import vllm  # noqa: F401
    except ImportError:
        python = subprocess.run([ROOT / "scripts" / "engine-env"], check=True, stdout=subprocess.PIPE, text=True)
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(python.stdout.strip(), [python.stdout.strip(), *sys.argv])
    sys.path.insert(0, str(ROOT))
    result: dict[str, Any] = {"schema": "kvctl.bench-engine/1", "models": {}}  # Any: JSON
    for name in chosen.model.split(","):
        result["models"][Path(name).name] = run(name, chosen)
        text = json.dumps(result, indent=1) + "\n"
        if chosen.out:
            chosen.out.write_text(text, encoding="utf-8")
    if not chosen.out:
        print(text, end="")


def plan_of(name: str, chosen: argparse.Namespace) -> Plan:
    own = TINY if name == "tiny" else LARGER
    return Plan(
        own.tokens if chosen.tokens is None else numbers(chosen.tokens),
        own.rounds if chosen.rounds is None else chosen.rounds,
        own.widths if chosen.concurrency is None else numbers(chosen.concurrency),
        own.cold_every,
        own.others if chosen.others is None else chosen.others,
    )


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def run(name: str, chosen: argparse.Namespace) -> dict[str, Any]:  # Any: JSON
    from kvctl.kv.advise import group_costs
    from kvctl.kv.geometry import groups_of
    from scripts.bench.engine_table import advice, spread

    plan, began = plan_of(name, chosen), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvctl-bench-") as place:
        root = Path(place)
        folder = model_folder(name, root)
        found: dict[str, Any] = {
            "model": Path(name).name,
            "dtype": "float32",
            "cores": len(os.sched_getaffinity(0)),
            "rounds": plan.rounds,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "computed": {},
            "places": {},
        }
        computed: dict[tuple[int, int], list[float]] = {}
        for where in chosen.places.split(","):
            with repo_at(where, root / where) as (repo, environ):
                found["places"][where] = measure(folder, repo, environ, root / f"{where}.log", plan, computed)
        for (tokens, width), times in computed.items():
            found["computed"].setdefault(str(tokens), {})[str(width)] = spread(times)
        groups = group_costs(groups_of(json.loads((folder / "config.json").read_text()), dtype="F32"), "F32")
        found["advice"] = {where: advice(groups, rows) for where, rows in found["places"].items()}
        found["seconds"] = round(time.monotonic() - began, 1)
    return found


def model_folder(name: str, root: Path) -> Path:
    from kvctl.cli.demo_models import SMOLLM2, cached
    from tests.vllm import tiny

    if name == "tiny":  # 19 million parameters
        return tiny.make(root / "model", layers=4, hidden=256, vocab_size=32000)
    folder = Path(cached(SMOLLM2)) if name == "smollm2" else Path(name)
    if not (folder / "config.json").exists():
        hint = ": `scripts/demo --llm` makes it, once" if name == "smollm2" else ""
        raise SystemExit(f"there is no model in {folder}{hint}")
    return folder


@contextmanager
def repo_at(name: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(repo, environment of the engine)."""
    from kvctl.core.addresses import StoreConfig
    from kvctl.testing.nodes import NodeProcess
    from kvctl.testing.seaweed import SeaweedFS
    from tests.vllm.conftest import CREDENTIALS, repo_over

    folder.mkdir()
    if name == "s3":
        os.environ.update(CREDENTIALS)
        with SeaweedFS.launch(str(folder)) as server:
            server.wait()
            yield repo_over([server.store("bench", "kv")]), dict(CREDENTIALS)
    elif name == "nodes":
        started = []
        try:
            for number in range(2):
                own = folder / str(number)
                own.mkdir()
                started.append(NodeProcess.start(str(own), keys=False))
            yield repo_over([node.store("kv") for node in started]), {}
        finally:
            for node in started:
                node.close()
    elif name == "memory":
        with tempfile.TemporaryDirectory(prefix="kvctl-bench-", dir="/dev/shm") as shm:
            yield repo_over([StoreConfig(f"file://{shm}/repo")]), {}
    else:
        yield repo_over([StoreConfig(f"file://{folder}/repo")]), {}


def measure(
    model: Path,
    repo: str,
    environ: dict[str, str],
    log: Path,
    plan: Plan,
    computed: dict[tuple[int, int], list[float]],
) -> dict[str, Any]:  # Any: JSON
    """`computed` gets this place's samples too, by (tokens, at once)."""
    from tests.vllm import tiny
    from tests.vllm.engines import Engine

    longest = max(*plan.tokens, *SHORT) + 64
    extra = ["--max-model-len", str(longest), "--max-num-batched-tokens", "2048"]
    settings = {"repo": repo, "push": "ask", "min_tokens": BASE}
    began = time.monotonic()
    found: dict[str, Any] = {"tokens": {}}
    with Engine(model, log, settings, extra=extra, environ=environ) as engine:
        engine.wait()
        found["start_s"] = round(time.monotonic() - began, 1)
        for tokens in plan.tokens:
            prompts = [tiny.tokens(tokens, 1000 * tokens + number) for number in range(max(plan.widths))]
            store(engine, prompts)
            for width in plan.widths:
                own = computed.setdefault((tokens, width), [])
                rows = ways(engine, prompts[:width], -(-plan.rounds // width), plan.cold_every, own)
                found["tokens"].setdefault(str(tokens), {})[str(width)] = rows
                say(log.stem, tokens, width, rows)
        found |= crossover(engine)
        found["stream"] = stream(engine, min(plan.tokens[-1], 2048), plan.others) if plan.others else None
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def store(engine: Any, prompts: Sequence[Sequence[int]]) -> None:  # Any: an Engine, imported late
    before = engine.info()["kv"]["stores"]
    for prompt in prompts:
        engine.complete(prompt, 1, kvctl={"push": True, "pull": False})
    engine.stored(before + len(prompts))


def ways(
    engine: Any, prompts: Sequence[Sequence[int]], rounds: int, cold_every: int, computed: list[float]
) -> dict[str, Any]:  # Any: an Engine; JSON
    """Times to first token of these stored prompts at once, in seconds."""
    from scripts.bench.engine_table import spread

    def cold(prompt: Sequence[int]) -> None:
        engine.complete(prompt, 1, kvctl={"push": False, "pull": False})

    def restored(prompt: Sequence[int]) -> None:
        engine.complete(prompt, 1, kvctl={"push": False})

    times: dict[str, list[float]] = {"computed": [], "own cache": [], "restored": []}
    start = engine.info()["kv"]
    for number in range(rounds):
        if number % cold_every == 0:
            engine.reset()
            times["computed"] += at_once(cold, prompts)
        times["own cache"] += at_once(cold, prompts)
        engine.reset()
        times["restored"] += at_once(restored, prompts)
    end = engine.info()["kv"]
    computed += times["computed"]
    grown = {name: end[name] - start[name] for name in ("needed", "fetched", "tokens", "lost")}
    count = rounds * len(prompts)
    return {
        **{way: spread(values) for way, values in times.items()},
        "fetched_per_needed": grown["fetched"] / grown["needed"] if grown["needed"] else None,
        "restored_tokens": grown["tokens"] / count,
        "lost_tokens": grown["lost"],
        "bytes_per_restore": grown["needed"] / count,
    }


def crossover(engine: Any) -> dict[str, Any]:  # Any: an Engine; JSON
    """Computed and restored at growing short lengths, until restoring has won at two of them; and `base`."""
    from scripts.bench.engine_table import spread
    from tests.vllm import tiny

    def once(prompt: Sequence[int], *, pull: bool) -> float:
        engine.reset()
        return at_once(lambda own: engine.complete(own, 1, kvctl={"push": False, "pull": pull}), [prompt])[0]

    least = tiny.tokens(BASE, 1)
    once(least, pull=False)
    found: dict[str, Any] = {"base": spread([once(least, pull=False) for _ in range(SHORT_ROUNDS)]), "crossover": {}}
    won = 0
    for tokens in SHORT:
        prompt = tiny.tokens(tokens, 1000 * tokens)
        store(engine, [prompt])
        times: dict[str, list[float]] = {"computed": [], "restored": []}
        for _ in range(SHORT_ROUNDS):
            times["computed"].append(once(prompt, pull=False))
            times["restored"].append(once(prompt, pull=True))
        row = found["crossover"][str(tokens)] = {way: spread(values) for way, values in times.items()}
        won = won + 1 if row["restored"]["p50"] < row["computed"]["p50"] else 0
        if won == 2:
            break
    return found


def at_once(call: Callable[[Sequence[int]], object], prompts: Sequence[Sequence[int]]) -> list[float]:
    times = [0.0] * len(prompts)

    def one(number: int) -> None:
        started = time.perf_counter()
        call(prompts[number])
        times[number] = time.perf_counter() - started

    if len(prompts) == 1:
        one(0)
        return times
    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def stream(engine: Any, tokens: int, count: int) -> dict[str, Any]:  # Any: an Engine; JSON
    """Inter-token times of a running stream: alone, beside restores, beside prompts as long that are computed. Each is
    new to the engine, whose cache cannot be reset while a stream runs.
    """
    from kvctl.core.context import Context
    from kvctl.engines.registry import open_engine
    from scripts.bench.engine_table import spread
    from tests.vllm import tiny

    adapter = open_engine(engine.url, Context())
    prompts = [tiny.tokens(tokens, 7_000_000 + number) for number in range(count)]
    fresh = [tiny.tokens(tokens, 8_000_000 + number) for number in range(count)]
    store(engine, prompts)
    engine.reset()
    found: dict[str, Any] = {"tokens": tokens}
    adapter.samples(0)
    for name, others, ask in (
        ("alone", [], {}),
        ("beside restores", prompts, {"push": False}),
        ("beside computing", fresh, {"push": False, "pull": False}),
    ):
        over = threading.Event()
        began = adapter.samples(0).until

        def listen(over: threading.Event = over) -> None:
            engine.complete(tiny.tokens(16, 1), 200, kvctl={"push": False})
            over.set()

        listener = threading.Thread(target=listen)
        listener.start()
        done = 0
        for prompt in others:
            if over.is_set():
                break
            engine.complete(prompt, 1, kvctl=ask)
            done += 1
        listener.join()
        gaps = [sample.gap for sample in adapter.samples(began).samples]
        found[name] = {**spread(gaps), "max": max(gaps), "others": done}
    adapter.close()
    return found


def say(place: str, tokens: int, width: int, rows: dict[str, Any]) -> None:  # Any: JSON
    shown = "  ".join(
        f"{way} {1e3 * rows[way]['p50']:.0f}/{1e3 * rows[way]['p99']:.0f}"
        for way in ("computed", "own cache", "restored")
    )
    print(
        f"{place:7} {tokens:6} x{width}  ms p50/p99: {shown}  fetched/needed {rows['fetched_per_needed']}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
