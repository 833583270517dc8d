"""Time to first token of a real vLLM: computed, from its own prefix cache, restored from host memory (a repo on tmpfs),
files, S3 (SeaweedFS) and two storage nodes; and what a running stream feels while others restore.

    scripts/bench/engine.py [--model tiny|FOLDER] [--tokens 512,1024,..] [--rounds 100] [--places memory,files,s3,nodes]

One engine per place, one after the other; in each the three ways are interleaved round by round: the same prompt cold,
again from the engine's own cache, and restored. `computed` runs in one round of ten, since it takes longest. JSON to
stdout (or --out), a table to stderr. Needs scripts/engine-env; runs itself in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PLACES = ("memory", "files", "s3", "nodes")
COLD_EVERY = 10  # rounds
OTHERS = 24  # requests beside a stream, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a folder that vLLM can serve")
    parser.add_argument("--tokens", default="64,128,256,512,1024,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--out")
    chosen = parser.parse_args()
    try:
        import vllm  # noqa: F401
    except ImportError:
        python = subprocess.run([ROOT / "scripts" / "engine-env"], check=True, stdout=subprocess.PIPE, text=True)
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(python.stdout.strip(), [python.stdout.strip(), *sys.argv])
    sys.path.insert(0, str(ROOT))
    result = run(chosen)
    text = json.dumps(result, indent=1)
    if chosen.out:
        Path(chosen.out).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    from tests.vllm import tiny

    sizes = [int(part) for part in chosen.tokens.split(",")]
    with tempfile.TemporaryDirectory(prefix="kvctl-bench-") as place:
        root = Path(place)
        # 19 million parameters
        folder = (
            tiny.make(root / "model", layers=4, hidden=256, vocab_size=32000)
            if chosen.model == "tiny"
            else Path(chosen.model)
        )
        found: dict[str, Any] = {
            "model": chosen.model,
            "dtype": "float32",
            "cores": os.cpu_count(),
            "rounds": chosen.rounds,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "places": {},
        }
        for name in chosen.places.split(","):
            with repo_at(name, root / name) as (repo, environ):
                found["places"][name] = measure(folder, repo, environ, root / f"{name}.log", sizes, chosen)
        found["advice"] = advice(folder, found)
    return found


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
    model: Path, repo: str, environ: dict[str, str], log: Path, sizes: Sequence[int], chosen: argparse.Namespace
) -> dict[str, Any]:
    from tests.vllm.engines import Engine

    longest = max(sizes) + 64
    extra = ["--max-model-len", str(longest), "--max-num-batched-tokens", "2048"]
    settings = {"repo": repo, "push": "ask", "min_tokens": 16}
    found: dict[str, Any] = {"tokens": {}}
    with Engine(model, log, settings, extra=extra, environ=environ) as engine:
        engine.wait()
        for tokens in sizes:
            for width in (int(part) for part in chosen.concurrency.split(",")):
                rows = ways(engine, tokens, width, chosen.rounds)
                found["tokens"].setdefault(str(tokens), {})[str(width)] = rows
                say(log.stem, tokens, width, rows)
        found["stream"] = stream(engine, min(sizes[-1], 2048))
    return found


def ways(engine: Any, tokens: int, width: int, rounds: int) -> dict[str, Any]:
    """Times to first token of `width` requests at once, in seconds."""
    from tests.vllm import tiny

    prompts = [tiny.tokens(tokens, 1000 * tokens + number) for number in range(width)]
    before = engine.info()["kv"]["stores"]
    for prompt in prompts:
        engine.complete(prompt, 1, kvctl={"push": True, "pull": False})
    engine.stored(before + width)

    def cold(prompt: Sequence[int]) -> None:
        engine.complete(prompt, 1, kvctl={"push": False, "pull": False})

    def restored(prompt: Sequence[int]) -> None:
        engine.complete(prompt, 1, kvctl={"push": False})

    times: dict[str, list[float]] = {"computed": [], "own cache": [], "restored": []}
    needed = fetched = wanted = lost = 0
    for number in range(rounds):
        if number % COLD_EVERY == 0:
            engine.reset()
            times["computed"] += at_once(cold, prompts)
        times["own cache"] += at_once(cold, prompts)
        engine.reset()
        start = engine.info()["kv"]
        times["restored"] += at_once(restored, prompts)
        end = engine.info()["kv"]
        needed += end["needed"] - start["needed"]
        fetched += end["fetched"] - start["fetched"]
        wanted += end["tokens"] - start["tokens"]
        lost += end["lost"] - start["lost"]
    return {
        **{way: spread(values) for way, values in times.items()},
        "fetched_per_needed": fetched / needed if needed else None,
        "restored_tokens": wanted / (rounds * width),
        "lost_tokens": lost,
        "bytes_per_restore": needed / (rounds * width),
    }


def at_once(call: Callable[[Sequence[int]], None], prompts: Sequence[Sequence[int]]) -> list[float]:
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


def stream(engine: Any, tokens: int) -> dict[str, Any]:
    """Inter-token times of a running stream: alone, beside restores, beside prompts as long that are computed. Each is
    new to the engine, whose cache cannot be reset while a stream runs.
    """
    from kvctl.core.context import Context
    from kvctl.engines.registry import open_engine
    from tests.vllm import tiny

    adapter = open_engine(engine.url, Context())
    prompts = [tiny.tokens(tokens, 7_000_000 + number) for number in range(OTHERS)]
    fresh = [tiny.tokens(tokens, 8_000_000 + number) for number in range(OTHERS)]
    before = engine.info()["kv"]["stores"]
    for prompt in prompts:
        engine.complete(prompt, 1, kvctl={"push": True, "pull": False})
    engine.stored(before + len(prompts))
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
        count = 0
        for prompt in others:
            if over.is_set():
                break
            engine.complete(prompt, 1, kvctl=ask)
            count += 1
        listener.join()
        gaps = [sample.gap for sample in adapter.samples(began).samples]
        found[name] = {**spread(gaps), "max": max(gaps), "others": count}
    adapter.close()
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def advice(model: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The length from which restoring was faster, and what `kv advise` makes of the measured inputs: the fitted
    prefill, and the speed of the longest and the shortest restore.
    """
    from kvctl.kv.advise import Prefill, Restore, break_even, group_costs
    from kvctl.kv.geometry import groups_of

    groups = group_costs(groups_of(json.loads((model / "config.json").read_text()), dtype="F32"), "F32")
    out: dict[str, Any] = {}
    for place, rows in found["places"].items():
        alone = {int(tokens): by_width["1"] for tokens, by_width in rows["tokens"].items() if "1" in by_width}
        if len(alone) < 2:
            continue
        prefill = Prefill.fitted([(tokens, row["computed"]["p50"]) for tokens, row in alone.items()])
        short, long = min(alone), max(alone)
        seconds = alone[long]["restored"]["p50"] - alone[short]["restored"]["p50"]
        moved = alone[long]["bytes_per_restore"] - alone[short]["bytes_per_restore"]
        bandwidth = max(moved / seconds, 1.0) if seconds > 0 else 1e12
        latency = max(0.0, alone[short]["restored"]["p50"] - alone[short]["bytes_per_restore"] / bandwidth)
        wins = [tokens for tokens, row in alone.items() if row["restored"]["p50"] < row["computed"]["p50"]]
        out[place] = {
            "measured_from": min(wins) if wins else None,
            "advised_from": break_even(groups, Restore(bandwidth, latency), prefill, longest=1 << 20),
            "bandwidth": bandwidth,
            "latency_s": latency,
            "prefill": {"linear_s": prefill.linear, "quadratic_s": prefill.quadratic},
        }
    return out


def say(place: str, tokens: int, width: int, rows: dict[str, Any]) -> None:
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
