"""Looking at native code from a child process with a deadline: loading a broken driver's library may crash or never
come back, and must not take the program along.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

SECONDS: Final = 8.0

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


def _lines(
    code: str, arguments: Sequence[str], seconds: float, broke: dict[str, str]
) -> Sequence[Mapping[str, object]]:
    """The lines that a child says until it ends; what it was at when it crashed or was ended goes to `broke`."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, "NIXL_LOG_LEVEL": "ERROR"},
        start_new_session=True,
    )
    try:
        out, _ = child.communicate(timeout=seconds)
        how = f"its process ended with {child.returncode}"
    except subprocess.TimeoutExpired:
        child.kill()
        out, _ = child.communicate()
        how = f"no answer within {seconds:g} s"
    said = [json.loads(line) for line in out.decode(errors="replace").splitlines()]
    results = [line for line in said if "name" in line]
    tried = [line["try"] for line in said if "try" in line]
    if len(tried) > len(results):
        broke[tried[-1]] = how
    return results
