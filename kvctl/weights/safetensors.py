"""The safetensors header, parsed strictly from bytes. Pure: no I/O, no torch.

File = u64 LE length n, n bytes of JSON ('{' first, may end in spaces), data section. Offsets count from the start of
the data section; tensors cover it without hole or overlap. Where the reference implementation is lenient (duplicate
keys, unknown fields) this parser is not: two readers that disagree on a file are two models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvctl.core.errors import FormatError, SizeMismatchError
from kvctl.core.units import KIB
from kvctl.weights import strictjson
from kvctl.weights.dtypes import DTYPES, Dtype, dtype_of, nbytes_of
from kvctl.weights.sniff import looks_like

PROBE: Final = 64 * KIB  # first read of a file: most headers fit, and one request costs the same as 8 bytes
MAX_HEADER: Final = 100_000_000  # the reference implementation's limit
PREFIX: Final = 8
_INT_LIMIT: Final = 1 << 63
_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})
_DAMAGED: Final = "the header is damaged or hostile; fetch the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`start` and `end` are bytes from the start of the file's data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def type(self) -> Dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header. `header_size` is 8 + n: the file offset of the data section. `tensors` are in order of the
    data section, zero-size ones before the tensor they share an offset with. `raw`: the header's bytes, prefix
    included.
    """

    header_size: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    raw: bytes = field(repr=False)

    @property
    def data_size(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    @property
    def file_size(self) -> int:
        return self.header_size + self.data_size

    def by_name(self) -> dict[str, TensorInfo]:
        """Name -> tensor; builds the dict on each call."""
        return {tensor.name: tensor for tensor in self.tensors}


def header_size(first: bytes, file_size: int, where: str) -> int:
    """Bytes of the header with its length prefix, from the file's first bytes (8 or more, or the whole file).
    Raises FormatError, SizeMismatchError.
    """
    if file_size < PREFIX or len(first) < PREFIX:
        guess = looks_like(first, file_size)
        raise FormatError(
            f"{where} is no safetensors file" + (f": it {guess}" if guess else ""),
            cause=f"it has {file_size} bytes, the length prefix alone takes {PREFIX}",
            hint="fetch the file again",
            details={"file": where, "size": file_size},
        )
    length = int.from_bytes(first[:PREFIX], "little")
    bad_start = len(first) > PREFIX and first[PREFIX : PREFIX + 1] != b"{"
    if length > MAX_HEADER or bad_start or length < 2:
        guess = looks_like(first, file_size)
        what = f"{where} is no safetensors file" + (f": it {guess}" if guess else "")
        if length > MAX_HEADER:
            cause = f"its first 8 bytes give a header of {length} bytes, the limit is {MAX_HEADER}"
        elif length < 2:
            cause = f"its first 8 bytes give a header of {length} bytes, the smallest has 2"
        else:
            cause = f"its header must start with '{{', it starts with {first[PREFIX : PREFIX + 8]!r}"
        raise FormatError(what, cause=cause, hint="fetch the file again, or convert it", details={"file": where})
    if PREFIX + length > file_size:
        raise SizeMismatchError(
            f"{where} is shorter than its header",
            cause=f"the header takes {PREFIX + length} bytes, the file has {file_size}",
            hint="the file is cut off; fetch it again",
            details={"file": where, "expected": PREFIX + length, "size": file_size},
        )
    return PREFIX + length


def rest_of_header(first: bytes, file_size: int, where: str) -> tuple[int, int] | None:
    """(offset, length) of the second read, when the header is longer than `first`; None when it is whole."""
    size = header_size(first, file_size, where)
    return (len(first), size - len(first)) if size > len(first) else None


def parse_header(data: bytes, file_size: int, where: str) -> Header:
    """The header in `data` (which may go on after it) of a file of `file_size` bytes. `where` names the file in
    errors. Raises FormatError, SizeMismatchError (7), IncompatibleError (8).
    """
    size = header_size(data, file_size, where)
    if len(data) < size:
        raise SizeMismatchError(
            f"{where}: the header is not whole",
            cause=f"it takes {size} bytes, {len(data)} were read",
            details={"file": where, "expected": size, "size": len(data)},
        )
    document = strictjson.loads(memoryview(data)[PREFIX:size], where, "header")
    metadata = _metadata(document.pop("__metadata__", None), where)
    tensors = [_tensor(name, entry, where) for name, entry in document.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))  # stable: the header's order breaks ties
    _check_cover(tensors, where)
    header = Header(size, tuple(tensors), metadata, bytes(data[:size]))
    if header.file_size != file_size:
        longer = file_size > header.file_size
        raise SizeMismatchError(
            f"{where} has bytes after its last tensor" if longer else f"{where} is shorter than its header says",
            cause=f"the header describes {header.file_size} bytes, the file has {file_size}",
            hint="the file was appended to or mixed up; fetch it again"
            if longer
            else "the file is cut off; fetch it again",
            details={"file": where, "expected": header.file_size, "size": file_size},
        )
    return header


def _metadata(value: Any, where: str) -> Mapping[str, str]:  # Any: JSON
    if value is None:
        return {}
    if not isinstance(value, dict) or any(not isinstance(item, str) for item in value.values()):
        raise FormatError(f"{where}: __metadata__ must map strings to strings", hint=_DAMAGED)
    return value


def _tensor(name: str, entry: Any, where: str) -> TensorInfo:  # Any: JSON
    if not isinstance(entry, dict):
        raise FormatError(
            f"{where}: tensor {name!r} is described by {type(entry).__name__}, not an object", hint=_DAMAGED
        )
    if entry.keys() != _FIELDS:
        missing = sorted(_FIELDS - entry.keys())
        extra = sorted(entry.keys() - _FIELDS)
        raise FormatError(
            f"{where}: tensor {name!r} has " + (f"no {missing[0]!r}" if missing else f"an unknown field {extra[0]!r}"),
            cause=f"a tensor has exactly {sorted(_FIELDS)}, this one has {sorted(entry)}",
            hint="the header is damaged, or of a newer format",
        )
    dtype_name, shape_list, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype_name, str):
        raise FormatError(f"{where}: tensor {name!r} has a dtype that is no string: {dtype_name!r}", hint=_DAMAGED)
    if not isinstance(shape_list, list):
        raise FormatError(f"{where}: tensor {name!r} has a shape that is no list: {shape_list!r}", hint=_DAMAGED)
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise FormatError(f"{where}: tensor {name!r} has data_offsets that are no pair: {offsets!r}", hint=_DAMAGED)
    dtype = dtype_of(dtype_name, name, where)
    shape = tuple(_number(item, name, "shape", where) for item in shape_list)
    start, end = (_number(item, name, "data_offsets", where) for item in offsets)
    if start > end:
        raise FormatError(
            f"{where}: tensor {name!r} begins after its end", cause=f"begin {start}, end {end}", hint=_DAMAGED
        )
    nbytes = nbytes_of(dtype, shape, name, where)
    if nbytes != end - start:
        raise FormatError(
            f"{where}: tensor {name!r} does not fit its offsets",
            cause=f"{dtype_name} of shape {list(shape)} takes {nbytes} bytes, data_offsets give {end - start}",
            hint=_DAMAGED,
            details={"file": where, "tensor": name, "expected": nbytes, "size": end - start},
        )
    return TensorInfo(name, dtype_name, shape, start, end)


def _number(value: Any, tensor: str, part: str, where: str) -> int:  # Any: JSON
    if type(value) is int:  # not isinstance: true and false are ints to Python
        if value < 0:
            raise FormatError(f"{where}: tensor {tensor!r} has a negative number in its {part}: {value}", hint=_DAMAGED)
        if value >= _INT_LIMIT:
            raise FormatError(
                f"{where}: tensor {tensor!r} has a number that overflows in its {part}",
                cause=f"{value} is not below 2^63",
                hint=_DAMAGED,
            )
        return value
    if isinstance(value, strictjson.NotAnInteger):
        shown = f"the float {value.text}"
    else:
        shown = f"{value!r} ({type(value).__name__})"
    raise FormatError(
        f"{where}: tensor {tensor!r} has {shown} in its {part}", cause="whole numbers are needed", hint=_DAMAGED
    )


def _check_cover(tensors: list[TensorInfo], where: str) -> None:
    """Tensors sorted by offset must cover the data section from 0 without hole or overlap."""
    end = 0
    before: str | None = None
    for tensor in tensors:
        if tensor.start != end:
            overlap = tensor.start < end
            if overlap:
                what = f"{where}: tensors {before!r} and {tensor.name!r} overlap"
                cause = f"{before!r} ends at {end}, {tensor.name!r} begins at {tensor.start}"
            elif before is None:
                what = f"{where}: the first tensor {tensor.name!r} does not begin at 0"
                cause = f"it begins at {tensor.start}"
            else:
                what = f"{where}: a hole lies between tensors {before!r} and {tensor.name!r}"
                cause = f"{before!r} ends at {end}, {tensor.name!r} begins at {tensor.start}"
            raise FormatError(what, cause=cause, hint=_DAMAGED, details={"file": where, "tensor": tensor.name})
        end, before = tensor.end, tensor.name
