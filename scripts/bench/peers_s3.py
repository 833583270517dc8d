"""Rivals on S3: the bare client that is the ceiling, and the clients that people use. Credentials and region come
from the environment, which the bench sets for the workers. A class imports its library when it is made.
"""

from __future__ import annotations

import http.client
import io
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

import xxhash

from scripts.bench.peers_file import RunaiFile, RunaiFileCopy
from scripts.bench.rival import Destination, Piece, Rival, Setup, UnavailableError, pieces

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

RANGE: Final = 16 << 20


class Bare(Rival):
    """Unsigned ranged GETs by http.client, `readinto` straight into touched memory: 1, 2, 4 connections."""

    note = "http.client, readinto, unsigned"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._memory = Destination.make(setup)
        self._pieces = pieces(setup, self._memory.starts, RANGE)
        where = urlsplit(setup.endpoint)
        self._address = (where.hostname or "", where.port or 80)

    def variants(self) -> Sequence[str]:
        return ("1", "2", "4")

    def load(self, variant: str) -> None:
        count = int(variant)
        if count == 1:
            self._read(self._pieces)
            return
        in_threads([partial(self._read, self._pieces[turn::count]) for turn in range(count)])

    def _read(self, part: Sequence[Piece]) -> None:
        connection = http.client.HTTPConnection(*self._address)
        for piece in part:
            path = f"/{self.setup.bucket}/{self.setup.key(self.setup.files[piece.file])}"
            span = f"bytes={piece.offset}-{piece.offset + piece.length - 1}"
            connection.request("GET", path, headers={"Range": span})
            response = connection.getresponse()
            view = self._memory.buffer.view[piece.dest : piece.dest + piece.length]
            done = 0
            while done < piece.length:
                got = response.readinto(view[done:])
                if not got:
                    raise OSError(f"{path} ended early")
                done += got
            response.read()
        connection.close()

    def digests(self) -> Mapping[str, str]:
        return self._memory.digests(self.setup)


class Raw(Bare):
    """The same without http.client: one send, one header, `recv_into` with MSG_WAITALL."""

    note = "socket, recv_into, unsigned"

    def _read(self, part: Sequence[Piece]) -> None:
        with socket.create_connection(self._address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in part:
                path = f"/{self.setup.bucket}/{self.setup.key(self.setup.files[piece.file])}"
                span = f"bytes={piece.offset}-{piece.offset + piece.length - 1}"
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: bench\r\nRange: {span}\r\n\r\n".encode())
                head = b""
                while (end := head.find(b"\r\n\r\n")) < 0:
                    head += connection.recv(8192)
                view = self._memory.buffer.view[piece.dest : piece.dest + piece.length]
                body = head[end + 4 :]
                view[: len(body)] = body
                done = len(body)
                while done < piece.length:
                    got = connection.recv_into(view[done:], 0, socket.MSG_WAITALL)
                    if not got:
                        raise OSError(f"{path} ended early")
                    done += got


class Boto3(Rival):
    """boto3's transfer manager (`download_fileobj`), each file into its place in touched memory."""

    note = "download_fileobj, 10 threads"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self._memory = Destination.make(setup)
        self._client = boto3.client(
            "s3", endpoint_url=setup.endpoint, config=Config(s3={"addressing_style": "path"}, max_pool_connections=16)
        )
        self._transfer = TransferConfig(multipart_chunksize=RANGE, max_concurrency=10)

    def load(self, variant: str) -> None:
        for number, file in enumerate(self.setup.files):
            target = cast("IO[bytes]", _MemoryFile(self._memory.view(self.setup, number)))
            self._client.download_fileobj(self.setup.bucket, self.setup.key(file), target, Config=self._transfer)

    def digests(self) -> Mapping[str, str]:
        return self._memory.digests(self.setup)


class _MemoryFile(io.RawIOBase):
    """A file over a piece of memory, for a client that wants one."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def write(self, data: ReadableBuffer) -> int:
        size = memoryview(data).nbytes
        self._view[self._at : self._at + size] = data
        self._at += size
        return size


class Obstore(Rival):
    """`get_ranges` of 16 MiB; it returns memory of its own, kept until all is there."""

    takes_destination = False
    note = "get_ranges, 16 MiB"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import obstore
        from obstore.store import S3Store

        self._get = obstore.get_ranges
        self._store = S3Store(
            setup.bucket,
            endpoint=setup.endpoint,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        self._held: list[list[memoryview]] = []

    def load(self, variant: str) -> None:
        for file in self.setup.files:
            starts = list(range(0, file.size, RANGE))
            lengths = [min(RANGE, file.size - start) for start in starts]
            parts = self._get(self._store, self.setup.key(file), starts=starts, lengths=lengths, coalesce=0)
            self._held.append([memoryview(part) for part in parts])

    def release(self) -> None:
        self._held.clear()

    def digests(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for file, parts in zip(self.setup.files, self._held, strict=True):
            digest = xxhash.xxh3_64()
            for part in parts:
                digest.update(part)
            found[file.name] = digest.hexdigest()
        return found


class RunaiS3(RunaiFile):
    """runai-model-streamer-s3 with its defaults."""

    def __init__(self, setup: Setup) -> None:
        os.environ["AWS_ENDPOINT_URL"] = setup.endpoint
        os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
        super().__init__(setup)

    @property
    def sources(self) -> list[str]:
        return [f"s3://{self.setup.bucket}/{self.setup.key(file)}" for file in self.setup.files]


class RunaiS3Copy(RunaiS3, RunaiFileCopy):
    pass


class S5cmd(Rival):
    """`s5cmd cp` into tmpfs: a program, so its start is inside, as is the touch of fresh tmpfs pages."""

    takes_destination = False
    note = "cp of all files to tmpfs"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        beside = os.path.join(os.path.dirname(sys.executable), "s5cmd")
        self._program = beside if os.access(beside, os.X_OK) else shutil.which("s5cmd") or ""
        if not self._program:
            raise UnavailableError("no s5cmd beside python or on PATH")
        self._folder = os.path.join(setup.scratch, "s5cmd")

    def load(self, variant: str) -> None:
        source = f"s3://{self.setup.bucket}/{self.setup.prefix}/*.safetensors"
        command = [self._program, "--endpoint-url", self.setup.endpoint, "--log", "error"]
        os.makedirs(self._folder, exist_ok=True)
        subprocess.run([*command, "cp", source, f"{self._folder}/"], check=True, stdout=sys.stderr)

    def release(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def digests(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for file in self.setup.files:
            with open(os.path.join(self._folder, file.name), "rb") as landed:
                found[file.name] = xxhash.xxh3_64_hexdigest(landed.read())
        return found


class NixlObj(Rival):
    """NIXL's OBJ plug-in: one transfer of 16 MiB descriptors into registered, touched memory."""

    note = "one transfer, 16 MiB descriptors"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        os.environ.update({"NIXL_LOG_LEVEL": "ERROR", "UCX_MODULES": "^ib", "AWS_EC2_METADATA_DISABLED": "true"})
        # not `import nixl`: that picks the CUDA 13 build, whose OBJ plug-in wants the CUDA toolkit
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._memory = Destination.make(setup)
        self._agent = nixl_agent("bench", nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend(
            "OBJ",
            {
                "endpoint_override": setup.endpoint,
                "scheme": urlsplit(setup.endpoint).scheme,
                "bucket": setup.bucket,
                "access_key": os.environ["AWS_ACCESS_KEY_ID"],
                "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
                "region": os.environ["AWS_REGION"],
                "use_virtual_addressing": "false",
                "req_checksum": "required",
                "resp_checksum": "required",
                "num_threads": "4",
            },
        )
        base = self._memory.buffer.address
        self._agent.register_memory([(base, self._memory.buffer.nbytes, 0, "")], "DRAM", backends=["OBJ"])
        objects = [(0, 0, number + 1, setup.key(file)) for number, file in enumerate(setup.files)]
        self._agent.register_memory(objects, "OBJ", backends=["OBJ"])
        parts = pieces(setup, self._memory.starts, RANGE)
        self._local = self._agent.get_xfer_descs([(base + part.dest, part.length, 0) for part in parts], "DRAM")
        self._remote = self._agent.get_xfer_descs([(part.offset, part.length, part.file + 1) for part in parts], "OBJ")

    def load(self, variant: str) -> None:
        handle = self._agent.initialize_xfer("READ", self._local, self._remote, "bench", backends=["OBJ"])
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.001)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"NIXL says {state}")

    def digests(self) -> Mapping[str, str]:
        return self._memory.digests(self.setup)


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """Run them side by side; raise the first error."""
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.put(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors.empty():
        raise errors.get()
