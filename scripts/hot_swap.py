"""See scripts/hot_swap."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvctl.core.context import Context
from kvctl.engines.api import EngineAdapter, SwapRequest
from kvctl.engines.registry import open_engine

DAY = 86_400.0
WARM = 4  # swaps before memory is measured: allocators keep what they got
SPARE = 64 << 20  # bytes of memory that the rest may add


def swap_often(
    adapter: EngineAdapter, pair: tuple[str, str], count: int, check: Callable[[int], None]
) -> dict[str, object]:
    """`check(n)`: after swap n, whose weights are pair[(n + 1) % 2]."""
    whole, paused = [], []
    for number in range(count):
        address = pair[(number + 1) % 2]
        started = time.monotonic()
        done = adapter.swap(SwapRequest(address))
        whole.append(time.monotonic() - started)
        paused.append(done.paused)
        check(number)
        steps = "  ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in done.steps.items())
        print(
            f"{number + 1:4}  {whole[-1]:6.2f} s, paused {done.paused:5.2f} s  [ms: {steps}]  {done.source}", flush=True
        )
    middle, slowest, pause = statistics.median(whole), max(whole), statistics.median(paused)
    print(
        f"{count} swaps: median {middle:.2f} s, slowest {slowest:.2f} s, paused {pause:.2f} s in the median; one"
        f" after the other that is {DAY / middle:,.0f} a day"
    )
    return {"swaps": count, "median_s": middle, "slowest_s": slowest, "paused_s": pause}


def running(url: str, first: str, second: str, count: str = "10") -> None:
    adapter = open_engine(url, Context())
    try:
        adapter.swap(SwapRequest(first))
        print(json.dumps(swap_often(adapter, (first, second), int(count), lambda _: None)))
    finally:
        adapter.close()


def of_our_own(count: int = 10) -> None:
    from tests.vllm import tiny
    from tests.vllm.engines import Engine

    prompt = tiny.tokens(40)
    with tempfile.TemporaryDirectory(prefix="kvctl-swap-") as place:
        pair = tuple(
            str(tiny.make(Path(place) / name, seed=seed, layers=8, hidden=512)) for seed, name in enumerate("ab")
        )
        with Engine(Path(pair[0]), Path(place) / "engine.log", None) as engine:
            engine.wait()
            adapter = open_engine(engine.url, Context())
            right: list[list[int]] = []
            for folder in (pair[1], pair[0]):
                adapter.swap(SwapRequest(folder))
                right.insert(0, engine.complete(prompt).tokens)
            asked, wrong, over = [0], [0], threading.Event()

            def ask() -> None:
                while not over.is_set():
                    asked[0] += 1
                    wrong[0] += engine.complete(prompt).tokens not in right

            def check(number: int) -> None:
                if engine.complete(prompt).tokens != right[(number + 1) % 2]:
                    raise SystemExit(f"swap {number + 1}: the engine speaks as the wrong model")

            asker = threading.Thread(target=ask)
            asker.start()
            try:
                swap_often(adapter, (pair[0], pair[1]), WARM, check)
                before = memory_of(engine.process.pid)
                facts = swap_often(adapter, (pair[0], pair[1]), count, check)
                after = memory_of(engine.process.pid)
            finally:
                over.set()
                asker.join()
            print(f"{asked[0]} requests meanwhile, {wrong[0]} with words of neither model")
            facts |= {"requests": asked[0], "wrong": wrong[0], "memory_before": before, "memory_after": after}
            print(json.dumps(facts))
            if wrong[0] or after > before + SPARE:
                raise SystemExit(1)


def memory_of(pid: int) -> int:
    """Resident bytes of a process and its children."""
    import psutil

    top = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (top, *top.children(recursive=True)))


if __name__ == "__main__":
    running(*sys.argv[1:5]) if len(sys.argv) > 2 else of_our_own(*map(int, sys.argv[1:]))
