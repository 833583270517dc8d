"""Storage nodes in one guest, clients in others, a repo over them: what the end-to-end tests stand on."""

from __future__ import annotations

import json
import os
import random
import shlex
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvctl.kv.bundle import write_bundle
from kvctl.kv.identity import Descriptor, Group
from kvctl.kv.seams import LayerKv
from kvctl.transports.node_auth import MasterKey
from scripts.rdma_lab.guests import Guests, Job

NODES: Final = 3
STORAGE: Final = "storage"
# What only ends early when something is broken.
PATIENCE: Final = 240.0
# Patient enough for a busy machine, quick enough for tests that wait for the end of it.
STALL: Final = 30.0
_KV: Final = Group("full", tuple(range(8)), 4, 64, 64)
_TOKENS: Final = 2048
SESSION_BYTES: Final = 2 * len(_KV.layers) * _KV.kv_heads * _KV.k_dim * 2 * _TOKENS
_VARIABLES: Final = {
    "KVCTL_CONFIG": "/lab/kvctl.toml",
    "KVCTL_STATE_DIR": "/tmp/state",
    "KVCTL_STALL_TIMEOUT": f"{STALL:g}s",
}


@dataclass(frozen=True, slots=True)
class Counted:
    """What moved how, in bytes: `http` the bodies that the nodes sent and got, `rdma` what they placed or fetched.
    `packets`: what the storage guest's RDMA device sent and got.
    """

    http: int
    rdma: int
    packets: int

    def since(self, before: Counted) -> Counted:
        return Counted(self.http - before.http, self.rdma - before.rdma, self.packets - before.packets)


class Fleet:
    """Three nodes that run in the guest `storage`. Their objects are in that guest's memory."""

    def __init__(self, guests: Guests, *node_options: str) -> None:
        self.guests = guests
        self._options = node_options
        self.jobs: list[Job] = []
        stores = []
        for number in range(NODES):
            master = MasterKey.make()
            _write(guests.shared / f"{number}.master", master.text())
            _write(guests.shared / f"{number}.client", master.scoped("rw", "").text())
            stores.append(
                f'[[repos.lab.stores]]\nurl = "node://{self.address(number)}/r"\n'
                f'options = {{ key_file = "/lab/{number}.client" }}\n'
            )
        text = 'default_repo = "lab"\nprogress = "none"\n[repos.lab]\n' + "".join(stores)
        (guests.shared / "kvctl.toml").write_text(text)
        for number in range(NODES):
            self.jobs.append(self.serve(number))
        for job in self.jobs:
            job.wait_for('"port"', PATIENCE)

    def address(self, number: int) -> str:
        return f"{self.guests[STORAGE].address}:{7781 + number}"

    def serve(self, number: int) -> Job:
        """Starts a node, over the objects that it has already."""
        place, options = f"/nodes/{number}", " ".join(self._options)
        return self.guests[STORAGE].start(
            f"mkdir -p {place} && exec kvctl -o jsonl node serve {place} --listen {self.address(number)} "
            f"--key-file /lab/{number}.master {options}",
            _VARIABLES,
        )

    def kvctl(self, arguments: str, *, guest: str = "client") -> Job:
        return self.guests[guest].start(f"exec kvctl {arguments}", _VARIABLES)

    def report(self, arguments: str, *, guest: str = "client") -> dict[str, Any]:  # Any: JSON
        """The report of a command that succeeds."""
        found: dict[str, Any] = json.loads(self.kvctl(f"-o json {arguments}", guest=guest).wait(PATIENCE).check())
        return found

    def same(self, one: str, other: str, *, guest: str = "client") -> None:
        """Two folders of a guest hold the same files. Raises LabError."""
        self.guests[guest].run(f"cd {one} && sha256sum * >/tmp/sums && cd {other} && sha256sum -c /tmp/sums").check()

    def metrics(self) -> dict[str, int]:
        """The numbers of all nodes' /metrics, summed."""
        places = [f"http://{self.address(number)}/metrics" for number in range(NODES)]
        program = f"import urllib.request as r\nfor p in {places}: print(r.urlopen(p, timeout=30).read().decode())"
        text = self.guests[STORAGE].run(f"python -SEc {shlex.quote(program)}").check()
        total: dict[str, int] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("kvctl_node_"):
                total[name] = total.get(name, 0) + int(float(value))
        return total

    def counted(self) -> Counted:
        found = self.metrics()
        ways = ("sent", "received")
        device = self.guests[STORAGE].counters()
        return Counted(
            sum(found[f"kvctl_node_{way}_bytes_total"] for way in ways),
            sum(found.get(f"kvctl_node_rdma_{way}_bytes_total", 0) for way in ways),
            device["sent_pkts"] + device["rcvd_pkts"],
        )


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as out:
        out.write(text)


def write_session(path: Path, *, seed: int = 5) -> None:
    """A bundle of a made-up conversation, SESSION_BYTES of _KV. Another seed, other bytes and other tokens."""
    rng = random.Random(seed)
    size = _TOKENS * _KV.kv_heads * _KV.k_dim * 2
    layers = {
        (0, layer): LayerKv(memoryview(rng.randbytes(size)), memoryview(rng.randbytes(size))) for layer in _KV.layers
    }
    tokens = array("I", (rng.randrange(32000) for _ in range(_TOKENS)))
    meaning = Descriptor("ab" * 32, "11" * 32, "22" * 32, "BF16", (_KV,))
    write_bundle(str(path), meaning, _TOKENS, layers, token_ids=tokens, producer={"model": "m", "engine": "test"})
