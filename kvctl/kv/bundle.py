"""KV bundles: one session's KV in one safetensors file, `bundle:PATH`, or as a stream (`-`).

    tensors     layer.<i>.k and layer.<i>.v, [kv_heads, tokens, dim] in the descriptor's dtype; of an MLA layer the
                latent and the rope part, one head each; layer.<i>.indexer, [1, tokens, dim]; layer.<i>.state, U8
                [bytes], of a recurrent layer
    metadata    "kvctl.bundle" "1"; "identity" the descriptor (canonical JSON); "tokens" their count; "token_ids" base64
                of u32 LE, or left out: then the reader brings them; "producer" JSON, labels; "starts" JSON, layer ->
                first token that it holds (left out: 0), for sliding layers; "extras" JSON, [[start, count, kind, digest
                hex], ..], left out when there are none

Files are mapped, not read; streams are read whole, as they cannot be read twice.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import mmap
import os
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final, Self

from kvctl.core.errors import (
    EnvError,
    FormatError,
    NotFoundError,
    SizeMismatchError,
    UsageError,
    VersionChangedError,
)
from kvctl.kv.documents import Fields, canonical, loads
from kvctl.kv.identity import Descriptor
from kvctl.kv.seams import LayerKv, MemorySource, Slot, slot_of
from kvctl.kv.tokens import Extra, Tokens, token_bytes, token_ids
from kvctl.memory.files import cannot_write
from kvctl.memory.whole import whole_file

FORMAT: Final = "kvctl.bundle"
_MAX_HEADER: Final = 100_000_000  # the limit of the safetensors reference implementation
_PREFIX: Final = 8
_PAGE: Final = 4096
_METADATA: Final = {FORMAT, "identity", "tokens"}
_OPTIONAL: Final = {"token_ids", "producer", "starts", "extras", "format"}


@dataclass(slots=True)
class Bundle:
    """A bundle that was read; a context manager, whose views end with it. `tokens`: their count. `layers`: by (group,
    layer). `token_ids`: None when the bundle does not hold them.
    """

    where: str
    descriptor: Descriptor
    tokens: int
    token_ids: array[int] | None
    layers: Mapping[tuple[int, int], LayerKv] = field(repr=False)
    producer: Mapping[str, str] = field(default_factory=dict)
    extras: tuple[Extra, ...] = ()
    _map: mmap.mmap | None = None
    _file: tuple[int, str] | None = None  # a descriptor of the mapped file, and its version

    def check(self) -> None:
        """Raises VersionChangedError when somebody has written to the mapped file since."""
        if self._file is not None and _version(self._file[0]) != self._file[1]:
            raise VersionChangedError(
                f"{self.where} changed while it was read", hint="push it again when nobody writes it"
            )

    def source(self, tokens: Tokens | None = None) -> MemorySource:
        """What `push` stores. `tokens`: the transcript, needed when the bundle has no token ids. Raises UsageError."""
        ids = self.token_ids if tokens is None else token_ids(token_bytes(tokens), "the transcript")
        if ids is None:
            raise UsageError(
                f"{self.where} holds no token ids", hint="give the transcript, or export it with --with-tokens"
            )
        if len(ids) != self.tokens or (self.token_ids is not None and ids != self.token_ids):
            raise UsageError(
                f"the transcript is not the one of {self.where}",
                cause=f"it has {len(ids)} tokens, the bundle {self.tokens}",
            )
        return MemorySource(
            self.descriptor, ids, self.layers, producer=self.producer, extras=self.extras, check=self.check
        )

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file[0])
            self._file = None
        for kv in self.layers.values():
            kv.k.release()
            kv.v.release()
        self.layers = {}
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is still out: the mapping goes with it
                self._map.close()
            self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_bundle(source: str | os.PathLike[str] | BinaryIO, where: str | None = None) -> Bundle:
    """A path is mapped, a binary stream is read to its end. `where` names it in errors. Raises NotFoundError, EnvError,
    FormatError, SizeMismatchError (7), IncompatibleError (8).
    """
    if isinstance(source, (str, os.PathLike)):
        return _read_file(os.fspath(source), where or os.fspath(source))
    return _read_stream(source, where or "the bundle on the stream")


def _read_file(path: str, where: str) -> Bundle:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise EnvError(f"{path} is no file", hint="'-' reads a bundle from stdin")
            size = status.st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
            kept = os.dup(file.fileno()), _version(file.fileno())
    except FileNotFoundError:
        raise NotFoundError(f"there is no {path}", hint="check the path") from None
    except OSError as error:
        raise EnvError(f"{path} cannot be read", cause=error.strerror) from error
    if mapped is None:
        os.close(kept[0])
        raise SizeMismatchError(f"{where} is no bundle", cause="it is empty")
    view = memoryview(mapped)
    try:
        header = _header_size(bytes(view[:_PREFIX]), len(view), where)
        return replace(_bundle(bytes(view[_PREFIX:header]), view[header:], where, mapped), _file=kept)
    except BaseException:
        os.close(kept[0])
        view.release()
        with contextlib.suppress(BufferError):
            mapped.close()
        raise


def _version(fd: int) -> str:
    status = os.fstat(fd)
    return f"{status.st_mtime_ns}-{status.st_size}"


def _read_stream(stream: BinaryIO, where: str) -> Bundle:
    prefix = _exactly(stream, bytearray(_PREFIX), where)
    header = _exactly(stream, bytearray(_header_size(bytes(prefix), None, where) - _PREFIX), where)
    entries = _entries(bytes(header), where)
    end = max((entry.end for entry in entries.tensors.values()), default=0)
    data = _exactly(stream, bytearray(end), where)
    if stream.read(1):
        raise SizeMismatchError(f"{where} goes on after its last tensor", cause=f"{end} bytes of tensors")
    return _bundle(bytes(header), data, where, None)


def _exactly(stream: BinaryIO, buffer: bytearray, where: str) -> memoryview:
    view = memoryview(buffer)
    at = 0
    while at < len(view):
        piece = stream.read(min(len(view) - at, 8 << 20))
        if not piece:
            raise SizeMismatchError(f"{where} is cut off", cause=f"{at} of {len(view)} bytes", hint="make it again")
        view[at : at + len(piece)] = piece
        at += len(piece)
    return view


def _header_size(prefix: bytes, size: int | None, where: str) -> int:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _PREFIX or not 2 <= length <= _MAX_HEADER:
        raise FormatError(f"{where} is no safetensors file", cause=f"its first 8 bytes are {prefix!r}")
    if size is not None and _PREFIX + length > size:
        raise SizeMismatchError(f"{where} is cut off", cause=f"{size} of {_PREFIX + length} bytes of its header")
    return _PREFIX + length


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Entries:
    metadata: Fields
    tensors: Mapping[str, _Tensor]


def _entries(header: bytes, where: str) -> _Entries:
    """What the header says, its tensors one after the other without a hole."""
    document = loads(header, where)
    fields = Fields(document, where)
    if not fields.has("__metadata__"):
        raise FormatError(f"{where} is no KV bundle", cause="its header has no __metadata__")
    metadata = Fields(fields.texts("__metadata__"), where, "__metadata__")
    tensors: dict[str, _Tensor] = {}
    for name in document:
        if name == "__metadata__":
            continue
        entry = Fields(document[name], where, name)
        entry.only({"dtype", "shape", "data_offsets"})
        shape = tuple(entry.as_number(item, "shape", 0, 1 << 48) for item in entry.items("shape"))
        offsets = [entry.as_number(item, "data_offsets") for item in entry.items("data_offsets")]
        if len(offsets) != 2:
            raise entry.bad("data_offsets", "is no [begin, end]")
        tensors[name] = _Tensor(entry.text("dtype"), shape, *offsets)
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at or tensor.end < at:
            raise FormatError(f"{where}: tensor {name} begins at {tensor.start}", cause=f"the one before ends at {at}")
        at = tensor.end
    return _Entries(metadata, tensors)


def _bundle(header: bytes, data: memoryview, where: str, mapped: mmap.mmap | None) -> Bundle:
    entries = _entries(header, where)
    metadata = entries.metadata
    metadata.only(_METADATA, _OPTIONAL)
    if metadata.text(FORMAT) != "1":
        raise FormatError(f"{where} is no KV bundle of version 1", cause=f"it says {metadata.text(FORMAT)!r}")
    end = max((tensor.end for tensor in entries.tensors.values()), default=0)
    if end != len(data):
        raise SizeMismatchError(f"{where} has a wrong size", cause=f"{len(data)} bytes of tensors, expected {end}")
    descriptor = Descriptor.parse(metadata.text("identity").encode(), f"{where}: identity")
    tokens = _count(metadata, where)
    starts = _starts(metadata, where)
    layers: dict[tuple[int, int], LayerKv] = {}
    left = dict(entries.tensors)
    for number, group in enumerate(descriptor.groups):
        for layer in group.layers:
            start = starts.get(layer, 0) if group.kind == "sliding" else 0
            least = max(0, tokens - (group.window or 1) + 1)
            if start > least:
                raise FormatError(
                    f"{where}: layer {layer} lacks tokens of its window", cause=f"it begins at {start}, not {least}"
                )
            slot = slot_of(number, group, descriptor.dtype, layer, (0, group.kv_heads), start, tokens)
            views: list[memoryview] = []
            for name, dtype, shape in tensors_of(descriptor, slot):
                tensor = left.pop(name, None)
                if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
                    found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                    raise FormatError(f"{where}: {name} is {found}", cause=f"expected {dtype} {list(shape)}")
                size = (slot.k_bytes, slot.v_bytes)[len(views)]
                if tensor.end - tensor.start != size:
                    raise FormatError(f"{where}: {name} has {tensor.end - tensor.start} bytes", cause=f"not {size}")
                views.append(data[tensor.start : tensor.end])
            layers[number, layer] = LayerKv(views[0], views[1] if len(views) > 1 else memoryview(b""), start)
    if left:
        raise FormatError(f"{where} has tensors that no layer is", cause=", ".join(sorted(left)[:5]))
    ids = _token_ids(metadata, tokens, where)
    producer = _json(metadata, "producer", where)
    return Bundle(
        where,
        descriptor,
        tokens,
        ids,
        layers,
        Fields({"producer": producer}, where).texts("producer") if producer is not None else {},
        _extras(metadata, where),
        mapped,
    )


def _count(metadata: Fields, where: str) -> int:
    text = metadata.text("tokens")
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text)):
        raise FormatError(f"{where}: tokens is {text!r}, not a number from 1")
    return int(text)


def _json(metadata: Fields, name: str, where: str) -> Any:  # Any: JSON
    return loads(metadata.text(name).encode(), f"{where}: {name}") if metadata.has(name) else None


def _starts(metadata: Fields, where: str) -> dict[int, int]:
    document = _json(metadata, "starts", where)
    if document is None:
        return {}
    fields = Fields(document, where, "starts")
    if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in document):
        raise fields.bad("", "does not map layers to tokens")
    return {int(name): fields.number(name) for name in document}


def _extras(metadata: Fields, where: str) -> tuple[Extra, ...]:
    document = _json(metadata, "extras", where)
    if document is None:
        return ()
    fields = Fields({"extras": document}, where)
    found = []
    for start, count, kind, digest in fields.rows("extras", 4):
        if not isinstance(kind, str) or not isinstance(digest, str) or len(digest) % 2:
            raise fields.bad("extras", "has an entry without kind and digest")
        data = bytes.fromhex(fields.as_hex(digest, "extras", len(digest) // 2))
        found.append(Extra(fields.as_number(start, "extras"), fields.as_number(count, "extras", 1), kind, data))
    return tuple(found)


def _token_ids(metadata: Fields, tokens: int, where: str) -> array[int] | None:
    if not metadata.has("token_ids"):
        return None
    try:
        data = base64.b64decode(metadata.text("token_ids"), validate=True)
    except binascii.Error as problem:
        raise FormatError(f"{where}: token_ids is not base64", cause=str(problem)) from None
    if len(data) != 4 * tokens:
        raise FormatError(f"{where}: token_ids has {len(data)} bytes", cause=f"{tokens} tokens take {4 * tokens}")
    return token_ids(data, where)


def tensors_of(descriptor: Descriptor, slot: Slot) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of the tensors of a layer of a group, K before V."""
    group = descriptor.groups[slot.group]
    if group.recurrent:
        return [(f"layer.{slot.layer}.state", "U8", (group.k_dim,))]
    shape = (slot.heads, slot.end - slot.start)
    if group.kind == "indexer":
        return [(f"layer.{slot.layer}.indexer", descriptor.dtype, (*shape, group.k_dim))]
    return [
        (f"layer.{slot.layer}.k", descriptor.dtype, (*shape, group.k_dim)),
        (f"layer.{slot.layer}.v", descriptor.dtype, (*shape, group.v_dim)),
    ]


def bundle_header(
    descriptor: Descriptor,
    tokens: int,
    starts: Mapping[tuple[int, int], int],
    *,
    token_ids: Tokens | None = None,
    producer: Mapping[str, str] | None = None,
    extras: Sequence[Extra] = (),
) -> tuple[bytes, list[Slot]]:
    """The file's bytes up to its data section (a multiple of 4 KiB), and the layers in the order of the data section:
    each its K, then its V. `starts`: first token by (group, layer), 0 where left out.
    """
    metadata: dict[str, str] = {FORMAT: "1", "identity": descriptor.canonical().decode(), "tokens": str(tokens)}
    if token_ids is not None:
        ids = token_bytes(token_ids)
        if len(ids) != 4 * tokens:
            raise UsageError(f"{len(ids) // 4} token ids for a bundle of {tokens} tokens")
        metadata["token_ids"] = base64.b64encode(ids).decode()
    if producer:
        metadata["producer"] = canonical(dict(producer)).decode()
    sliding = {
        str(layer): start for (group, layer), start in starts.items() if descriptor.groups[group].window and start
    }
    if sliding:
        metadata["starts"] = canonical(sliding).decode()
    if extras:
        rows = [[item.start, item.count, item.kind, item.digest.hex()] for item in extras]
        metadata["extras"] = canonical(rows).decode()
    document: dict[str, object] = {"__metadata__": metadata}
    slots: list[Slot] = []
    at = 0
    for number, group in enumerate(descriptor.groups):
        for layer in group.layers:
            start = starts.get((number, layer), 0) if group.window else 0
            slot = slot_of(number, group, descriptor.dtype, layer, (0, group.kv_heads), start, tokens)
            slots.append(slot)
            sizes = (slot.k_bytes, slot.v_bytes)
            for (name, dtype, shape), size in zip(tensors_of(descriptor, slot), sizes, strict=False):
                document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
                at += size
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_PREFIX + len(text)) % _PAGE)
    return len(text).to_bytes(_PREFIX, "little") + text, slots


def write_bundle(
    target: str | os.PathLike[str] | BinaryIO,
    descriptor: Descriptor,
    tokens: int,
    layers: Mapping[tuple[int, int], LayerKv],
    *,
    token_ids: Tokens | None = None,
    producer: Mapping[str, str] | None = None,
    extras: Sequence[Extra] = (),
) -> int:
    """Writes a bundle and returns its bytes. A file appears under its name only when it is whole. Raises UsageError
    for layers that are missing or of a wrong size, CapacityError, AuthError or EnvError when it cannot be written.
    """
    starts = {place: kv.start for place, kv in layers.items()}
    header, slots = bundle_header(descriptor, tokens, starts, token_ids=token_ids, producer=producer, extras=extras)
    pieces = [memoryview(header), *_pieces(layers, slots)]
    if not isinstance(target, (str, os.PathLike)):
        try:
            for piece in pieces:
                target.write(piece)
            target.flush()
        except OSError as error:
            raise cannot_write("the stream", error) from error
    else:
        with whole_file(os.fspath(target)) as file:
            for piece in pieces:
                file.write(piece)
    return sum(len(piece) for piece in pieces)


def _pieces(layers: Mapping[tuple[int, int], LayerKv], slots: Sequence[Slot]) -> Iterator[memoryview]:
    for slot in slots:
        kv = layers.get((slot.group, slot.layer))
        if kv is None:
            raise UsageError(f"the KV of layer {slot.layer} is missing", cause=f"group {slot.group} needs it")
        for name, view, size in (("K", kv.k, slot.k_bytes), ("V", kv.v, slot.v_bytes)):
            if view.nbytes != size:
                raise UsageError(
                    f"{name} of layer {slot.layer} has the wrong size", cause=f"{view.nbytes} bytes, expected {size}"
                )
            if size:
                yield view.cast("B") if view.format != "B" or view.ndim != 1 else view
