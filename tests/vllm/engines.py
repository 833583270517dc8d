"""Real vLLM servers for the tests: started, waited for, talked to over HTTP, ended by their pid."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

READY = 600.0  # seconds; a start takes 15 on a machine with nothing else to do
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait cost a shared machine ten times the work
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "kvctl",
    "TOKENIZERS_PARALLELISM": "false",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` and their log-probabilities; `cached`: tokens of the prompt that were not computed."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    kvctl: Mapping[str, Any]


class Engine:
    """A server process. `settings`: of KvctlConnector, None for an engine without it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        settings: Mapping[str, Any] | None,
        *,
        source: str | None = None,
        extra: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        loader = {} if source is None else {"source": source}
        argv = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--served-model-name", "m", "--enforce-eager", "--dtype", "float32",
            "--max-model-len", "4096", "--max-num-batched-tokens", "1024", "--max-num-seqs", "8",
            "--enable-prompt-tokens-details", "--load-format", "kvctl",
            "--model-loader-extra-config", json.dumps(loader),
            "--worker-extension-cls", "kvctl_vllm.extension.WorkerExtension", *extra,
        ]  # fmt: skip
        if settings is not None:
            transfer = {
                "kv_connector": "KvctlConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": dict(settings),
            }
            argv += ["--kv-transfer-config", json.dumps(transfer)]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                argv,
                env={**os.environ, **ENVIRONMENT, **(environ or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,  # in this session: priorities compare only within one
            )

    def wait(self) -> Self:
        end = time.monotonic() + READY
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the engine ended with {self.process.returncode}:\n{self.tail()}")
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            time.sleep(0.2)
        self.stop()
        raise AssertionError(f"the engine was not ready in {READY:g} s:\n{self.tail()}")

    def cpu_seconds(self) -> float:
        """Of its processes, so far."""
        top = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
        return float(sum(time.user + time.system for time in times))

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def said(self, text: str) -> int:
        """How many lines of the log have it."""
        return sum(text in line for line in self.log.read_text(errors="replace").splitlines())

    def call(self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
        return json.loads(self.ask(path, body, headers) or b"null")

    def ask(self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data, {"content-type": "application/json", **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=READY) as response:
            return bytes(response.read())

    def complete(
        self, tokens: Sequence[int], count: int = 8, *, kvctl: Mapping[str, Any] | None = None, **more: Any
    ) -> Answer:
        """Greedy. `kvctl`: what the request says to the connector."""
        headers = more.pop("headers", None)
        body: dict[str, Any] = {
            "model": "m", "prompt": list(tokens), "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "logprobs": 0, "return_token_ids": True, **more,
        }  # fmt: skip
        if kvctl is not None:
            body["kv_transfer_params"] = {"kvctl": dict(kvctl)}
        said = self.call("/v1/completions", body, headers)
        choice = said["choices"][0]
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            details.get("cached_tokens") or 0,
            (said.get("kv_transfer_params") or {}).get("kvctl") or {},
        )

    def info(self) -> Any:
        return self.call("/v1/kvctl/engine")

    def reset(self) -> None:
        self.call("/v1/kvctl/reset", {})

    def stored(self, sessions: int) -> None:
        """Wait until the engine has stored so many sessions, or has given up on them."""
        end = time.monotonic() + READY
        while time.monotonic() < end:
            kv = self.info()["kv"]
            if kv["stores"] + kv["held"] + kv["dropped"] >= sessions:
                return
            time.sleep(0.05)
        raise AssertionError(f"{sessions} sessions were not stored: {self.info()['kv']}\n{self.tail()}")

    def stop(self, *, kill: bool = False) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL if kill else signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it left in its group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
