"""kvctl as a rival: the whole of `load-weights` (headers, checks, plan, bytes) through its Python API."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import xxhash

from kvctl.core.addresses import parse_store
from kvctl.core.context import Context
from kvctl.memory.buffers import PAGE, HostBuffer
from kvctl.weights.api import load_weights
from kvctl.weights.load import load_into
from kvctl.weights.request import LoadRequest
from kvctl.weights.runs import OutputFile
from kvctl.weights.targets import Landing, MemoryTarget
from scripts.bench.rival import Rival, Setup, UnavailableError

if TYPE_CHECKING:
    import torch


class Reused(MemoryTarget):
    """Memory that was touched before the timed part, used again by every load of the same model."""

    def __init__(self) -> None:
        super().__init__()
        self._own: list[Landing] | None = None

    def open(self, outputs: Sequence[OutputFile], side_files: Mapping[str, bytes], fingerprint: str) -> bool:
        if self._own is None:
            self._own = []
            for output in outputs:
                start = output.congruent_to % PAGE
                buffer = HostBuffer(start + output.data_size)
                buffer.prefault()
                self._own.append(Landing(buffer, start))
        self.landings = self._own
        return False


class Ours(Rival):
    verify: ClassVar[str] = "none"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._target = Reused()
        self._context = Context()
        self._request = self.request()
        self._digests: Mapping[str, str] = {}
        self._load()  # touches the memory

    def request(self) -> LoadRequest:
        options = {"direct": "true"} if self.setup.direct else {}
        return LoadRequest(self.setup.folder, verify=self.verify, into="memory", transport_options=options)

    def _load(self) -> None:
        _, self._loaded = load_into(self._request, self._target, self._context)

    def load(self, variant: str) -> None:
        self._load()

    def digests(self) -> Mapping[str, str]:
        assert self._loaded is not None
        found: dict[str, str] = {}
        for tensor in self._loaded.plan.tensors:
            landing = self._loaded.landings[tensor.output]
            data = landing.buffer.view[landing.data_start + tensor.start : landing.data_start + tensor.end]
            found[tensor.name] = xxhash.xxh3_64_hexdigest(data)
        return found


class OursFresh(Ours):
    """`kvctl.load_weights`: memory of its own, allocated inside, torch tensors out."""

    takes_destination = False
    note = "kvctl.load_weights: allocates, torch tensors"

    def __init__(self, setup: Setup) -> None:
        Rival.__init__(self, setup)
        import torch  # noqa: F401 - not a part of a load

        self._request = self.request()
        self._held: dict[str, torch.Tensor] = {}

    def load(self, variant: str) -> None:
        request = self._request
        self._held = load_weights(request.address, verify=request.verify, transport_options=request.transport_options)

    def release(self) -> None:
        self._held.clear()

    def digests(self) -> Mapping[str, str]:
        from scripts.bench.peers_file import tensor_digests

        return tensor_digests(self._held)


class OursS3(Ours):
    """From the plain files under an S3 prefix."""

    def request(self) -> LoadRequest:
        where = f"s3://{self.setup.bucket}/{self.setup.prefix}?endpoint={self.setup.endpoint}"
        return LoadRequest(where, verify=self.verify, into="memory")


class OursS3Fresh(OursS3, OursFresh):
    def __init__(self, setup: Setup) -> None:
        OursFresh.__init__(self, setup)


class OursRepo(Ours):
    """From a repo of one member; repos have leaf checksums, so this is where verification can be shown."""

    note = "from a repo, not verified"

    def request(self) -> LoadRequest:
        if not self.setup.repo:
            raise UnavailableError("no repo could be made")
        members = (parse_store(self.setup.repo, endpoints=(self.setup.endpoint,) if self.setup.endpoint else ()),)
        options = {"direct": "true"} if self.setup.direct else {}
        name = os.path.basename(self.setup.folder)
        return LoadRequest(name, repo=members, verify=self.verify, into="memory", transport_options=options)


class OursRepoVerified(OursRepo):
    verify = "leaves"
    note = "from a repo, leaves verified"
