"""LMCache's file backend as a rival: `LocalDiskBackend` with its defaults, chunks of 256 tokens, no GPU. What it reads
to and writes from is its own pool in host memory, made and touched beforehand.

scripts/bench/run installs it into a folder of its own, which must come before the bench's: it wants another numpy.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import xxhash

from scripts.bench import kv_data
from scripts.bench.kv_rivals import Many
from scripts.bench.rival import ModelFile, Rival, Setup, UnavailableError

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj

PLACE: Final = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".bench", "lmcache"))
CHUNK_TOKENS: Final = 256


def version() -> dict[str, str]:
    """By name of the package; empty when it is not there."""
    found = importlib.metadata.distributions(name="lmcache", path=[PLACE])
    return {one.metadata["Name"]: one.version for one in found}


class Backend:
    """The backend and its pool. Chunks hold the file's bytes in order: LMCache does not look at them."""

    def __init__(self, folder: str, files: tuple[ModelFile, ...]) -> None:
        if not os.path.isdir(os.path.join(PLACE, "lmcache")):
            raise UnavailableError("lmcache is not installed beside the bench")
        sys.path.insert(0, PLACE)
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        nbytes = sum(kv_data.tokens_of(file) * kv_data.TOKEN_BYTES for file in files)
        shutil.rmtree(folder, ignore_errors=True)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, local_cpu=False, local_disk=folder, max_local_disk_size=nbytes / 2**30 * 2 + 1
        )
        pool = MixedMemoryAllocator(nbytes + (64 << 20))
        pool.buffer.fill_(0)  # touches it
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._pool = LocalCPUBackend(config, memory_allocator=pool, dst_device="cpu")
        self._disk = LocalDiskBackend(config, loop, self._pool, dst_device="cpu")
        self._format = MemoryFormat.KV_2LTD
        self._torch = torch
        self.keys: list[list[CacheEngineKey]] = []
        for number, file in enumerate(files):
            chunks = -(-kv_data.tokens_of(file) // CHUNK_TOKENS)
            self.keys.append([CacheEngineKey("bench", 1, 0, number << 32 | n, torch.bfloat16) for n in range(chunks)])

    def fill(self, folder: str, file: ModelFile) -> list[MemoryObj]:
        """The file's chunks in the pool."""
        memory, _ = kv_data.read_file(folder, file)
        total = kv_data.tokens_of(file)
        chunks: list[MemoryObj] = []
        at = file.data_start
        for begin in range(0, total, CHUNK_TOKENS):
            tokens = min(CHUNK_TOKENS, total - begin)
            shape = self._torch.Size([2, kv_data.LAYERS, tokens, kv_data.HEADS * kv_data.DIM])
            chunk = self._pool.allocate(shape, self._torch.bfloat16, self._format)
            size = tokens * kv_data.TOKEN_BYTES
            memoryview(chunk.byte_array).cast("B")[:size] = memory.view[at : at + size]
            at += size
            chunks.append(chunk)
        memory.close()
        return chunks

    def put(self, number: int, chunks: list[MemoryObj]) -> None:
        """Returns when every chunk is written."""
        done = threading.Semaphore(0)
        self._disk.batched_submit_put_task(self.keys[number], chunks, on_complete_callback=lambda _: done.release())
        for _ in chunks:
            done.acquire()

    def get(self, number: int) -> list[MemoryObj]:
        found: list[MemoryObj] = self._disk.batched_get_blocking(self.keys[number])
        if any(chunk is None for chunk in found):
            raise OSError("LMCache has not all of the session's chunks")
        return found

    def forget(self, number: int) -> None:
        for key in self.keys[number]:
            self._disk.remove(key)

    @staticmethod
    def free(chunks: list[MemoryObj]) -> None:
        for chunk in chunks:
            chunk.ref_count_down()
        chunks.clear()

    @staticmethod
    def digests(file: ModelFile, chunks: list[MemoryObj]) -> dict[str, str]:
        """By tensor, though tensors run across chunks."""
        whole = memoryview(b"".join(memoryview(chunk.byte_array).cast("B") for chunk in chunks))
        size = kv_data.tokens_of(file) * kv_data.PART_ROW
        return {
            name: xxhash.xxh3_64_hexdigest(whole[at * size : (at + 1) * size]) for at, name in enumerate(file.tensors)
        }


class LMCachePull(Rival):
    note = "LocalDiskBackend, not verified"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._backend = Backend(os.path.join(setup.repo + "-lmcache", type(self).__name__), setup.files)
        self._held: list[list[MemoryObj]] = [[] for _ in setup.files]
        for number, file in enumerate(setup.files):
            chunks = self._backend.fill(setup.folder, file)
            self._backend.put(number, chunks)
            self._backend.free(chunks)

    def load(self, variant: str) -> None:
        for number in range(len(self.setup.files)):
            self.one(number)

    def one(self, number: int) -> None:
        self._held[number] = self._backend.get(number)

    def release(self) -> None:
        for chunks in self._held:
            self._backend.free(chunks)

    def digests(self) -> Mapping[str, str]:
        return {
            name: digest
            for file, chunks in zip(self.setup.files, self._held, strict=True)
            for name, digest in self._backend.digests(file, chunks).items()
        }


class ManyLMCache(LMCachePull, Many):
    def __init__(self, setup: Setup) -> None:
        LMCachePull.__init__(self, setup)

    def load(self, variant: str) -> None:
        Many.load(self, variant)


class LMCachePush(Rival):
    note = "LocalDiskBackend; in the page cache, not yet durable"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        (self._file,) = setup.files
        self._backend = Backend(os.path.join(setup.repo + "-lmcache", type(self).__name__), setup.files)
        self._chunks = self._backend.fill(setup.folder, self._file)

    def load(self, variant: str) -> None:
        self._backend.put(0, self._chunks)

    def release(self) -> None:
        self._backend.forget(0)

    def digests(self) -> Mapping[str, str]:
        self._backend.free(self._chunks)  # room in the pool
        back = self._backend.get(0)
        found = self._backend.digests(self._file, back)
        self._chunks = back
        return found


class LMCacheS3(Rival):
    """Says why it is not measured."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        raise UnavailableError(
            "not tried: its S3 connector names buckets in the host, and the bench's server has no such names"
        )

    def load(self, variant: str) -> None:
        raise NotImplementedError

    def digests(self) -> Mapping[str, str]:
        return {}
