"""Where tensors land: the output files of a whole load, and of a tensor-parallel rank's slices. Pure.

A whole load mirrors its files, byte for byte. A rank's slices become one safetensors file of their own, packed, widest
element types first, so that every tensor is aligned to its elements.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.weights.plan import Want
from kvctl.weights.runs import LoadedTensor, OutputFile
from kvctl.weights.safetensors import Header, TensorInfo
from kvctl.weights.slicing import ModelSlices, TensorSlice
from kvctl.weights.strided import span


@dataclass(frozen=True, slots=True)
class Layout:
    outputs: tuple[OutputFile, ...]
    tensors: tuple[LoadedTensor, ...]
    wants: tuple[Want, ...]


def layout_files(files: Sequence[tuple[str, Header]], *, congruent: bool) -> Layout:
    """Every file as it is. `congruent`: the source is the plain file itself, whose data begins after its header."""
    outputs: list[OutputFile] = []
    tensors: list[LoadedTensor] = []
    wants: list[Want] = []
    for number, (name, header) in enumerate(files):
        outputs.append(OutputFile(name, header.raw, header.data_size, header.header_size if congruent else 0))
        tensors += [LoadedTensor(t.name, t.dtype, t.shape, number, t.start, t.end) for t in header.tensors]
        if header.data_size:
            wants.append(Want(number, span(0, header.data_size), number, 0))
    return Layout(tuple(outputs), tuple(tensors), tuple(wants))


def layout_rank(headers: Sequence[Header], slices: ModelSlices, *, output: int = 0) -> Layout:
    """A rank's slices of all files in one file, as output number `output`."""
    order: list[tuple[int, TensorInfo, TensorSlice]] = [
        (number, tensor, slices.slices[tensor.name])
        for number, header in enumerate(headers)
        for tensor in header.tensors
    ]
    order.sort(key=lambda item: -item[1].type.bits)  # stable: the files' order otherwise
    document: dict[str, object] = {
        "__metadata__": {"format": "pt", "kvctl.tp_rank": str(slices.rank), "kvctl.tp_size": str(slices.size)}
    }
    tensors: list[LoadedTensor] = []
    wants: list[Want] = []
    at = 0
    for number, tensor, piece in order:
        start = at
        for run in piece.runs:
            wants.append(Want(number, run.shifted(tensor.start), output, at))
            at += run.nbytes
        tensors.append(LoadedTensor(tensor.name, tensor.dtype, piece.shape, output, start, at, slices.rank))
        document[tensor.name] = {"dtype": tensor.dtype, "shape": list(piece.shape), "data_offsets": [start, at]}
    name = f"model-tp{slices.rank:03d}-of-{slices.size:03d}.safetensors"
    return Layout((OutputFile(name, encode_header(document), at),), tuple(tensors), tuple(wants))


def encode_header(document: object, align: int = 8) -> bytes:
    """Length prefix and JSON, padded with spaces so that the data section begins at a multiple of `align` bytes."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % align)
    return len(text).to_bytes(8, "little") + text
