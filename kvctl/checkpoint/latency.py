"""What an engine's users feel now: inter-token latencies, raw or from histograms, and how fine they are."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

from kvctl.core.addresses import split_url
from kvctl.core.errors import EnvError, UsageError

_SECONDS: Final = 5.0
_BUCKET: Final = re.compile(
    r"^(?:vllm:)?(?:inter_token_latency_seconds|time_per_output_token_seconds)_bucket\{([^}]*)\} (\S+)"
)
_LE: Final = re.compile(r'le="([^"]+)"')


class Latencies(Protocol):
    """`take` gives the latencies since the last call, seconds, and never blocks for long; nothing when the engine tells
    nothing. `resolution` says in words how fine they are.
    """

    @property
    def resolution(self) -> str: ...
    def take(self) -> Sequence[float]: ...
    def close(self) -> None: ...


class Histogram:
    """An engine's Prometheus metrics: the inter-token histogram, each count as its bucket's upper edge. Its edges are
    coarse (10, 25, 50 ms are usual), so a budget of 1 ms is seen only where latencies are near an edge.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._before: dict[float, float] | None = None
        self.resolution = "histogram"
        counts = self._read()
        if not counts:
            raise EnvError(f"{url} has no inter-token histogram", hint="name the engine's /metrics, or use canary:URL")
        edges = [f"{1000 * edge:g}" for edge in sorted(counts) if edge < float("inf")]
        self.resolution = f"histogram, edges at {', '.join(edges[:8])} ms"
        self._before = counts

    def take(self) -> Sequence[float]:
        try:
            counts = self._read()
        except EnvError:
            return ()
        before, self._before = self._before or {}, counts
        samples: list[float] = []
        below = 0.0
        for edge in sorted(counts):
            new = counts[edge] - before.get(edge, 0.0)
            # cumulative counts: what this bucket holds is what the one below it does not
            samples += [edge] * max(0, round(new - below))
            below = new
        finite = max((edge for edge in counts if edge < float("inf")), default=1.0)
        return [min(sample, 2 * finite) for sample in samples]

    def _read(self) -> dict[float, float]:
        counts: dict[float, float] = {}
        for line in _get(self._url).splitlines():
            match = _BUCKET.match(line)
            edge = _LE.search(match[1]) if match else None
            if match and edge:
                at = float(edge[1].replace("+Inf", "inf"))
                counts[at] = counts.get(at, 0.0) + float(match[2])
        return counts

    def close(self) -> None:
        return


class Canary:
    """A stream of our own to the engine's OpenAI API: the gaps between its tokens, as they arrive here. It adds one
    sequence to the engine's batch.
    """

    resolution = "canary stream, arrival times of single tokens"

    def __init__(self, url: str, *, tokens: int = 512) -> None:
        self._parts = _parts(url)
        self._tokens = tokens
        self._lock = threading.Lock()
        self._gaps: list[float] = []
        self._stop = threading.Event()
        models = json.loads(_get(f"{url.rstrip('/')}/v1/models"))
        self._model = str(models["data"][0]["id"])
        self._thread = threading.Thread(target=self._run, name="kvctl-canary", daemon=True)
        self._thread.start()

    def take(self) -> Sequence[float]:
        with self._lock:
            gaps, self._gaps = self._gaps, []
        return gaps

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * _SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._stream()
            except (OSError, http.client.HTTPException, EnvError):
                self._stop.wait(1.0)

    def _stream(self) -> None:
        host, port, secure, prefix = self._parts
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(host, port, timeout=30.0)
        body = json.dumps({"model": self._model, "prompt": "Count:", "max_tokens": self._tokens, "stream": True,
                           "ignore_eos": True, "temperature": 0})  # fmt: skip
        try:
            connection.request("POST", f"{prefix}/v1/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            last = 0.0
            while not self._stop.is_set() and (line := answer.readline()):
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                if last:
                    with self._lock:
                        self._gaps.append(now - last)
                last = now
        finally:
            connection.close()


def open_latencies(text: str) -> Latencies:
    """`metrics:URL` (Prometheus) or `canary:URL` (an OpenAI API). Raises UsageError, EnvError."""
    kind, _, url = text.partition(":")
    if kind == "metrics" and url:
        return Histogram(url)
    if kind == "canary" and url:
        return Canary(url)
    raise UsageError(
        f"{text!r} tells no latencies", hint="engine:URL, canary:http://HOST:8000 or metrics:http://HOST:8000/metrics"
    )


def _parts(url: str) -> tuple[str, int, bool, str]:
    parts = split_url(url, port=True)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise UsageError(f"{url!r} is no http(s) URL without credentials")
    secure = parts.scheme == "https"
    return parts.hostname, parts.port or (443 if secure else 80), secure, parts.path.rstrip("/")


def _get(url: str) -> str:
    host, port, secure, path = _parts(url)
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", path or "/")
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        if answer.status != 200:
            raise EnvError(f"{url} answers {answer.status}")
        return text
    except (OSError, http.client.HTTPException) as error:
        raise EnvError(f"{url} does not answer", cause=str(error)) from error
    finally:
        connection.close()
