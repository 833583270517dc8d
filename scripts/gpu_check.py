"""The CUDA suite as a program: loads onto the device by every path that can run here, verified against the source;
slices, damage, overlap, a device without room, two devices. Prints one JSON document (schema kvctl.gpu-check/1).

Without a GPU the very same runs on the stand-in `hostdev`, and `open` lists what only a GPU can show. Exit code 0 when
every check held, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import xxhash

from kvctl.core.addresses import StoreConfig, parse_store
from kvctl.core.context import Context
from kvctl.core.errors import CapacityError, EnvError, IntegrityError
from kvctl.core.units import parse_size
from kvctl.doctor import gpu
from kvctl.doctor.findings import Machine
from kvctl.memory.buffers import HostBuffer
from kvctl.memory.cuda import require
from kvctl.memory.devices import HOST_DEVICE, Device, HostDevice, open_device
from kvctl.repo.admin import InitOptions, init_repo
from kvctl.testing.nodes import NodeProcess
from kvctl.transfer.report import Report
from kvctl.transports import registry
from kvctl.weights.load import Loaded, load_into
from kvctl.weights.ondevice import DeviceTarget
from kvctl.weights.push import PushRequest, push_weights
from kvctl.weights.request import LoadRequest
from kvctl.weights.targets import MemoryTarget
from scripts.gpu_parts import SlowHostDevice, Watched, write_model
from scripts.gpu_slots import slots

SCHEMA: Final = "kvctl.gpu-check/1"
ONLY_A_GPU: Final = (
    "pinned memory and copies over PCIe or NVLink: their speed, and that they overlap with reading",
    "CUDA's own errors: out of memory, a failed copy",
    "transports that write into GPU memory (nixl-gds, native-rdma with GPUDirect)",
    "tensors on cuda:N out of kvctl.load_weights",
    "slots on a GPU: CUDA's own virtual memory calls, descriptors of them, and read-only mappings",
    "two GPUs at once",
)


@dataclass
class Suite:
    """What is tested on, and what was found."""

    device: str
    rounds: int
    folder: str
    model: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    unavailable: list[dict[str, str]] = field(default_factory=list)

    def open(self) -> Device:
        return open_device(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device != HOST_DEVICE

    def check(self, name: str, run: Callable[[], Mapping[str, Any]]) -> None:
        """Run one check and take down how it ended; a failure is a result."""
        print(f"{name} ..", file=sys.stderr, flush=True)
        try:
            found = {"ok": True, **run()}
        except Exception as problem:
            found = {"ok": False, "error": f"{type(problem).__name__}: {problem}"}
        self.checks.append({"name": name, **found})
        print(f"  {'ok' if found['ok'] else 'FAILED'}", file=sys.stderr, flush=True)


def sums(loaded: Loaded, look: Callable[[int, int, int], memoryview]) -> dict[str, str]:
    """XXH3 of each tensor's bytes."""
    return {
        tensor.name: xxhash.xxh3_64_hexdigest(look(tensor.output, tensor.start, tensor.end))
        for tensor in loaded.plan.tensors
    }


def on_cpu(request: LoadRequest) -> dict[str, str]:
    """The sums of a load into host memory."""
    _, loaded = load_into(request, MemoryTarget(), Context())
    assert loaded is not None
    places = loaded.landings

    def look(output: int, start: int, end: int) -> memoryview:
        return places[output].buffer.view[places[output].data_start + start : places[output].data_start + end]

    found = sums(loaded, look)
    for landing in places:
        landing.buffer.close()
    return found


@contextmanager
def onto(device: Device, request: LoadRequest) -> Iterator[tuple[Report, dict[str, str]]]:
    """The report of a load onto the device, and the sums of what it holds then."""
    target = DeviceTarget(device)
    report, loaded = load_into(request, target, Context())
    assert loaded is not None
    # the load ended its streams; what it left is read with a device of its own
    reader = open_device(device.name)

    def look(output: int, start: int, end: int) -> memoryview:
        scratch = HostBuffer(end - start)
        reader.read_back(loaded.landings[output].buffer, loaded.landings[output].data_start + start, scratch.view)
        return scratch.view

    try:
        yield report, sums(loaded, look)
    finally:
        reader.close()
        for landing in loaded.landings:
            landing.buffer.close()


def facts(report: Report) -> dict[str, Any]:
    return {
        "gb_per_s": report.gbps,
        "seconds": report.seconds,
        "setup_s": report.setup_s,
        "bytes": report.bytes,
        "cpu_s": report.cpu_s,
        "busy": report.stages,
        "transport": report.transport[0].name if report.transport else "",
        "verified": report.verified.state,
        "device": report.extra.get("device"),
    }


def load_over(suite: Suite, request: LoadRequest, expected: Mapping[str, str]) -> dict[str, Any]:
    """Rounds of one load, each compared with the source."""
    reports = []
    for _ in range(suite.rounds):
        with onto(suite.open(), request) as (report, found):
            if found != expected:
                raise IntegrityError("the device holds other bytes than the source")
            reports.append(report)
    best = max(reports, key=lambda report: report.gbps)
    return {"gb_per_s_median": statistics.median(report.gbps for report in reports), "best": facts(best)}


def paths(suite: Suite, config: StoreConfig, expected: Mapping[str, str]) -> None:
    """Every transport of the store that can reach the device, straight or through slots."""
    device = suite.open()
    kinds = {device.memory_kind, device.staging_kind}
    device.close()
    address = config.url + ("?" + "&".join(f"{k}={v}" for k, v in config.options.items()) if config.options else "")
    for spec in sorted(registry.transport_specs().values(), key=lambda item: (-item.rank, item.name)):
        if spec.schemes and config.scheme not in spec.schemes:
            continue
        probed = registry.probe(spec)
        if not probed.available or not kinds & spec.memory_kinds:
            why = probed.reason or f"it moves bytes to {', '.join(sorted(spec.memory_kinds))} memory"
            suite.unavailable.append({"store": config.scheme, "path": spec.name, "reason": why})
            continue
        request = LoadRequest(address, into="memory", transport=spec.name)
        suite.check(f"load from {config.scheme} by {spec.name}", partial(load_over, suite, request, expected))


def slices(suite: Suite) -> Mapping[str, Any]:
    """Both ranks of a tensor-parallel load: rows cut apart on the device."""
    for rank in range(2):
        request = LoadRequest(suite.model, into="memory", tp_rank=rank, tp_size=2)
        with onto(suite.open(), request) as (_, found):
            if found != on_cpu(request):
                raise IntegrityError(f"rank {rank} differs from a load into host memory")
    return {}


def damage(suite: Suite) -> Mapping[str, Any]:
    """A repo's leaf checksums are verified on the way, and a damaged chunk is found."""
    place = os.path.join(suite.folder, "repo")
    stores = (parse_store(place),)
    init_repo(stores, Context(), InitOptions(16 << 20, 1))
    push_weights(PushRequest(suite.model, "m", stores), Context())
    request = LoadRequest("m", repo=stores, into="memory")
    with onto(suite.open(), request) as (report, found):
        if found != on_cpu(request):
            raise IntegrityError("the device holds other bytes than the repo")
        if report.verified.state != "leaves":
            raise IntegrityError(f"the load was verified by {report.verified.state}")
        result = {"best": facts(report)}
    chunk = max((path for path in Path(place, "chunks").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    with open(chunk, "r+b") as file:
        file.seek(chunk.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    try:
        load_into(request, DeviceTarget(suite.open()), Context())
    except IntegrityError as error:
        return {**result, "found": str(error)}
    raise EnvError("a damaged chunk was loaded")


def overlap(suite: Suite) -> Mapping[str, Any]:
    """Ranges are read, verified and begun while a copy runs: copies are made slower, and those that were begun while
    another ran are counted. No time is judged.
    """
    device = Watched(suite.open() if suite.on_gpu else SlowHostDevice())
    with onto(device, LoadRequest(suite.model, into="memory", transport="file")) as (report, _):
        found = {"copies": device.begun, "begun_while_another_ran": device.together, "busy": report.stages}
    if device.begun > 1 and not device.together:
        raise EnvError(f"none of {device.begun} copies was begun while another ran")
    return found


def no_room(suite: Suite) -> Mapping[str, Any]:
    """A device without room says so before a byte moves, and the next load is as if nothing had been."""
    device: Device = HostDevice(capacity=1 << 20)
    taken: list[Any] = []
    if suite.on_gpu:
        device = suite.open()
        lib = require(suite.device)
        free, _ = lib.cuda.mem_get_info(device.name)
        total = sum(path.stat().st_size for path in Path(suite.model).glob("*.safetensors"))
        taken.append(lib.empty(max(0, free - total // 2), dtype=lib.uint8, device=device.name))
    try:
        load_into(LoadRequest(suite.model, into="memory"), DeviceTarget(device), Context())
    except CapacityError as error:
        said = str(error)
    else:
        raise EnvError("a load fitted that cannot fit")
    finally:
        taken.clear()
        if suite.on_gpu:
            require(suite.device).cuda.empty_cache()
    with onto(suite.open(), LoadRequest(suite.model, into="memory")):
        return {"said": said}


def two_devices(suite: Suite, names: tuple[str, str]) -> Mapping[str, Any]:
    """A rank on each, by two loads at once and by one load of both."""
    problems: list[BaseException] = []
    requests = [LoadRequest(suite.model, into="memory", tp_rank=number, tp_size=2) for number in range(2)]
    expected = [on_cpu(request) for request in requests]

    def rank(number: int) -> None:
        try:
            with onto(open_device(names[number]), requests[number]) as (_, found):
                if found != expected[number]:
                    problems.append(IntegrityError(f"rank {number} differs"))
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    with ExitStack() as stack:
        both = DeviceTarget(open_device(names[0]), open_device(names[1]))
        report, loaded = load_into(LoadRequest(suite.model, into="memory", tp_size=2), both, Context())
        assert loaded is not None
        for number, landing in enumerate(loaded.landings):
            stack.callback(landing.buffer.close)
            reader = open_device(names[number])
            stack.callback(reader.close)
            for tensor in (item for item in loaded.plan.tensors if item.output == number):
                view = HostBuffer(tensor.end - tensor.start).view
                reader.read_back(landing.buffer, landing.data_start + tensor.start, view)
                if xxhash.xxh3_64_hexdigest(view) != expected[number][tensor.name]:
                    raise IntegrityError(f"{tensor.name} of rank {number} differs")
    return {"devices": list(names), "in_one_run": facts(report)}


def tensors(suite: Suite) -> Mapping[str, Any]:
    """The Python API: tensors where they were asked for, equal to those of the CPU."""
    import torch

    import kvctl

    there = kvctl.load_weights(suite.model, device=suite.device)
    here = kvctl.load_weights(suite.model)
    if there.keys() != here.keys():
        raise IntegrityError("other names")
    for name, tensor in there.items():
        if suite.on_gpu and str(tensor.device) != suite.device:
            raise EnvError(f"{name} is on {tensor.device}")
        if not torch.equal(tensor.cpu().view(torch.uint8), here[name].view(torch.uint8)):
            raise IntegrityError(f"{name} differs")
    return {"tensors": len(there)}


def pick(wanted: str) -> tuple[str, str]:
    """(device, why no GPU)."""
    if wanted not in {"auto", HOST_DEVICE}:
        require(wanted)
        return wanted, ""
    if wanted == HOST_DEVICE:
        return HOST_DEVICE, "asked for"
    try:
        require("cuda:0")
    except EnvError as error:
        return HOST_DEVICE, str(error)
    return "cuda:0", ""


def run(suite: Suite, stores: list[str]) -> None:
    expected = on_cpu(LoadRequest(suite.model, into="memory"))
    if "file" in stores:
        paths(suite, parse_store(suite.model), expected)
    with ExitStack() as stack:
        if "node" in stores:
            place = os.path.join(suite.folder, "node")
            os.makedirs(place)
            node = stack.enter_context(NodeProcess.start(place, data=suite.model))
            paths(suite, node.store(), expected)
        if "s3" in stores:
            from kvctl.testing.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedFS

            os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_REGION="us-east-1")
            place = os.path.join(suite.folder, "s3")
            os.makedirs(place)
            server = stack.enter_context(SeaweedFS.launch(place))
            server.wait()
            config = server.store("gpu-check", "model")
            store = registry.open_store(config)
            for file in Path(suite.model).iterdir():
                store.put(file.name, file.read_bytes())
            store.close()
            options = {**config.options, "endpoint": config.endpoints[0]}
            paths(suite, replace(config, options=options), expected)
    suite.check("slices of two ranks", lambda: slices(suite))
    suite.check("verification and damage", lambda: damage(suite))
    suite.check("overlap of reading and copying", lambda: overlap(suite))
    suite.check("a device without room", lambda: no_room(suite))
    if find_spec("torch") is not None:
        suite.check("tensors out of the Python API", lambda: tensors(suite))
        size = sum(path.stat().st_size for path in Path(suite.model).glob("*.safetensors"))
        suite.check("a slot of the agent", lambda: slots(suite.device, suite.model, size))
    names = (HOST_DEVICE, HOST_DEVICE)
    if suite.on_gpu:
        if require(suite.device).cuda.device_count() < 2:
            return
        names = ("cuda:0", "cuda:1")
    suite.check("two devices at once", lambda: two_devices(suite, names))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description="The CUDA suite; prints JSON.")
    parser.add_argument("--device", default="auto", help="cuda:N, hostdev, or auto")
    parser.add_argument("--size", default="", help="of the model (default: 1GiB on a GPU, 96MiB without)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stores", default="file,node,s3", help="what is loaded from")
    arguments = parser.parse_args()
    device, why = pick(arguments.device)
    size = parse_size(arguments.size) if arguments.size else (1 << 30 if device != HOST_DEVICE else 96 << 20)
    with tempfile.TemporaryDirectory(prefix="kvctl-gpu-check-") as folder:
        suite = Suite(device, arguments.rounds, folder, os.path.join(folder, "model"))
        write_model(suite.model, size)
        run(suite, arguments.stores.split(","))
    open_lines = list(ONLY_A_GPU) if not suite.on_gpu else []
    if suite.on_gpu and not any(check["name"] == "two devices at once" for check in suite.checks):
        open_lines.append("two GPUs at once: one is here")
    findings = [{"name": item.name, "state": item.state, "value": item.value} for item in gpu.gpu(Machine())]
    document = {
        "schema": SCHEMA,
        "ok": all(check["ok"] for check in suite.checks),
        "gpu": suite.on_gpu,
        "device": device,
        "because": why,
        "bytes": size,
        "machine": findings,
        "checks": suite.checks,
        "unavailable": suite.unavailable,
        "open": open_lines,
    }
    print(json.dumps(document, indent=2))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
