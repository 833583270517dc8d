"""What an engine's users feel, as it is told: raw samples, histograms, a canary's stream."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvctl.checkpoint.engine import gaps_of
from kvctl.checkpoint.latency import Canary, Histogram, open_latencies
from kvctl.core.errors import EnvError, UsageError
from kvctl.engines.api import Sample, Samples
from tests.agent.agents import eventually


def test_a_batch_gets_its_tokens_at_once_and_that_counts_once() -> None:
    tokens = [Sample(step, gap) for step, gap in ((1.0, 0.02), (1.0, 0.02), (1.5, 0.02), (1.5, 0.5), (2.0, 0.03))]
    assert gaps_of(Samples(tuple(tokens), 2.0)) == [0.02, 0.5, 0.03]
    # of metrics every token is told by itself, at one time
    assert gaps_of(Samples((Sample(1.0, 0.025),) * 3, 2.0, raw=False)) == [0.025] * 3


METRICS = """# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{{model_name="m",le="0.01"}} {a}
vllm:inter_token_latency_seconds_bucket{{model_name="m",le="0.025"}} {b}
vllm:inter_token_latency_seconds_bucket{{model_name="m",le="+Inf"}} {c}
vllm:other_bucket{{le="1"}} 5
"""


class Server:
    """An engine's HTTP as far as latencies need it: metrics that a test sets, and a stream of the tokens that it
    releases.
    """

    def __init__(self) -> None:
        outer = self
        self.counts = (0, 0, 0)
        self.tokens = threading.Semaphore(0)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                a, b, c = outer.counts
                body = json.dumps({"data": [{"id": "m"}]}) if "models" in self.path else METRICS.format(a=a, b=b, c=c)
                self.send_response(404 if "missing" in self.path else 200)
                self.end_headers()
                self.wfile.write(body.encode())

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert asked["stream"]
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    for _ in range(100):
                        outer.tokens.acquire()
                        self.wfile.write(b'data: {"choices": []}\n\n')
                    self.wfile.write(b"data: [DONE]\n\n")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its base names it so
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def test_a_histogram_gives_its_edges_and_says_how_coarse_they_are(server: Server) -> None:
    server.counts = (5, 7, 7)
    latencies = Histogram(f"{server.url}/metrics")
    assert latencies.resolution == "histogram, edges at 10, 25 ms"
    assert latencies.take() == []
    server.counts = (8, 11, 12)
    assert sorted(latencies.take()) == [0.01, 0.01, 0.01, 0.025, 0.05]
    server.close()
    assert latencies.take() == ()


def test_a_canary_measures_the_gaps_of_its_own_stream(server: Server) -> None:
    latencies = open_latencies(f"canary:{server.url}")
    assert isinstance(latencies, Canary)
    found: list[float] = []

    def gaps(count: int) -> bool:
        found.extend(latencies.take())
        return len(found) == count

    began = time.monotonic()
    server.tokens.release(2)
    eventually(lambda: gaps(1), "the second token has come")
    time.sleep(0.02)
    server.tokens.release()
    eventually(lambda: gaps(2), "the third token has come")
    ended = time.monotonic()
    server.tokens.release(1000)  # it reads on until it is closed
    latencies.close()
    assert found[0] > 0
    assert found[1] >= 0.02
    assert sum(found) <= ended - began


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("http://x", UsageError),
        ("metrics:", UsageError),
        ("metrics:ftp://x", UsageError),
        ("metrics:http://127.0.0.1:1/metrics", EnvError),
    ],
)
def test_what_tells_no_latencies_is_refused(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        open_latencies(text)
