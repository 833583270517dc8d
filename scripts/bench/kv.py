"""Compares kvctl's pull and push of KV with its own load-weights on the same bytes, with LMCache's file backend and
with plain files, interleaved in one run; then pulls of small sessions side by side, then resume time against the size
of the store.

Made like load_weights.py: every rival in a process of its own, a warm-up round that proves the bytes, then rounds in
a rotating order. Prints the tables; `--out` keeps every sample. Started by `scripts/bench/run kv`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

from kvctl.core.context import Context
from kvctl.core.units import parse_size
from kvctl.kv.push import PushSession, push_session
from kvctl.testing.seaweed import seaweed_servers
from scripts.bench import kv_data, kv_growth, kv_lmcache, table
from scripts.bench.load_weights import (
    BUCKET,
    Json,
    Scenario,
    environment,
    kept_in_cache,
    machine,
    make_repo,
    run_scenario,
    say,
    under,
    upload,
    versions,
    words,
)
from scripts.bench.rival import ModelFile, Setup

_KV: Final = "scripts.bench.kv_rivals:"
_LM: Final = "scripts.bench.kv_lmcache:"
LOADS: Final = "load-weights, verified"

PULL_FILE: Final = (
    (LOADS, "ours", f"{_KV}LoadWeights"),
    ("kv pull", "ours", f"{_KV}Pull"),
    ("LMCache file", "peer", f"{_LM}LMCachePull"),
    ("safetensors", "peer", "scripts.bench.peers_file:Safetensors"),
    ("safetensors (allocating)", "peer", "scripts.bench.peers_file:SafetensorsFresh"),
)
PULL_S3: Final = (
    *PULL_FILE[:2],
    ("LMCache S3", "peer", f"{_LM}LMCacheS3"),
    ("s5cmd", "peer", "scripts.bench.peers_s3:S5cmd"),
    ("s5cmd + safetensors", "peer", f"{_KV}S5cmdAndLoad"),
)
PUSH_FILE: Final = (
    ("kv push", "ours", f"{_KV}Push"),
    ("LMCache file", "peer", f"{_LM}LMCachePush"),
    ("safetensors", "peer", f"{_KV}SaveFile"),
    ("safetensors + fsync", "peer", f"{_KV}SaveFileSynced"),
)
PUSH_S3: Final = (
    ("kv push", "ours", f"{_KV}Push"),
    ("LMCache S3", "peer", f"{_LM}LMCacheS3"),
    ("s5cmd", "peer", f"{_KV}S5cmdUp"),
    ("safetensors + s5cmd", "peer", f"{_KV}SaveFileAndS5cmd"),
)
MANY_FILE: Final = (
    ("kv pull", "ours", f"{_KV}ManyPulls"),
    ("kv pull, open repo", "ours", f"{_KV}ManyPullsOfOneRepo"),
    ("LMCache file", "peer", f"{_LM}ManyLMCache"),
    ("safetensors (allocating)", "peer", f"{_KV}ManySafetensors"),
)
MANY_S3: Final = (
    ("kv pull", "ours", f"{_KV}ManyPulls"),
    ("kv pull, open repo", "ours", f"{_KV}ManyPullsOfOneRepo"),
    ("s5cmd", "peer", f"{_KV}ManyS5cmd"),
)


def push_all(setup: Setup) -> None:
    for seed, file in enumerate(setup.files):
        memory, tensors = kv_data.read_file(setup.folder, file)
        push_session(
            PushSession(kv_data.members(setup), kv_data.address(file), kv_data.source_of(file, tensors, seed)),
            Context(),
        )
        memory.close()


def scenarios(options: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[tuple[Scenario, int]]:
    """Scenarios and their rounds; what a scenario needs exists while it is handled."""
    work: str = options.work
    scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=options.shm, prefix="kvctl-bench-"))

    def wanted(size: int) -> Iterator[tuple[str, str, tuple[ModelFile, ...]]]:
        if "pull" in options.parts:
            yield "pull", *kv_data.sessions(work, size)
        if "push" in options.parts:
            yield "push", *kv_data.sessions(work, min(size, options.push_size))
        if "many" in options.parts:
            yield "many", *kv_data.sessions(work, options.small_size, options.small_sessions)

    if "file" in options.stores:
        for part, folder, files in wanted(options.size):
            name = os.path.basename(folder)
            place = os.path.join(work, f"repo-{name}")
            setup = Setup(folder, files, scratch=scratch, repo=place)
            places = (place, f"{place}-lmcache", f"{place}-saved")
            remove(places)
            if part == "push":
                yield _scenario("Push, file store", setup, PUSH_FILE), options.push_rounds
            else:
                make_repo(name, folder, place)
                push_all(setup)
                with kept_in_cache([*setup.paths, *under(place)]):
                    if part == "many":
                        scenario = _scenario("Pulls side by side, file store", setup, MANY_FILE, "many")
                        yield scenario, options.many_rounds
                    else:
                        yield _scenario("Pull, file store", setup, PULL_FILE), options.rounds
            remove(places)
    if "s3" in options.stores:
        place = os.path.join(work, "kv-seaweed")
        remove([place])
        stack.callback(remove, [place])
        (server,) = stack.enter_context(seaweed_servers(place))
        server.make_bucket(BUCKET)
        for part, folder, files in wanted(min(options.s3_size, options.size)):
            name = os.path.basename(folder)
            repo = f"s3://{BUCKET}/{part}-{name}"
            setup = Setup(folder, files, False, server.endpoint, BUCKET, name, repo, scratch)
            if part == "push":
                yield _scenario("Push, SeaweedFS", setup, PUSH_S3), options.push_rounds
                continue
            upload(server, folder, [file.name for file in files], name)
            make_repo(name, folder, repo, server.endpoint)
            push_all(setup)
            if part == "many":
                yield _scenario("Pulls side by side, SeaweedFS", setup, MANY_S3, "many"), options.many_rounds
            else:
                yield _scenario("Pull, SeaweedFS", setup, PULL_S3), options.s3_rounds
        server.close()


def remove(places: Iterable[str]) -> None:
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


def _scenario(title: str, setup: Setup, rivals: tuple[tuple[str, str, str], ...], kind: str = "loads") -> Scenario:
    count = len(setup.files)
    what = "one session" if count == 1 else f"{count} sessions"
    text = f"{what} of {kv_data.tokens_of(setup.files[0]):,} tokens, Llama-3-8B's geometry"
    return Scenario(title, text, setup, rivals, LOADS if title.startswith("Pull,") else "", kind)


def growth(options: argparse.Namespace) -> Json:
    folder, files = kv_data.sessions(options.work, options.small_size, options.small_sessions)
    rows: list[Json] = []
    for row in kv_growth.measure(options.work, folder, files[0], options.others, options.resume_pulls):
        rows.append(row)
        say(f"  resume among {row['others']:,}: {row['p50']:.4f} s, {row['requests']} requests")
    return {
        "title": "Resume against the size of the store", "kind": "growth", "model": "file store",
        "bytes": kv_data.tokens_of(files[0]) * kv_data.TOKEN_BYTES, "rows": rows,
    }  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("2GiB"), help="of the one session")
    parser.add_argument("--s3-size", type=parse_size, default=parse_size("512MiB"), help="of the one on S3")
    parser.add_argument("--push-size", type=parse_size, default=parse_size("512MiB"), help="of the one to push")
    parser.add_argument("--rounds", type=int, default=5, help="of pulls from files")
    parser.add_argument("--s3-rounds", type=int, default=3, help="of pulls from S3")
    parser.add_argument("--push-rounds", type=int, default=2)
    parser.add_argument("--many-rounds", type=int, default=2, help="of pulls of small sessions side by side")
    parser.add_argument("--only", type=words, default=[], help="rivals by name, comma-separated; NAME* for a prefix")
    parser.add_argument("--stores", type=words, default=["file", "s3"], help="file,s3")
    parser.add_argument("--parts", type=words, default=["pull", "push", "many", "growth"], help="pull,push,many,growth")
    parser.add_argument("--small-size", type=parse_size, default=parse_size("16MiB"), help="of each session of `many`")
    parser.add_argument("--small-sessions", type=int, default=32)
    parser.add_argument("--others", type=numbers, default=[10, 1_000, 100_000], help="sessions beside the pulled one")
    parser.add_argument("--resume-pulls", type=int, default=20)
    parser.add_argument("--work", default=".bench", help="where data, servers and logs are kept")
    parser.add_argument("--shm", default="/dev/shm", help="a tmpfs, for rivals that only write files")
    parser.add_argument("--out", help="where to write every sample as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    clean = environment()
    os.environ.clear()
    os.environ.update(clean)  # pushes of this process go to the same servers as the workers'
    options.work = os.path.abspath(options.work)
    os.makedirs(options.work, exist_ok=True)
    log = os.path.join(options.work, "workers.log")
    result: Json = {
        "schema": "kvctl.bench/1",
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions() | kv_lmcache.version(),
        "scenarios": [],
    }
    with contextlib.ExitStack() as stack:
        for scenario, rounds in scenarios(options, stack):
            result["scenarios"].append(run_scenario(scenario, rounds, options.only, log))
            _keep(options.out, result)
    if "growth" in options.parts:
        result["scenarios"].append(growth(options))
        _keep(options.out, result)
    print(table.document(result))


def _keep(path: str | None, result: Json) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
