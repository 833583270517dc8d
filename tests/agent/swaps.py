"""A day of swaps in miniature: leases come and go, readers and agents are killed at random, every byte is checked."""

from __future__ import annotations

import random
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvctl.agent.load import load_slot, rollback_slot, swap_slot
from kvctl.agent.target import SlotOptions
from kvctl.core.context import Context
from kvctl.testing.models import LlamaShape, write_llama
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, eventually, python

MODELS = 3
LOOKS = 3  # of a reader for each swap
READER = """
import os, sys, xxhash
from kvctl.agent.client import AgentClient
sys.excepthook = lambda *_: None  # it fails with its agent, as it should
client = AgentClient(label="reader")
while True:
    opened = client.open("m")
    for file in opened.files:
        if file.name == "model.safetensors":
            first = xxhash.xxh3_64_hexdigest(os.pread(file.fd, file.size, 0))
            again = xxhash.xxh3_64_hexdigest(os.pread(file.fd, file.size, 0))
            print(first, again, flush=True)
        os.close(file.fd)
    client.call("release", ident=opened.ident)
"""


@dataclass(frozen=True, slots=True)
class Counts:
    swaps: int
    reads: int
    rollbacks: int
    readers_killed: int
    agents_killed: int


class Marathon:
    """`place` is a short path (sockets). Raises AssertionError at the first wrong byte, lease or descriptor."""

    def __init__(self, place: Path, models: Path, seed: int) -> None:
        self._place = place
        self._models = models
        self._chance = random.Random(seed)
        self._digests: set[str] = set()
        for number in range(MODELS):
            files = write_llama(str(models / str(number)), LlamaShape(layers=1, hidden=64), seed=number)
            self._digests.add(xxhash.xxh3_64_hexdigest(files["model.safetensors"]))
        self._readers: list[subprocess.Popen[str]] = []
        self._idle = 0
        self._reads = self._rollbacks = self._dead_readers = self._dead_agents = 0

    def run(self, swaps: int, *, kill_agents: float = 0.04) -> Counts:
        agent = self._start(0)
        try:
            for number in range(1, swaps + 1):
                if self._chance.random() < kill_agents:
                    agent.kill()
                    self._dead_agents += 1
                    self._end_readers()  # they fail with their agent
                    agent = self._start(number + 1)
                self._swap(agent, number)
            self._end_readers()
            self._settle(agent)
            assert agent.close() == 0
        finally:
            self._end_readers()
            with agent:
                pass
        return Counts(swaps, self._reads, self._rollbacks, self._dead_readers, self._dead_agents)

    def _start(self, number: int) -> AgentProcess:
        agent = AgentProcess.start(self._place / "a")
        request = LoadRequest(str(self._models / str(number % MODELS)), into="slot:m")
        load_slot(request, Context(), socket=agent.socket)
        self._idle = self._descriptors(agent)
        self._readers = [python(READER, agent.socket) for _ in range(2)]
        return agent

    def _swap(self, agent: AgentProcess, number: int) -> None:
        options = SlotOptions(keep_previous=self._chance.random() < 0.3)
        request = LoadRequest(str(self._models / str(number % MODELS)))
        swap_slot("m", request, Context(), options=options, socket=agent.socket)
        if options.keep_previous and self._chance.random() < 0.5:
            rollback_slot("m", socket=agent.socket)
            rollback_slot("m", socket=agent.socket)
            self._rollbacks += 2
        reader = self._chance.choice(self._readers)
        assert reader.stdout is not None
        for _ in range(LOOKS):
            first, again = reader.stdout.readline().split()
            assert first == again
            assert first in self._digests
            self._reads += 1
        if self._chance.random() < 0.2:
            self._readers.remove(reader)
            _end(reader)
            self._dead_readers += 1
            self._readers.append(python(READER, agent.socket))

    def _settle(self, agent: AgentProcess) -> None:
        """One generation is left, no lease, no descriptor more than at the start."""
        eventually(lambda: all(item["leases"] == 0 for item in agent.ls("m")), "all leases end")
        if any(item["state"] == "previous" for item in agent.ls("m")):
            with agent.client() as client:
                client.call("unload", slot="m", force=False, previous_only=True)
        eventually(lambda: len(agent.ls("m")) == 1, "one generation is left")
        eventually(lambda: self._descriptors(agent) <= self._idle, "no descriptor leaked")

    def _descriptors(self, agent: AgentProcess) -> int:
        return len(list(Path(f"/proc/{agent.process.pid}/fd").iterdir()))

    def _end_readers(self) -> None:
        for reader in self._readers:
            _end(reader)
        self._readers = []


def _end(reader: subprocess.Popen[str]) -> None:
    reader.kill()
    reader.wait()
    for stream in (reader.stdin, reader.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
