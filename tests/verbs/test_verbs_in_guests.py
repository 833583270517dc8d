"""native-rdma and the node's engine over Soft-RoCE: each file runs in a guest of the lab. (Its contract: tests/lab.)"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from kvctl.transports.node_auth import MasterKey
from scripts.rdma_lab.guests import Guests

pytestmark = pytest.mark.rdma


@pytest.mark.parametrize(
    "file", ["inside_strangers.py", "inside_faults.py", "inside_windows.py", "inside_quick.py", "inside_inline.py"]
)
def test_inside_a_guest(run_inside: Callable[..., str], file: str) -> None:
    run_inside(f"tests/verbs/{file}", 400)


def test_inside_a_guest_with_two_rails(start_guests: Callable[..., Guests]) -> None:
    guests = start_guests("a", rails=2)
    command = "python -m pytest -q -s -p no:cacheprovider -o addopts= tests/verbs/inside_rails.py"
    done = guests["a"].run(command, seconds=400)
    assert done.code == 0, f"{done.out}\n{done.err}"[-6000:]
    print(done.out)


def test_the_nodes_loop_waits_for_a_client_in_another_guest(start_guests: Callable[..., Guests]) -> None:
    """Within one guest a write has ended when it was posted."""
    size, seed = 3_000_003, 8
    guests = start_guests("node", "client")
    master = MasterKey.make()
    for name, text in (("master", master.text()), ("client", master.scoped("ro", "").text())):
        path = guests.shared / f"{name}.key"
        path.write_text(text)
        path.chmod(0o600)
    (guests.shared / "k").write_bytes(random.Random(seed).randbytes(size))
    place = f"{guests['node'].address}:7781"
    # of a file system in memory the node knows that it never waits; a guest may be kept waiting for long
    options = "--key-file /lab/master.key --rdma require --rdma-opt timeout=20 --rdma-opt retries=7"
    serve = f"exec kvctl node serve /dev/shm/data --listen {place} {options}"
    serving = guests["node"].start(f"mkdir /dev/shm/data && cp /lab/k /dev/shm/data && {serve}")
    serving.wait_for(place, 60)
    done = guests["client"].run(f"python -m tests.verbs.quick_reader node://{place} /lab/client.key k {size} {seed}")
    assert done.check() == "40 reads are right\n"
    page = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
    said = guests["client"].run(f'python -c "{page}" http://{place}/metrics').check()
    found = {name: int(value) for name, value in re.findall(r"^kvctl_node_(rdma_\w+) (\d+)$", said, re.MULTILINE)}
    assert found["rdma_sent_bytes_total"] == found["rdma_written_bytes_total"] == 2 * size
    assert 0 < found["rdma_quick_total"] < 40
    assert found["rdma_pool_free_pieces"] == 64
    assert found["rdma_failures_total"] == 0
