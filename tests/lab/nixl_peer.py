"""A guest's program: memory published by NIXL's UCX back end, and its reader, through kvctl's own `nixl-ucx`.

source PORT KEYFILE SIZE                  publishes `weights`; ends when killed
sink URL KEYFILE SIZE [--rounds N] [--mode pull|push]    one JSON line
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

from kvctl.core.addresses import StoreConfig
from kvctl.memory.buffers import HostBuffer
from kvctl.transports.api import Completion, Op, Status
from kvctl_nixl.peer.source import Source
from kvctl_nixl.peer.store import PeerStore
from kvctl_nixl.ucx import open_transport

PIECE = 8 << 20
COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")


def content(size: int) -> bytes:
    return random.Random(11).randbytes(size)


def counters() -> dict[str, int]:
    return {name: int((COUNTERS / name).read_text()) for name in ("sent_pkts", "rcvd_pkts")}


def source(known: argparse.Namespace) -> None:
    buffer = HostBuffer(known.size)
    buffer.view[:] = content(known.size)
    key = Path(known.key).read_text().strip().encode()
    with Source(os.environ["LAB_ADDRESS"], known.port, key=key) as running:
        running.publish("weights", buffer)
        print(running.url, flush=True)
        signal.pause()


def sink(known: argparse.Namespace) -> None:
    config = StoreConfig(known.url, (), {"key_file": known.key, "timeout": "20"})
    buffer = HostBuffer(known.size)
    store = PeerStore(config)
    said: dict[str, object] = {"rounds": 0, "error": None}
    with (
        contextlib.closing(store),
        contextlib.closing(open_transport(config, store, None, {"mode": known.mode})) as transport,
    ):
        version = store.stat("weights").version
        registration = transport.register(buffer)
        before = counters()
        began = time.monotonic()
        for _ in range(known.rounds):
            ops = [
                Op(number, "read", "weights", at, min(PIECE, known.size - at), buffer, at, version, known.size)
                for number, at in enumerate(range(0, known.size, PIECE))
            ]
            transport.submit(ops)
            ended: list[Completion] = []
            while len(ended) < len(ops):
                ended += transport.poll(30.0)
            wrong = [one for one in ended if one.status is not Status.DONE]
            if wrong:
                said["error"] = f"{wrong[0].status}: {wrong[0].error}"
                break
            said["rounds"] = int(str(said["rounds"])) + 1
        said["seconds"] = round(time.monotonic() - began, 3)
        said["counters"] = {name: value - before[name] for name, value in counters().items()}
        if said["error"] is None:
            said["same"] = buffer.view == content(known.size)
        print(json.dumps(said), flush=True)
        registration.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    what = parser.add_subparsers(dest="what", required=True)
    serving = what.add_parser("source")
    serving.add_argument("port", type=int)
    serving.add_argument("key")
    serving.add_argument("size", type=int)
    reading = what.add_parser("sink")
    reading.add_argument("url")
    reading.add_argument("key")
    reading.add_argument("size", type=int)
    reading.add_argument("--rounds", type=int, default=1)
    reading.add_argument("--mode", default="pull")
    known = parser.parse_args()
    (source if known.what == "source" else sink)(known)


if __name__ == "__main__":
    main()
