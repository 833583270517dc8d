"""kvctl's pull and push of KV as rivals, and what people do with files instead. A class imports its library when it
is made.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import xxhash

from kvctl.core.context import Context
from kvctl.kv.pull import PullSession, pull_from, pull_session
from kvctl.kv.push import PushSession, push_session
from kvctl.kv.seams import LayerKv, MemorySink
from kvctl.repo.repo import Repo
from scripts.bench import kv_data
from scripts.bench.ours import OursRepoVerified
from scripts.bench.peers_file import SafetensorsFresh, tensor_digests
from scripts.bench.peers_s3 import S5cmd, in_threads
from scripts.bench.rival import ModelFile, Rival, Setup, UnavailableError

if TYPE_CHECKING:
    import torch


def view_digests(file: ModelFile, layers: Sequence[LayerKv]) -> dict[str, str]:
    return {
        kv_data.tensor_name(file.name, number, part): xxhash.xxh3_64_hexdigest(view)
        for number, kv in enumerate(layers)
        for part, view in (("k", kv.k), ("v", kv.v))
    }


class LoadWeights(OursRepoVerified):
    """The same bytes as a model of the same repo: what a pull is held against."""

    note = "the same bytes as a model, leaves verified"


class Pull(Rival):
    note = "leaves verified"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._context = Context()
        self._members = kv_data.members(setup)
        self._sinks = [kv_data.TouchedSink(kv_data.tokens_of(file) * kv_data.TOKEN_BYTES) for file in setup.files]

    def load(self, variant: str) -> None:
        for number in range(len(self.setup.files)):
            self.pull(number)

    def pull(self, number: int) -> None:
        request = PullSession(self._members, kv_data.address(self.setup.files[number]), self._sinks[number])
        pull_session(request, self._context)

    def digests(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for file, sink in zip(self.setup.files, self._sinks, strict=True):
            if sink.usable == kv_data.tokens_of(file):
                found |= view_digests(file, sink.views)
        return found


class Many(Rival):
    """Each file once, by 1, 8 or 32 threads of one process; the seconds of each are kept."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._seconds: list[float] = []

    def variants(self) -> Sequence[str]:
        return ("1", "8", "32")

    def load(self, variant: str) -> None:
        self._seconds.clear()
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(self.setup.files)):
            waiting.put(number)
        in_threads([partial(self._work, waiting)] * int(variant))

    def _work(self, waiting: queue.SimpleQueue[int]) -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            begin = time.perf_counter()
            self.one(number)
            self._seconds.append(time.perf_counter() - begin)

    @abstractmethod
    def one(self, number: int) -> None: ...

    def facts(self) -> Mapping[str, object]:
        return {"each": list(self._seconds)}


class ManyPulls(Many, Pull):
    def load(self, variant: str) -> None:
        Many.load(self, variant)

    def one(self, number: int) -> None:
        self.pull(number)


class ManyPullsOfOneRepo(ManyPulls):
    """As a server does that stays: the repo is open already, and all pulls share it."""

    note = "leaves verified; they share an open repo"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._repo = Repo.open(self._members, self._context)

    def pull(self, number: int) -> None:
        request = PullSession((), kv_data.address(self.setup.files[number]), self._sinks[number])
        pull_from(self._repo, request, self._context)


class ManySafetensors(Many):
    takes_destination = False
    note = "load_file, every tensor cloned"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._parts = [SafetensorsFresh(replace(setup, files=(file,))) for file in setup.files]

    def one(self, number: int) -> None:
        self._parts[number].load("")

    def release(self) -> None:
        for part in self._parts:
            part.release()

    def digests(self) -> Mapping[str, str]:
        return {name: digest for part in self._parts for name, digest in part.digests().items()}


class ManyS5cmd(Many):
    takes_destination = False
    note = "one `s5cmd cp` to tmpfs each"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._program = s5cmd()
        self._folder = os.path.join(setup.scratch, "many-s5cmd")
        self.release()

    def one(self, number: int) -> None:
        source = f"s3://{self.setup.bucket}/{self.setup.key(self.setup.files[number])}"
        run_s5cmd(self._program, self.setup, "cp", source, f"{self._folder}/")

    def release(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.makedirs(self._folder)

    def digests(self) -> Mapping[str, str]:
        return {file.name: file_digest(os.path.join(self._folder, file.name)) for file in self.setup.files}


class S5cmdAndLoad(S5cmd):
    """What a script does: `s5cmd cp` to tmpfs, then safetensors into tensors."""

    note = "cp to tmpfs, then every tensor cloned"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import safetensors
        import torch  # noqa: F401 - not a part of a load

        self._open = safetensors.safe_open
        self._held: dict[str, torch.Tensor] = {}

    def load(self, variant: str) -> None:
        super().load(variant)
        for file in self.setup.files:
            with self._open(os.path.join(self._folder, file.name), framework="pt") as opened:
                self._held |= {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - no mapping

    def release(self) -> None:
        self._held.clear()
        super().release()

    def digests(self) -> Mapping[str, str]:
        return tensor_digests(self._held)


class Push(Rival):
    """A session that shares no block with another, from memory to an empty repo; the repo is made beforehand."""

    takes_destination: ClassVar[bool] = True
    note = "BLAKE3 of every pack, durable"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        (self._file,) = setup.files
        self._memory, self._tensors = kv_data.read_file(setup.folder, self._file)
        self._turn = 0
        self._members = kv_data.members(setup)
        self._fresh()

    def _fresh(self) -> None:
        self._turn += 1
        self._source = kv_data.source_of(self._file, self._tensors, self._turn)
        self._wipe()
        Repo.init(self._members, replicas=1, ctx=Context()).close()

    def _wipe(self) -> None:
        if self.setup.endpoint:
            wipe(self.setup, self.setup.repo.partition("://")[2].partition("/")[2])
        else:
            shutil.rmtree(self.setup.repo, ignore_errors=True)

    def load(self, variant: str) -> None:
        push_session(PushSession(self._members, kv_data.address(self._file), self._source), Context())

    def release(self) -> None:
        self._fresh()

    def digests(self) -> Mapping[str, str]:
        sink = MemorySink()
        pull_session(PullSession(self._members, kv_data.address(self._file), sink), Context())
        found = view_digests(self._file, [sink.layers[0, layer] for layer in range(kv_data.LAYERS)])
        sink.close()
        return found


class SaveFile(Rival):
    note = "save_file; in the page cache, not yet durable"
    sync: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import torch
        from safetensors.torch import save_file

        self._save = save_file
        (self._file,) = setup.files
        self._memory, views = kv_data.read_file(setup.folder, self._file)
        tokens = kv_data.tokens_of(self._file)
        shape = (kv_data.HEADS, tokens, kv_data.DIM)
        self._tensors: dict[str, torch.Tensor] = {
            name: torch.frombuffer(view, dtype=torch.bfloat16).reshape(shape) for name, view in views.items()
        }
        self._path = self.place(self._file.name)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)

    def place(self, name: str) -> str:
        return os.path.join(self.setup.repo + "-saved", name)

    def load(self, variant: str) -> None:
        self._save(self._tensors, self._path)
        if self.sync:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            os.fsync(fd)
            os.close(fd)

    def release(self) -> None:
        os.unlink(self._path)

    def digests(self) -> Mapping[str, str]:
        folder, name = os.path.split(self._path)
        _, tensors = kv_data.read_file(folder, ModelFile(name, os.path.getsize(self._path), 0, "", {}))
        return {name: xxhash.xxh3_64_hexdigest(view) for name, view in tensors.items()}


class SaveFileSynced(SaveFile):
    note = "save_file, then fsync"
    sync = True


class S5cmdUp(Rival):
    note = "cp of a file in tmpfs"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._program = s5cmd()
        (self._file,) = setup.files
        self._path = os.path.join(setup.scratch, f"up-{type(self).__name__}", self._file.name)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._key = f"pushed-{type(self).__name__}/{self._file.name}"
        shutil.copyfile(os.path.join(setup.folder, self._file.name), self._path)

    def load(self, variant: str) -> None:
        run_s5cmd(self._program, self.setup, "cp", self._path, f"s3://{self.setup.bucket}/{self._key}")

    def release(self) -> None:
        wipe(self.setup, self._key)

    def digests(self) -> Mapping[str, str]:
        back = f"{self._path}.back"
        run_s5cmd(self._program, self.setup, "cp", f"s3://{self.setup.bucket}/{self._key}", back)
        digest = file_digest(back)
        os.unlink(back)
        return {self._file.name: digest}


class SaveFileAndS5cmd(SaveFile):
    """From memory, as a push is: the file is written to tmpfs first."""

    note = "save_file to tmpfs, then cp"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._program = s5cmd()
        self._key = f"pushed-{type(self).__name__}/{self._file.name}"

    def place(self, name: str) -> str:
        return os.path.join(self.setup.scratch, "save-and-s5cmd", name)

    def load(self, variant: str) -> None:
        super().load(variant)
        run_s5cmd(self._program, self.setup, "cp", self._path, f"s3://{self.setup.bucket}/{self._key}")

    def release(self) -> None:
        super().release()
        wipe(self.setup, self._key)

    def digests(self) -> Mapping[str, str]:
        os.unlink(self._path)
        run_s5cmd(self._program, self.setup, "cp", f"s3://{self.setup.bucket}/{self._key}", self._path)
        return super().digests()


def s5cmd() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "s5cmd")
    program = beside if os.access(beside, os.X_OK) else shutil.which("s5cmd")
    if not program:
        raise UnavailableError("no s5cmd beside python or on PATH")
    return program


def run_s5cmd(program: str, setup: Setup, *words: str) -> None:
    command = [program, "--endpoint-url", setup.endpoint, "--log", "error", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)


def wipe(setup: Setup, prefix: str) -> None:
    """Delete what is under a prefix of the bench's bucket."""
    import boto3

    client = boto3.client("s3", endpoint_url=setup.endpoint)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=setup.bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            client.delete_object(Bucket=setup.bucket, Key=item["Key"])
    client.close()


def file_digest(path: str) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
