"""What checkpoints do to the tokens of a running vLLM: SmolLM2-135M on CPUs, `kvctl bench interference` over it.

    scripts/bench/run interference [--rounds 10] [--seconds 10s] [--streams 4] [--engine-threads N] [--model FOLDER]

Needs nothing that it does not make: the model (as `kvctl demo --llm` makes it, kept in the user's cache), the engine's
environment (scripts/engine-env). In each round, beginning with another one each time: no checkpoint, unpaced ones, one
with the limits below, and plain copies as a script would make them. The limits are fixed here, not tuned by a run.
Writes interference.json and interference.svg beside this file (or under --out), and a Markdown table to stdout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvctl.core.units import parse_size
from scripts.bench.load_weights import machine
from tests.vllm.engines import Engine

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
# fixed before any run: 540 MB then take 22 s at most
LIMITS: Final = {"--min-rate": "24MB", "--max-rate": "96MB", "--latency-budget": "1ms"}
FETCH: Final = """import sys
from kvctl.cli.demo_models import fetch_smollm2
print(fetch_smollm2(lambda text: print(text, file=sys.stderr)))"""
Json = dict[str, Any]  # Any: JSON


def main() -> None:
    options = arguments()
    python = subprocess.run([ROOT / "scripts" / "engine-env"], check=True, stdout=subprocess.PIPE, text=True)
    engine_python = python.stdout.strip()
    folder = options.model or model_of(engine_python)
    options.out.mkdir(parents=True, exist_ok=True)
    host = machine()
    threads = options.engine_threads or max(1, int(host["cores"]) - 1)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with tempfile.TemporaryDirectory(prefix="kvctl-bench-") as place:
        environ = {"OMP_NUM_THREADS": str(threads)}
        log = Path(place) / "engine.log"
        with Engine(Path(folder), log, None, environ=environ, python=engine_python) as engine:
            say(f"starting vLLM on {threads} of {host['cores']} cores ..")
            engine.wait()
            version = str(engine.info()["version"])
            plot = options.out / "interference.svg"
            found = measure(engine.url, f"{place}/checkpoints", plot, options)
    document: Json = {
        "when": started,
        "machine": host,
        "model": Path(folder).name,
        "vllm": {
            "version": version,
            "dtype": "float32",
            "threads": threads,
            "bind": "none: the system places them, beside the rest",
            "streams": options.streams,
        },
        **{name: value for name, value in found.items() if name not in {"engine", "source"}},
    }
    (options.out / "interference.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(document)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--seconds", default="10s", help="of one measurement at least; a paced copy takes what it takes"
    )
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--engine-threads", type=int, help="default: one core is left to the rest")
    parser.add_argument("--model", help="a folder that vLLM can serve (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def model_of(python: str) -> str:
    """SmolLM2-135M-Instruct as the demo makes it, by the engine's environment, which has what that needs."""
    done = subprocess.run([python, "-c", FETCH], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return done.stdout.splitlines()[-1]


def measure(url: str, to: str, plot: Path, options: argparse.Namespace) -> Json:
    command = [
        sys.executable, "-m", "kvctl", "-o", "json", "bench", "interference", f"engine:{url}", "--to", to,
        "--rounds", str(options.rounds), "--seconds", options.seconds, "--streams", str(options.streams),
        *(word for pair in LIMITS.items() for word in pair), "--plot", str(plot),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:  # it has said why
        raise SystemExit(done.returncode)
    found: Json = json.loads(done.stdout)
    return found


def table(document: Json) -> list[str]:
    """Markdown, for the README."""
    host, vllm = document["machine"], document["vllm"]
    lines = [
        (
            f"{document['model']} in {vllm['dtype']} on vLLM {vllm['version']}, {vllm['threads']} of {host['cores']} "
            f"cores ({host['cpu']}), {vllm['streams']} streams; {document['rounds']} interleaved rounds, "
            f"{document['when'][:10]}."
        ),
        "",
        "| while | copies | MB/s | tokens | p50 ms | p99 ms | p99 change ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in document["kinds"]:
        speed = f"{kind['bytes'] / 1e6 / kind['busy_s']:.0f}" if kind["busy_s"] else ""
        change = f"{1e3 * kind['change_s']:+.1f}" if kind["copies"] else ""
        lines.append(
            f"| {kind['name']} | {kind['copies'] or ''} | {speed} | {kind['samples']:,} | {1e3 * kind['p50_s']:.1f} "
            f"| {1e3 * kind['p99_s']:.1f} | {change} |"
        )
    return [*lines, "", verdict(document)]


def verdict(document: Json) -> str:
    (paced,) = (kind for kind in document["kinds"] if kind["name"] == "paced")
    paces: Sequence[Json] = paced["pacing"]
    slowest = min(pace["mean_rate"] for pace in paces)
    missed, backoffs, windows = (sum(pace[name] for pace in paces) for name in ("budget_missed", "backoffs", "windows"))
    least, share = parse_size(LIMITS["--min-rate"]), document["paced_of_unpaced"]
    of = (
        "The unpaced ones did not change the p99"
        if share is None
        else f"The paced change is {share:.2f} of the unpaced"
    )
    within = "within" if document["within_baseline_spread"] else "beyond"
    return (
        f"{of}; the paced one is {within} what the baseline's own p99 varies by between rounds "
        f"({1e3 * document['baseline_spread_s']:.1f} ms). Asked for, beforehand: {least / 1e6:.0f} MB/s at least, and "
        f"a p99 of {LIMITS['--latency-budget']} at most over that of the 5 s before. Done: {slowest / 1e6:.1f} MB/s "
        f"and more ({'kept' if slowest >= least else 'not kept'}); the budget was missed by {missed} of {len(paces)}; "
        f"{backoffs} back-offs in {windows} windows."
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
