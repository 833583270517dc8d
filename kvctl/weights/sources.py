"""Plain sources of weights: one safetensors file, or a Hugging Face folder, in any store.

Opening reads the listing, the index and every header (one batch of small reads) and checks all of it; no weight byte
moves. Each file is pinned by the version that the header was read under. Never opens a pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    FormatError,
    IncompatibleError,
    NotFoundError,
    SizeMismatchError,
    VersionChangedError,
)
from kvctl.core.units import MIB
from kvctl.transports.api import ObjectInfo, Store
from kvctl.weights import index as indexes
from kvctl.weights.engine_layout import check_is_checkpoint
from kvctl.weights.index import INDEX_NAME, INDEX_SUFFIX, SHARD_SUFFIX, Index
from kvctl.weights.safetensors import PROBE, Header, TensorInfo, parse_header, rest_of_header

_READERS: Final = 16
_MAX_SIDECAR: Final = 256 * MIB  # a tokenizer.json of a large vocabulary is some tens of MiB
_SIDECAR_SUFFIXES: Final = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".md")
_SIDECAR_NAMES: Final = frozenset({"LICENSE", "NOTICE", "USE_POLICY", "README"})
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_FORMATS: Final = (".gguf", ".h5", ".msgpack", ".onnx")
_CODE: Final = (".py", ".so", ".sh")
_CONSOLIDATED: Final = "consolidated"


@dataclass(frozen=True, slots=True)
class HeadRead:
    """A small read of one version of one object; the answer has exactly `length` bytes."""

    key: str
    start: int
    length: int
    version: str
    object_size: int


ReadMany = Callable[[Sequence[HeadRead]], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """`name` is relative to the source's folder, `key` to the store."""

    name: str
    key: str
    size: int
    version: str
    header: Header


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A small file that belongs to the model: config, tokenizer, templates, licence."""

    name: str
    info: ObjectInfo


@dataclass(frozen=True, slots=True)
class Ignored:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class WeightSource:
    """An opened plain source. `requests` and `metadata_bytes`: what opening cost. The store stays the caller's."""

    store: Store = field(repr=False)
    prefix: str
    files: tuple[SourceFile, ...]
    ignored: tuple[Ignored, ...] = ()
    sidecars: tuple[Sidecar, ...] = ()
    index_name: str | None = None
    index_data: bytes | None = field(default=None, repr=False)
    requests: int = 0
    metadata_bytes: int = 0

    @property
    def data_bytes(self) -> int:
        return sum(file.header.data_size for file in self.files)

    def tensors(self) -> Iterator[tuple[int, TensorInfo]]:
        """(index into `files`, tensor), file by file, in order of the data section."""
        for number, file in enumerate(self.files):
            for tensor in file.header.tensors:
                yield number, tensor

    def sidecar(self, name: str) -> Sidecar | None:
        return next((item for item in self.sidecars if item.name == name), None)

    def read_sidecar(self, item: Sidecar) -> bytes:
        """The bytes of the version that was listed. Raises VersionChangedError, SizeMismatchError."""
        return read_pinned(self.store, HeadRead(item.info.key, 0, item.info.size, item.info.version, item.info.size))


def split_source(config: StoreConfig) -> tuple[StoreConfig, str]:
    """A weights URL as (store, prefix): what is called like a weights file is a key of the store above it, else the
    URL is a folder.
    """
    parent, slash, name = config.url.rpartition("/")
    if slash and name.endswith((SHARD_SUFFIX, *_PICKLES, *_OTHER_FORMATS)) and not parent.endswith(":/"):
        return StoreConfig(parent, config.endpoints, config.options), name
    return config, ""


def open_source(store: Store, prefix: str, ctx: Context, *, read_many: ReadMany | None = None) -> WeightSource:
    """Open the file (`prefix` ends in .safetensors) or folder at `prefix` ('' is the store's own).

    `read_many` reads headers concurrently under their versions; the default uses `store.get` between two looks at
    the version. Raises NotFoundError (4), FormatError and its kin (7), IncompatibleError (8), and what the store
    raises.
    """
    return _Opener(store, prefix, ctx, read_many).open()


def read_pinned(store: Store, read: HeadRead) -> bytes:
    """`store.get` of exactly that version: its answer counts only when the version is the same afterwards."""
    data = store.get(read.key, read.start, read.length)
    after = store.stat(read.key)
    if after.version != read.version:
        raise VersionChangedError(
            f"{_where(store, read.key)} changed while loading",
            cause=f"version {read.version} became {after.version}",
            hint="wait until it is written, then load again",
            details={"key": read.key},
        )
    if len(data) != read.length:
        raise SizeMismatchError(
            f"{_where(store, read.key)} gave {len(data)} bytes of {read.length} at {read.start}",
            cause=f"its size is {after.size}",
            hint="the file is cut off, or the server answers ranges wrongly; fetch or upload it again",
            details={"key": read.key, "expected": read.length, "size": len(data)},
        )
    return data


def _where(store: Store, key: str) -> str:
    return f"{store.url}/{key}"


def _pickled(place: str, names: list[str]) -> IncompatibleError:
    return IncompatibleError(
        f"{place} holds pickled weights only ({names[0]})",
        cause="opening a pickle runs the code inside it, so kvctl never does",
        hint="convert it where you trust it: model.save_pretrained(folder, safe_serialization=True)",
        details={"files": names},
    )


class _Opener:
    """State of one `open_source`."""

    def __init__(self, store: Store, prefix: str, ctx: Context, read_many: ReadMany | None) -> None:
        self.store = store
        self.prefix = prefix
        self.ctx = ctx
        self.requests = 0
        self.metadata_bytes = 0
        self.per_read = 1 if read_many else 2  # the default looks at the version again after each read
        self.read_many = read_many or self._read_many
        self.ignored: list[Ignored] = []
        self.deeper = 0  # objects in folders of the folder
        self.below = ""  # the first of those that holds safetensors

    def open(self) -> WeightSource:
        if self.prefix.endswith(SHARD_SUFFIX):
            self.requests += 1
            info = self.store.stat(self.prefix)
            files = self._read_headers([(info.key.rpartition("/")[2], info)])
            return self._source(files)
        folder = f"{self.prefix.rstrip('/')}/" if self.prefix.strip("/") else ""
        listed = self._list(folder)
        shards = {name: info for name, info in listed.items() if name.endswith(SHARD_SUFFIX)}
        index_info = self._find_index(listed)
        if index_info is None:
            chosen = self._choose_without_index(shards, listed, folder)
            files = self._read_headers([(name, shards[name]) for name in chosen])
            indexes.check_unique({file.name: file.header for file in files})
            return self._source(files, self._sidecars(listed, None))
        data = self._read_index(index_info)
        where = _where(self.store, index_info.key)
        index = indexes.parse_index(data, where)
        indexes.check_shards_exist(index, shards, where)
        self._ignore_others(shards, index)
        files = self._read_headers([(name, shards[name]) for name in index.shards])
        indexes.check_index(index, {file.name: file.header for file in files}, where)
        name = index_info.key[len(folder) :]
        return self._source(files, self._sidecars(listed, name), name, data)

    def _source(
        self,
        files: tuple[SourceFile, ...],
        sidecars: tuple[Sidecar, ...] = (),
        index_name: str | None = None,
        index_data: bytes | None = None,
    ) -> WeightSource:
        return WeightSource(
            self.store,
            self.prefix,
            files,
            tuple(sorted(self.ignored, key=lambda item: item.name)),
            sidecars,
            index_name,
            index_data,
            self.requests,
            self.metadata_bytes,
        )

    def _list(self, folder: str) -> dict[str, ObjectInfo]:
        """Name -> info of the folder's own files; what lies deeper belongs to something else."""
        found: dict[str, ObjectInfo] = {}
        self.requests += 1
        for info in self.store.list(folder):
            # what lies deeper is listed too: all of a disk, when somebody names its root
            self.ctx.cancel.check(f"listing {self._place()}")
            name = info.key[len(folder) :]
            if "\\" in name or "\0" in name or name in {".", ".."}:
                self.ignored.append(Ignored(name, "a name that no folder can hold"))
            elif name and "/" not in name:
                found[name] = info
            elif name:
                self.deeper += 1
                if not self.below and name.endswith(SHARD_SUFFIX):
                    self.below = name.rpartition("/")[0]
        return found

    def _find_index(self, listed: Mapping[str, ObjectInfo]) -> ObjectInfo | None:
        if INDEX_NAME in listed:
            for name in listed:
                if name.endswith(INDEX_SUFFIX) and name != INDEX_NAME:
                    self.ignored.append(Ignored(name, f"{INDEX_NAME} decides"))
            return listed[INDEX_NAME]
        others = sorted(name for name in listed if name.endswith(INDEX_SUFFIX))
        if len(others) > 1:
            raise FormatError(
                f"{self._place()} has {len(others)} indexes and no {INDEX_NAME}",
                cause=", ".join(others),
                hint=f"name the one that counts {INDEX_NAME}",
            )
        # model.safetensors beside an index of another name (model.fp16…) is the default variant
        if others and f"model{SHARD_SUFFIX}" not in listed:
            return listed[others[0]]
        return None

    def _choose_without_index(
        self, shards: Mapping[str, ObjectInfo], listed: Mapping[str, ObjectInfo], folder: str
    ) -> list[str]:
        names = sorted(shards)
        if not names:
            self._refuse(listed, folder)
        main = f"model{SHARD_SUFFIX}"
        numbered = [name for name in names if indexes.is_numbered(name)]
        plain = [name for name in names if not name.startswith(_CONSOLIDATED)]
        if main in shards:
            chosen, reason = [main], f"{main} is the model"
        elif numbered:
            chosen, reason = numbered, "the numbered shards are the model"
        else:
            chosen, reason = plain or names, "a consolidated copy of the same tensors"
        self.ignored.extend(Ignored(name, reason) for name in names if name not in set(chosen))
        indexes.check_numbering(chosen, self._place())
        return chosen

    def _ignore_others(self, shards: Mapping[str, ObjectInfo], index: Index) -> None:
        wanted = set(index.shards)
        for name in shards:
            if name not in wanted:
                kind = "a consolidated copy" if name.startswith(_CONSOLIDATED) else "not named by the index"
                self.ignored.append(Ignored(name, kind))

    def _refuse(self, listed: Mapping[str, ObjectInfo], folder: str) -> None:
        """No safetensors file here: say what is here instead."""
        pickles = sorted(name for name in listed if name.endswith(_PICKLES))
        others = sorted(name for name in listed if name.endswith(_OTHER_FORMATS))
        if pickles:
            raise _pickled(self._place(), pickles)
        if others:
            raise IncompatibleError(
                f"{self._place()} holds weights of another format only ({others[0]})",
                hint="convert them to safetensors",
                details={"files": others},
            )
        if not listed and folder:
            self._refuse_plain_key(folder.rstrip("/"))
        cause = f"{len(listed)} files are there" if listed else "it is empty or does not exist"
        if self.deeper:
            cause = f"{len(listed)} files are there, and {self.deeper} in its folders"
        raise NotFoundError(
            f"{self._place()} holds no safetensors file",
            cause=cause,
            hint=f"did you mean {self._place()}/{self.below}?"
            if self.below
            else "give the folder that holds model.safetensors or its index",
        )

    def _refuse_plain_key(self, key: str) -> None:
        self.requests += 1
        try:
            info = self.store.stat(key)
        except NotFoundError:
            return
        if info.key.endswith(_PICKLES):
            raise _pickled(_where(self.store, info.key), [info.key])
        raise IncompatibleError(
            f"{_where(self.store, info.key)} is a file, but not called .safetensors",
            hint="give a .safetensors file or the folder of a model",
        )

    def _place(self) -> str:
        return _where(self.store, self.prefix) if self.prefix else self.store.url

    def _read_index(self, info: ObjectInfo) -> bytes:
        if info.size > indexes.MAX_INDEX:
            raise FormatError(
                f"{_where(self.store, info.key)} is too large for an index",
                cause=f"{info.size} bytes, the limit is {indexes.MAX_INDEX}",
            )
        read = HeadRead(info.key, 0, info.size, info.version, info.size)
        self.requests += self.per_read
        self.metadata_bytes += info.size
        return self.read_many([read])[0] if info.size else b""

    def _read_headers(self, wanted: Sequence[tuple[str, ObjectInfo]]) -> tuple[SourceFile, ...]:
        first = self._batch([HeadRead(i.key, 0, min(PROBE, i.size), i.version, i.size) for _, i in wanted])
        second: list[HeadRead] = []
        for (_, info), data in zip(wanted, first, strict=True):
            rest = rest_of_header(data, info.size, _where(self.store, info.key))
            if rest is not None:
                second.append(HeadRead(info.key, *rest, info.version, info.size))
        rests = {read.key: data for read, data in zip(second, self._batch(second), strict=True)}
        files: list[SourceFile] = []
        for (name, info), data in zip(wanted, first, strict=True):
            tail = rests.get(info.key)
            whole = data if tail is None else data + tail
            header = parse_header(whole, info.size, _where(self.store, info.key))
            check_is_checkpoint(header.metadata, _where(self.store, info.key))
            files.append(SourceFile(name, info.key, info.size, info.version, header))
        return tuple(files)

    def _batch(self, reads: Sequence[HeadRead]) -> list[bytes]:
        """Answers in order; an empty object takes no request."""
        asked = [read for read in reads if read.length]
        self.requests += self.per_read * len(asked)
        self.metadata_bytes += sum(read.length for read in asked)
        answers = iter(self.read_many(asked) if asked else ())
        return [next(answers) if read.length else b"" for read in reads]

    def _read_many(self, reads: Sequence[HeadRead]) -> list[bytes]:
        if len(reads) == 1:
            return [read_pinned(self.store, reads[0])]
        with ThreadPoolExecutor(min(_READERS, len(reads)), thread_name_prefix="kvctl-headers") as pool:
            futures = [pool.submit(read_pinned, self.store, read) for read in reads]
            try:
                results: list[bytes] = []
                for future in futures:
                    self.ctx.cancel.check("reading headers")
                    results.append(future.result())
                return results
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _sidecars(self, listed: Mapping[str, ObjectInfo], index_name: str | None) -> tuple[Sidecar, ...]:
        found: list[Sidecar] = []
        done = {item.name for item in self.ignored}
        for name, info in listed.items():
            if name == index_name or name in done or name.endswith(SHARD_SUFFIX):
                continue
            if name.endswith(_CODE):
                self.ignored.append(Ignored(name, "code is not carried with weights"))
            elif name.endswith(_PICKLES):
                self.ignored.append(Ignored(name, "a pickle is never opened"))
            elif not (name.endswith(_SIDECAR_SUFFIXES) or name.partition(".")[0] in _SIDECAR_NAMES):
                self.ignored.append(Ignored(name, "not part of a safetensors model"))
            elif info.size > _MAX_SIDECAR:
                self.ignored.append(Ignored(name, f"too large for a side file ({info.size} bytes)"))
            else:
                found.append(Sidecar(name, info))
        return tuple(sorted(found, key=lambda item: item.name))
