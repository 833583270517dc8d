"""`kvctl.attach`: a slot's tensors in this process, without a copy, over the agent's own memory. With `weights.api` the
place that imports torch, and only when it is called.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.agent.client import AgentClient, OpenedFile
from kvctl.agent.memory import LeasedMap, map_shared
from kvctl.core.errors import EnvError, UsageError
from kvctl.weights.dtypes import DTYPES, torch_shape
from kvctl.weights.safetensors import Header, parse_header

if TYPE_CHECKING:
    import torch


class Attached(Mapping[str, "torch.Tensor"]):
    """A slot's tensors by name, over the agent's memory. The lease is held while this object or any of its tensors
    lives. Writing to a tensor is a fault of the process (SIGSEGV), unless it was attached with `private=True`.

    `ident` names the generation, `files` are the slot's small files (config, tokenizer).
    """

    def __init__(
        self, slot: str, ident: str, number: int, tensors: dict[str, torch.Tensor], files: dict[str, bytes]
    ) -> None:
        self.slot = slot
        self.ident = ident
        self.generation = number
        self.files = files
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Forget the tensors; the lease ends with the last one that somebody else still has."""
        self._tensors = {}


def attach(
    slot: str,
    *,
    device: str = "cpu",
    private: bool = False,
    tp_rank: int | None = None,
    generation: str | None = None,
    socket: str | None = None,
) -> Attached:
    """The tensors of a slot of this host's agent, in microseconds a tensor, whatever it measures.

    `private`: writes of this process go to pages of its own (copy-on-write); else the memory is read-only.
    `tp_rank`: that rank's tensors, of a slot that holds several ranks' slices.
    `generation`: the `ident` of one that does not serve (before a swap flips). Raises EnvError (no agent, no torch),
    NotFoundError, UsageError.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EnvError("tensors need torch", cause=str(error), hint="pip install 'kvctl[torch]'") from error
    if device != "cpu":
        raise UsageError(
            f"slots are in host memory, not on {device}", hint="attach on the CPU, then copy: tensor.to(device)"
        )
    client = AgentClient(socket, label="attach")
    try:
        opened = client.open(slot.removeprefix("slot:"), generation)
        tensors: dict[str, torch.Tensor] = {}
        files: dict[str, bytes] = {}
        for file in opened.files:
            if file.header:
                if not _wanted(file, tp_rank):
                    os.close(file.fd)
                    continue
                found = dict(_tensors(file, client, private=private))
                if not tensors.keys().isdisjoint(found):
                    raise UsageError(f"slot {slot} holds several ranks' slices", hint="say which: tp_rank=N")
                tensors.update(found)
                continue
            files[file.name] = os.pread(file.fd, file.size, 0) if file.size else b""
            os.close(file.fd)
    except BaseException:
        client.close()
        raise
    return Attached(opened.slot, opened.ident, opened.number, tensors, files)


def _wanted(file: OpenedFile, tp_rank: int | None) -> bool:
    return tp_rank is None or file.name.startswith(f"model-tp{tp_rank:03d}-of-")


def _tensors(file: OpenedFile, lease: AgentClient, *, private: bool) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    memory = map_shared(file.fd, file.size, lease, private=private)
    header = parse_header(bytes(memory[: file.header]), file.size, file.name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    yield from _views(header, flat, memory)


def _views(header: Header, flat: Any, memory: LeasedMap) -> Iterator[tuple[str, Any]]:  # Any: torch.Tensor
    import torch

    for tensor in header.tensors:
        kind = DTYPES[tensor.dtype]
        dtype = getattr(torch, kind.torch, None)
        if dtype is None:
            raise EnvError(f"this torch has no dtype {kind.torch} (tensor {tensor.name})", hint="install a newer torch")
        shape = torch_shape(kind, tensor.shape)
        if tensor.end == tensor.start:
            yield tensor.name, torch.empty(shape, dtype=dtype)
            continue
        found = flat[header.header_size + tensor.start : header.header_size + tensor.end]
        width = kind.bits * kind.packed // 8
        if width > 1 and found.data_ptr() % width:
            found = found.clone()  # a header whose length suits no dtype: this tensor owns a copy
        yield tensor.name, found.view(dtype).reshape(shape)
