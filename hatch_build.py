"""Hatchling's hook: compiles the reader of HTTP bodies (kvctl/transports/http/pump.c), where there is a C compiler.

Without one kvctl is installed all the same and does that in Python (`kvctl doctor` tells). The result is a plain shared
object that fits every version of Python.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCE = "kvctl/transports/http/pump.c"
_TARGET = "kvctl/transports/http/_pump.so"


class CompiledReader(BuildHookInterface):  # type: ignore[type-arg]  # of its configuration, of which there is none
    """For wheels and for installs that point at the sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # Any: hatchling's own
        """`version`: 'editable' or 'standard'."""
        if self.target_name != "wheel" or not self._compile():
            return
        build_data["artifacts"].append(_TARGET)
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def _compile(self) -> bool:
        target = os.path.join(self.root, _TARGET)
        compiler = (
            shlex.split(os.environ.get("CC", ""))
            or [found for found in map(shutil.which, ("cc", "gcc", "clang")) if found][:1]
        )
        if sys.platform != "linux" or not compiler:
            self.app.display_warning("no C compiler: kvctl will read HTTP bodies in Python")
            return False
        # another name first: a kvctl that runs from these sources may have the old one open
        temp = f"{target}.{os.getpid()}"
        command = [*compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", temp, os.path.join(self.root, _SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(temp, target)
        except (OSError, subprocess.CalledProcessError) as problem:
            said = getattr(problem, "stderr", "") or str(problem)
            self.app.display_warning(f"the compiled reader could not be built, kvctl will do without: {said}")
            return False
        finally:
            if os.path.exists(temp):
                os.unlink(temp)
        return True
