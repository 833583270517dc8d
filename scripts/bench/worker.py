"""A rival's process: makes the rival once, then loads on command and measures each load.

stdin: one JSON command per line, `{"load": VARIANT, "check": bool}`. stdout: one JSON answer per line. What the
libraries print goes to stderr. Usage: worker.py MODULE:CLASS SETUP-FILE
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import time
from contextlib import suppress

from scripts.bench.rival import Rival, Setup, UnavailableError, drop_cache, wrong


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    libc = ctypes.CDLL(None)
    module, _, name = sys.argv[1].partition(":")
    with open(sys.argv[2], encoding="utf-8") as file:
        setup = Setup.from_json(file.read())
    try:
        kind: type[Rival] = getattr(importlib.import_module(module), name)
        os.environ.update(kind.environment)
        rival = kind(setup)
        ready: dict[str, object] = {
            "variants": list(rival.variants()),
            "takes_destination": rival.takes_destination,
            "note": rival.note + (" (no O_DIRECT: cold page cache)" if setup.direct and rival.cached_only else ""),
        }
    except UnavailableError as reason:
        ready = {"unavailable": str(reason)}
    except Exception as problem:
        ready = {"unavailable": f"{type(problem).__name__}: {problem}"}
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin if "unavailable" not in ready else ():
        command = json.loads(line)
        try:
            answer: dict[str, object] = {**_measure(rival, command["load"]), **rival.facts()}
            if command.get("check"):
                answer["wrong"] = wrong(setup, rival.digests())[:3]
        except Exception as problem:
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        rival.release()
        # what a load allocated goes back to the kernel: the next one that allocates pays for fresh memory again
        gc.collect()
        libc.malloc_trim(0)
        answers.write(json.dumps(answer) + "\n")
    # some peers' libraries crash in destructors at exit: everything has been said
    os._exit(0)


def _measure(rival: Rival, variant: str) -> dict[str, float]:
    """Wall and CPU seconds (user and system, ours and our children's), and the peak of resident bytes."""
    if rival.setup.direct and rival.cached_only:
        drop_cache(rival.setup.paths)
    gc.collect()
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak starts anew
    cpu, wall = _cpu(), time.perf_counter()
    rival.load(variant)
    seconds = time.perf_counter() - wall
    return {"seconds": seconds, "cpu_s": _cpu() - cpu, "peak_rss": _peak()}


def _cpu() -> float:
    mine, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime


def _peak() -> int:
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    with open("/proc/self/status", encoding="ascii") as file:
        own = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    return max(own, children)


if __name__ == "__main__":
    main()
