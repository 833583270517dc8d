"""Builds the stand-in for libcuda.so.1, and runs programs that find it instead of a driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("libcuda_stand_in.c")
HEADERS = "/usr/local/cuda/include"  # where they are, the compiler compares the stand-in with the real cuda.h


def build(folder: Path, source: Path = SOURCE) -> Path:
    """The folder, with the library; skips where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt install gcc")
    include = [f"-I{HEADERS}"] if os.path.exists(f"{HEADERS}/cuda.h") else []
    command = [compiler, "-O1", "-Wall", "-shared", "-fPIC", *include, str(source), "-o"]
    subprocess.run([*command, str(folder / "libcuda.so.1")], check=True)
    return folder


def environment(library: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(library), **more}


def run(code: str, library: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A program of its own over the stand-in."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(library, **more), capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
