"""`load-weights` and `report` through the real program: plans, reports, progress, signals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from kvctl.cli.reports import render
from kvctl.cli.state import KEPT_REPORTS, load_report, save_report
from kvctl.core.errors import NotFoundError
from kvctl.testing.faulty_s3 import Fault, FaultyS3
from kvctl.testing.models import LlamaShape, folder_files
from kvctl.testing.seaweed import ACCESS_KEY, SECRET_KEY
from tests.cli.program import PROGRAM, Kvctl

SCHEMA = json.loads(files("kvctl.cli").joinpath("schemas/report.schema.json").read_text(encoding="utf-8"))


def total(folder: Path) -> int:
    """Bytes of all data sections."""
    found = 0
    for path in folder.glob("*.safetensors"):
        found += path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
    return found


def test_the_report_of_a_load_has_the_shipped_schema(kvctl: Kvctl, model: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    done = kvctl("load-weights", model, "-o", "json", "--tp-size", "2", "--tp-rank", "1")
    assert (done.code, done.err) == (0, "")
    jsonschema.validate(done.document, SCHEMA)
    whole = kvctl("load-weights", model, "-o", "json").document
    assert whole["bytes"] == whole["fetched"] == total(model)


def test_a_report_is_saved_and_shown_again(kvctl: Kvctl, model: Path) -> None:
    first = kvctl("load-weights", model, "-o", "json").document
    second = kvctl("load-weights", model, "-o", "json").document
    assert kvctl("report", "-o", "json").document == second
    assert kvctl("report", "last", "-o", "json").document == second
    assert kvctl("report", first["id"], "-o", "json").document == first
    assert kvctl("report", first["id"][-4:], "-o", "json").document["id"] == first["id"]
    human = kvctl("report")
    assert human.out.startswith("load-weights ")
    assert second["id"] in human.out


def test_no_report_yet_is_four(kvctl: Kvctl) -> None:
    assert kvctl("report").code == 4
    assert kvctl("report", "nope", "-o", "json").error["code"] == "not_found"


def test_only_the_newest_reports_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT_REPORTS + 5):
        save_report(str(tmp_path), f"run{number:04}", {"schema": "kvctl.report/1", "n": number})
    names = sorted(os.listdir(tmp_path / "reports"))
    assert len(names) == KEPT_REPORTS
    assert load_report(str(tmp_path), f"run{KEPT_REPORTS + 4:04}")["n"] == KEPT_REPORTS + 4
    with pytest.raises(NotFoundError):
        load_report(str(tmp_path), "run0000-")


def test_a_report_for_people_names_what_matters() -> None:
    document = {
        "command": "load-weights", "source": "lab:m", "target": "none", "started": "2026-01-01T00:00:00Z",
        "seconds": 2.0, "setup_s": 0.5, "bytes": 4 * 10**9, "needed": 4 * 10**9, "fetched": 4 * 10**9 + 10**8,
        "written": 0, "metadata_bytes": 1000, "objects": 9, "requests": 250, "retries": 3, "hedges": 2,
        "hedge_wins": 1, "hedged_bytes": 10**7, "misaligned_bytes": 0, "p50_s": 0.01, "p99_s": 0.2, "cpu_s": 1.0,
        "peak_memory": 10**8, "stages": {"transfer": 0.9, "verify": 0.2}, "limiter": "member b", "ceiling_gbps": 2.5,
        "ceiling_how": "preadv", "tensors": 80, "notes": ["a note"], "extra": {"resumed_bytes": 0},
        "transport": [{"name": "s3", "reason": "the fastest", "passed_over": [["nixl-obj", "no GPU"]], "fallback": ""}],
        "paths": [
            {"member": "a", "endpoint": "http://a", "transport": "s3", "bytes": 3 * 10**9, "requests": 200,
             "retries": 0, "failures": 0, "p50_s": 0.01, "p99_s": 0.1, "down": ""},
            {"member": "b", "endpoint": "http://b", "transport": "s3", "bytes": 10**9, "requests": 50,
             "retries": 3, "failures": 4, "p50_s": 0.1, "p99_s": 0.2, "down": "connection refused"},
        ],
        "verified": {"state": "leaves", "why": "", "bytes": 4 * 10**9},
        "tp": {"rank": 0, "size": 8, "sharded_bytes": 10, "replicated_bytes": 5},
        "gb_per_s": 2.0, "over_fetch": 1.025, "client_cpu_s_per_gb": 0.25, "id": "x-1",
    }  # fmt: skip
    text = render(document)
    for part in (
        "3.73 GiB in 2 s, 2.00 GB/s", "500 ms setup included", "over-fetch 1.025", "rank 0 of 8", "250, 3 retries",
        "2 hedges (1 won", "p50 10 ms, p99 200 ms", "0.250 s per GB", "leaf checksums, 3.73 GiB",
        "transfer 90%, verify 20%", "member b", "80% of it reached", "s3 (the fastest)", "nixl-obj: no GPU",
        "75%", "b http://b was given up: connection refused", "note: a note", "x-1",
    ):  # fmt: skip
        assert part in text, part


def test_a_dry_run_moves_nothing_and_prints_the_plan(kvctl: Kvctl, model: Path, tmp_path: Path) -> None:
    done = kvctl("load-weights", model, "-n", "-o", "json", "--into", f"dir:{tmp_path}/out")
    assert done.code == 0, done.err
    assert done.document["schema"] == "kvctl.load-plan/1"
    assert done.document["bytes"] == total(model)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "state" / "reports").exists()
    human = kvctl("load-weights", model, "-n")
    assert "model-00001-of-00003.safetensors" in human.out


def test_into_dir_gives_the_files_bit_for_bit(kvctl: Kvctl, model: Path, tmp_path: Path) -> None:
    done = kvctl("load-weights", "./model", "--into", "dir:./out", "-q")
    assert (done.code, done.err) == (0, "")
    for path in model.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_missing_folder_is_four(kvctl: Kvctl) -> None:
    assert kvctl("load-weights", "./none").code == 4
    assert kvctl("load-weights", "./none", "-o", "json").error["exit_code"] == 4


def test_a_read_only_target_is_refused_in_words(kvctl: Kvctl, model: Path) -> None:
    done = kvctl("load-weights", model, "--into", "dir:/proc/none/out")
    assert done.code in {4, 9, 10}
    assert "/proc/none" in done.err


def test_progress_as_json_lines_on_stderr(kvctl: Kvctl, model: Path) -> None:
    done = kvctl("load-weights", model, "--progress", "json")
    lines = [json.loads(line) for line in done.err.splitlines()]
    assert {line["schema"] for line in lines} == {"kvctl.progress/1"}
    assert [lines[0]["event"], lines[-1]["event"]] == ["begin", "end"]
    assert lines[-1]["bytes"] == lines[-1]["total_bytes"] == total(model)
    assert done.out.startswith("load-weights ")


class Slow:
    """A model of four shards in a bucket that sends the last two at a crawl."""

    def __init__(self, server: FaultyS3, surroundings: dict[str, str], cwd: Path) -> None:
        self.server = server
        self.cwd = cwd
        self.env = {**surroundings, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        self.args = ["load-weights", "s3://bucket/m", "--endpoint-url", server.endpoint, "--into", "dir:./out"]
        self.files = folder_files(LlamaShape(layers=4).tensors(), shards=4)
        self.started: list[subprocess.Popen[str]] = []
        for name, data in self.files.items():
            server.put(f"m/{name}", data)
        for shard in ("00003", "00004"):
            # the first read is the header's
            server.add(Fault("slow", key=f"*{shard}-of*", skip=1, rate=2_000))

    def start(self, *more: str) -> subprocess.Popen[str]:
        """The load, once it has begun to move data."""
        process = subprocess.Popen(
            [PROGRAM, *self.args, "--no-hedge", "--progress", "json", *more],
            env=self.env, cwd=self.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if '"event": "progress"' in line:
                return process
        raise AssertionError(process.communicate())


@pytest.fixture
def slow(surroundings: dict[str, str], tmp_path: Path) -> Iterator[Slow]:
    with FaultyS3() as server:
        found = Slow(server, surroundings, tmp_path)
        yield found
        for process in found.started:
            process.kill()
            process.communicate()


def test_one_signal_stops_in_order_and_the_same_command_resumes(slow: Slow, tmp_path: Path) -> None:
    process = slow.start("-o", "json")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "stopping: " in err
    error = json.loads(err.splitlines()[-1])["error"]
    assert (error["code"], error["exit_code"]) == ("interrupted", 130)
    assert error["hint"].startswith("to go on: kvctl load-weights s3://bucket/m --endpoint-url http://")
    assert not (tmp_path / "out").exists()

    slow.server.clear()
    words = shlex.split(error["hint"].removeprefix("to go on: "))
    done = subprocess.run(
        [PROGRAM, *words[1:]], env=slow.env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    report = json.loads(done.stdout)
    assert 0 < report["fetched"] < report["bytes"]
    for name, data in slow.files.items():
        assert (tmp_path / "out" / name).read_bytes() == data


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_aborts_at_once(slow: Slow, signum: int, code: int) -> None:
    process = slow.start()
    process.send_signal(signum)
    assert process.stderr is not None
    assert any(line.startswith("stopping: ") for line in process.stderr)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "aborting" in err
    assert "Traceback" not in err


def test_sigusr1_prints_where_it_is(slow: Slow) -> None:
    process = slow.start("-q")
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None
    line = next(line for line in process.stderr if not line.startswith("{"))
    assert line.startswith("loading: ")
    assert " of " in line
    assert "GB/s" in line
