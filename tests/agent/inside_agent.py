"""An agent whose peer reads a slot by RDMA, in one guest of the lab; tests/agent/test_agent_rdma.py runs it there."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.request import urlopen

from kvctl.agent.load import load_slot
from kvctl.core.context import Context
from kvctl.testing.models import write_llama
from kvctl.weights.load import run_load
from kvctl.weights.request import LoadRequest
from tests.agent.agents import AgentProcess, read_slot

IP = os.environ["LAB_ADDRESS"]


def test_a_peer_reads_a_slot_by_rdma_into_its_own_slot(tmp_path: Path) -> None:
    files = write_llama(str(tmp_path / "m"), shards=2)
    wanted = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    serve = ("--peers", f"{IP}:0", "--allow-unauthenticated", f"{IP}/32", "--rdma", "require")
    with AgentProcess.start(tmp_path / "a", *serve) as owner, AgentProcess.start(tmp_path / "b") as reader:
        load_slot(LoadRequest(str(tmp_path / "m"), into="slot:m"), Context(), socket=owner.socket)
        report = load_slot(
            LoadRequest(f"{owner.peers}/m", into="slot:m", transport="native-rdma"), Context(), socket=reader.socket
        )
        assert report.transport[0].name == "native-rdma"
        assert all(read_slot(reader, "m")[name] == data for name, data in files.items())
        with urlopen(f"http://{owner.place}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        sent = next(float(line.split()[1]) for line in lines if line.startswith("kvctl_node_rdma_sent_bytes_total "))
        headers = wanted - report.needed
        assert report.needed <= sent <= report.needed + headers
        auto = run_load(LoadRequest(f"{owner.peers}/m"), Context())
        assert auto.transport[0].name == "native-rdma"
