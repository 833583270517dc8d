"""Looking at native code from a child process with a deadline: loading a broken driver's library may crash or never
come back, and must not take the program along.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Final

SECONDS: Final = 8.0  # for one library or probe
START: Final = 30.0  # for the interpreter

_LOAD: Final = """
import ctypes, json, os, sys
out = os.dup(1)
os.dup2(2, 1)
held = []
for name in json.loads(sys.argv[2]):
    try:
        held.append(ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL))
    except OSError:
        pass
for name in json.loads(sys.argv[1]):
    os.write(out, (json.dumps({"try": name}) + "\\n").encode())
    try:
        ctypes.CDLL(name)
        said = ""
    except OSError as error:
        said = str(error)
    os.write(out, (json.dumps({"name": name, "said": said}) + "\\n").encode())
os._exit(0)  # foreign destructors may crash
"""

_PROBES: Final = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)
from kvctl.transports import registry
for name, spec in registry.transport_specs().items():
    os.write(out, (json.dumps({"try": name}) + "\\n").encode())
    found = registry.probe(spec)
    said = {"name": name, "available": found.available, "reason": found.reason, "hint": found.hint or spec.install_hint}
    os.write(out, (json.dumps(said) + "\\n").encode())
os._exit(0)
"""

# Bits of ibv_device_attr.device_cap_flags: IBV_DEVICE_MEM_WINDOW, .._TYPE_2A, .._TYPE_2B.
_WINDOWS: Final = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)
from pyverbs.device import Context
for name in json.loads(sys.argv[1]):
    os.write(out, (json.dumps({"try": name}) + "\\n").encode())
    try:
        flags = Context(name=name).query_device().device_cap_flags
        kinds = [kind for bit, kind in ((17, "type 1"), (23, "type 2A"), (24, "type 2B")) if flags >> bit & 1]
        said = {"name": name, "kinds": kinds, "said": ""}
    except Exception as error:
        said = {"name": name, "kinds": [], "said": str(error)}
    os.write(out, (json.dumps(said) + "\\n").encode())
os._exit(0)
"""


def loads(libraries: Sequence[str], first: Sequence[str] = (), seconds: float = SECONDS) -> Mapping[str, str]:
    """Library -> '' when the dynamic linker loads it, else its words. One that crashes or hangs is named so, and
    those after it are looked at by another child. `first`: what is loaded before them, since it brings their symbols.
    """
    found: dict[str, str] = {}
    while left := [name for name in libraries if name not in found]:
        known = len(found)
        for said in _lines(_LOAD, [json.dumps(left), json.dumps(list(first))], seconds, found):
            found[str(said["name"])] = str(said["said"])
        if len(found) == known:
            return {**found, **dict.fromkeys(left, "it could not be tried: no child process runs here")}
    return found


def transports(seconds: float = SECONDS) -> tuple[list[Mapping[str, object]], Mapping[str, str]]:
    """(what each transport's probe says, transport -> how its probe broke the process)."""
    broke: dict[str, str] = {}
    return list(_lines(_PROBES, [], seconds, broke)), broke


def windows(devices: Sequence[str], seconds: float = SECONDS) -> tuple[list[Mapping[str, object]], Mapping[str, str]]:
    """(the kinds of memory windows of each RDMA device, device -> how asking it broke the process). Needs pyverbs."""
    broke: dict[str, str] = {}
    return list(_lines(_WINDOWS, [json.dumps(list(devices))], seconds, broke)), broke


def _lines(
    code: str, arguments: Sequence[str], seconds: float, broke: dict[str, str]
) -> Sequence[Mapping[str, object]]:
    """The results that a child says until it ends; what it was at when it crashed, or said nothing for `seconds`, goes
    to `broke`. Its start is given longer: that says nothing about a library.
    """
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "NIXL_LOG_LEVEL": "ERROR"},
        start_new_session=True,
    )
    said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reader = threading.Thread(target=_pump, args=(child.stdout, said), daemon=True)
    reader.start()
    results: list[Mapping[str, object]] = []
    trying, wait, how = "", START, ""
    try:
        while line := said.get(timeout=wait):
            wait = seconds
            told = json.loads(line)
            if "try" in told:
                trying = told["try"]
            else:
                results.append(told)
                trying = ""
    except queue.Empty:
        how = f"no answer within {wait:g} s"
    finally:
        child.kill()
        status = child.wait()
        reader.join(seconds)
    if trying:
        broke[trying] = how or f"its process ended with {status}"
    return results


def _pump(source: IO[bytes] | None, said: queue.SimpleQueue[bytes]) -> None:
    """Lines as they come, and an empty one at the end."""
    assert source is not None
    with source:
        for line in source:
            said.put(line)
    said.put(b"")
