"""`kvctl.attach`: a slot's tensors in this process, without a copy, over the agent's own memory. With `weights.api` the
place that imports torch, and only when it is called.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.agent.client import AgentClient, OpenedFile
from kvctl.agent.generations import HOST
from kvctl.agent.memory import map_shared
from kvctl.core.errors import EnvError, UsageError
from kvctl.memory.cuda import tensor_over
from kvctl.memory.devices import open_shareable
from kvctl.memory.shareable import HostMapped, Shareable
from kvctl.weights.dtypes import DTYPES, torch_shape
from kvctl.weights.safetensors import Header, parse_header

if TYPE_CHECKING:
    import torch


class Attached(Mapping[str, "torch.Tensor"]):
    """A slot's tensors by name, over the agent's memory. The lease is held while this object or any of its tensors
    lives. Writing to a tensor is a fault of the process (SIGSEGV; on a GPU an error of CUDA), unless it was
    attached with `private=True`.

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

    `device`: where the slot is, as this process calls it (cuda:0, whatever the agent's number of it).
    `private`: writes of this process go to pages of its own (copy-on-write); else the memory is read-only.
    `tp_rank`: that rank's tensors, of a slot that holds several ranks' slices.
    `generation`: the `ident` of one that does not serve (before a swap flips). Raises EnvError (no agent, no torch, no
    such GPU), NotFoundError, UsageError, IncompatibleError (the slot is on a device, and none was asked for).
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EnvError("tensors need torch", cause=str(error), hint="pip install 'kvctl[torch]'") from error
    there = None if device == HOST else open_shareable(device)
    if there is not None and private:
        raise UsageError("a device has no private mappings", hint="clone the tensors that are to be written")
    client = AgentClient(socket, label="attach")
    left: list[OpenedFile] = []
    try:
        opened = client.open(slot.removeprefix("slot:"), generation, devices=there is not None)
        left = list(opened.files)
        tensors: dict[str, torch.Tensor] = {}
        files: dict[str, bytes] = {}
        while left:
            file = left.pop(0)
            if file.header:
                if not _wanted(file, tp_rank):
                    file.close()
                    continue
                if there is None:
                    found = dict(_tensors(file, client, private=private))
                else:
                    found = dict(_on_device(file, client, there))
                if not tensors.keys().isdisjoint(found):
                    raise UsageError(f"slot {slot} holds several ranks' slices", hint="say which: tp_rank=N")
                tensors.update(found)
                continue
            files[file.name] = os.pread(file.fd, file.size, 0) if file.size else b""
            os.close(file.fd)
    except BaseException:
        for file in left:
            file.close()  # a descriptor keeps the memory, whoever unloads the slot
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
    yield from _views(header, flat, file.header)


def _on_device(file: OpenedFile, lease: AgentClient, device: Shareable) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    space = file.space
    try:
        if space is None:
            raise UsageError(
                f"{file.name} is in host memory, not on {device.name}",
                hint="attach on the CPU, then copy: tensor.to(device)",
            )
        if space.ident != device.ident:
            raise UsageError(
                f"{file.name} is on another device than {device.name}",
                cause=f"it is on {space.ident}, {device.name} is {device.ident} in this process",
                hint="name that one, as CUDA_VISIBLE_DEVICES numbers it here; of several ranks: tp_rank=N",
            )
        header = parse_header(os.pread(file.fd, file.header, 0), file.size, file.name)
        mapped = device.map(file.space_fd, space.nbytes, writable=False)
    finally:
        file.close()
    mapped.lease = lease
    if isinstance(mapped, HostMapped):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            flat = torch.frombuffer(mapped, dtype=torch.uint8)
    else:
        flat = tensor_over(mapped, device.name)
    yield from _views(header, flat, space.start)


def _views(header: Header, flat: Any, start: int) -> Iterator[tuple[str, Any]]:  # Any: torch.Tensor
    """The tensors over the bytes `flat`, where the data section begins at `start`."""
    import torch

    for tensor in header.tensors:
        kind = DTYPES[tensor.dtype]
        dtype = getattr(torch, kind.torch, None)
        if dtype is None:
            raise EnvError(f"this torch has no dtype {kind.torch} (tensor {tensor.name})", hint="install a newer torch")
        shape = torch_shape(kind, tensor.shape)
        if tensor.end == tensor.start:
            yield tensor.name, torch.empty(shape, dtype=dtype, device=flat.device)
            continue
        found = flat[start + tensor.start : start + tensor.end]
        width = kind.bits * kind.packed // 8
        if width > 1 and found.data_ptr() % width:
            found = found.clone()  # a header whose length suits no dtype: this tensor owns a copy
        yield tensor.name, found.view(dtype).reshape(shape)
