"""`kvctl doctor` on a host with an RDMA device: test_doctor_rdma.py runs this in a guest of the lab."""

from __future__ import annotations

from kvctl.doctor import rdma
from kvctl.doctor.examine import examine
from kvctl.doctor.findings import Machine


def test_a_host_with_rdma_is_ok_in_every_line() -> None:
    diagnosis = examine(rdma.probes(Machine()))
    found = {item.name: item for item in diagnosis.findings}
    print(*(f"{item.name}: {item.state}: {item.value}" for item in diagnosis.findings), sep="\n")
    assert diagnosis.state == "ok", diagnosis.findings
    port = found["rxe0 port 1"]
    assert port.value.startswith("ACTIVE, Ethernet")
    assert "RoCE v2" in port.value
    assert "MTU 9000" in port.value
    assert found["device nodes"].value == "uverbs0"
    assert found["rxe0 memory windows"].value == "type 1, type 2B"
    assert {"libibverbs.so.1", "librdmacm.so.1", "pyverbs", "memlock"} <= set(found)
