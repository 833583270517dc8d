"""Opening plain sources: files, folders, prefixes; what is refused, what is ignored and said, what is pinned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from kvctl.core.addresses import StoreConfig
from kvctl.core.context import Context
from kvctl.core.errors import (
    FormatError,
    IncompatibleError,
    KvctlError,
    NotFoundError,
    SizeMismatchError,
    VersionChangedError,
)
from kvctl.testing.models import LlamaShape, file_bytes, folder_files, shard_names, write_llama
from kvctl.transports.api import ObjectInfo
from kvctl.transports.mem import MemStore
from kvctl.transports.registry import open_store
from kvctl.weights.safetensors import PROBE
from kvctl.weights.sources import HeadRead, WeightSource, open_source, split_source

NUMBERS = count()
CTX = Context()
SHAPE = LlamaShape(layers=1)


class CountingStore(MemStore):
    """Counts calls; `replace` puts new bytes under a key right after the next `get` of it."""

    def __init__(self) -> None:
        super().__init__(f"sources-{next(NUMBERS)}")
        self.calls: list[tuple[str, str]] = []
        self.replace: dict[str, bytes] = {}

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.calls.append(("get", key))
        data = super().get(key, start, length)
        if key in self.replace:
            self.put(key, self.replace.pop(key))
        return data

    def stat(self, key: str) -> ObjectInfo:
        self.calls.append(("stat", key))
        return super().stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.calls.append(("list", prefix))
        return super().list(prefix)


def stored(files: dict[str, bytes], prefix: str = "") -> CountingStore:
    store = CountingStore()
    for name, data in files.items():
        store.put(prefix + name, data)
    return store


def sharded(shards: int = 3) -> dict[str, bytes]:
    return folder_files(SHAPE.tensors(), shards=shards, config=SHAPE.config())


def names(source: WeightSource) -> list[str]:
    return [file.name for file in source.files]


def test_a_folder_opens_with_one_list_and_one_read_per_small_object() -> None:
    files = sharded()
    store = stored(files, "models/llama/")
    source = open_source(store, "models/llama", CTX)
    assert names(source) == shard_names(3)
    assert [item.name for item in source.sidecars] == ["config.json"]
    assert source.index_data == files["model.safetensors.index.json"]
    assert source.index_name == "model.safetensors.index.json"
    assert {tensor.name for _, tensor in source.tensors()} == {name for name, _, _ in SHAPE.tensors()}
    assert source.data_bytes == sum(file.size - file.header.header_size for file in source.files)
    assert [call[0] for call in store.calls].count("list") == 1
    assert [call[0] for call in store.calls].count("get") == 4
    assert source.requests == len(store.calls)
    assert source.ignored == ()
    for file in source.files:
        assert file.version == store.stat(file.key).version


def test_headers_are_read_in_one_batch_under_their_versions() -> None:
    store = stored(sharded())
    batches: list[list[HeadRead]] = []

    def read_many(reads: Sequence[HeadRead]) -> list[bytes]:
        batches.append(list(reads))
        return [store.get(read.key, read.start, read.length) for read in reads]

    source = open_source(store, "", CTX, read_many=read_many)
    assert [len(batch) for batch in batches] == [1, 3]
    assert all(read.length <= PROBE and read.version for batch in batches for read in batch)
    assert source.requests == 1 + 4
    assert not [call for call in store.calls if call[0] == "stat"]


def test_a_long_header_takes_a_second_read() -> None:
    data = file_bytes([("a", "U8", (100,))], padding=2 * PROBE)
    store = stored({"model.safetensors": data})
    source = open_source(store, "", CTX)
    assert source.files[0].header.header_size == len(data) - 100
    assert [call for call in store.calls if call[0] == "get"] == [("get", "model.safetensors")] * 2


def test_one_file_opens_alone() -> None:
    store = stored({"x/one.safetensors": file_bytes([("a", "U8", (1,))]), "x/two.safetensors": b"junk"})
    source = open_source(store, "x/one.safetensors", CTX)
    assert names(source) == ["one.safetensors"]
    assert source.files[0].key == "x/one.safetensors"
    assert source.sidecars == ()


def test_urls_split_into_store_and_key() -> None:
    config, prefix = split_source(StoreConfig("s3://b/dir/m.safetensors", ("http://h",), {"region": "r"}))
    assert (config, prefix) == (StoreConfig("s3://b/dir", ("http://h",), {"region": "r"}), "m.safetensors")
    assert split_source(StoreConfig("s3://b/dir")) == (StoreConfig("s3://b/dir"), "")
    assert split_source(StoreConfig("file:///m.safetensors")) == (StoreConfig("file://"), "m.safetensors")


def test_a_url_of_a_pickle_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    config, prefix = split_source(StoreConfig(f"file://{tmp_path}/pytorch_model.bin"))
    with pytest.raises(IncompatibleError, match=r"pytorch_model\.bin holds pickled weights only"):
        open_source(open_store(config), prefix, CTX)


def test_links_into_a_hub_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    write_llama(str(blobs), SHAPE)
    snapshot.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).symlink_to(blobs / name)
    source = open_source(open_store(StoreConfig(f"file://{snapshot}")), "", CTX)
    assert names(source) == ["model.safetensors"]
    assert source.sidecar("config.json") is not None


def test_names_are_taken_literally_or_ignored() -> None:
    one = file_bytes([("a", "U8", (1,))])
    source = open_source(stored({"-wéird name.safetensors": one, "..\\up.safetensors": one}), "", CTX)
    assert names(source) == ["-wéird name.safetensors"]
    assert source.ignored[0].name == "..\\up.safetensors"


def test_a_folder_on_disk_opens(tmp_path: Path) -> None:
    write_llama(str(tmp_path), SHAPE, shards=2)
    store = open_store(StoreConfig(f"file://{tmp_path}"))
    source = open_source(store, "", CTX)
    assert names(source) == shard_names(2)
    store.close()


def test_stale_shards_and_consolidated_copies_are_ignored_and_said() -> None:
    stale = {"consolidated.safetensors": b"x", "model-00001-of-00009.safetensors": b"y", "modeling_llama.py": b"z"}
    source = open_source(stored({**sharded(), **stale, "pytorch_model.bin": b"p", "deep/a.safetensors": b"q"}), "", CTX)
    assert names(source) == shard_names(3)
    assert {item.name: item.reason for item in source.ignored} == {
        "consolidated.safetensors": "a consolidated copy",
        "model-00001-of-00009.safetensors": "not named by the index",
        "modeling_llama.py": "code is not carried with weights",
        "pytorch_model.bin": "a pickle is never opened",
    }


def test_without_an_index_the_usual_names_decide() -> None:
    one = file_bytes([("a", "U8", (1,))])
    source = open_source(stored({"model.safetensors": one, "consolidated.safetensors": one}), "", CTX)
    assert names(source) == ["model.safetensors"]
    assert [item.name for item in source.ignored] == ["consolidated.safetensors"]
    shards = {name: data for name, data in sharded().items() if not name.endswith(".index.json")}
    assert names(open_source(stored({**shards, "consolidated.safetensors": one}), "", CTX)) == shard_names(3)
    assert names(open_source(stored({"consolidated.safetensors": one}), "", CTX)) == ["consolidated.safetensors"]
    del shards[shard_names(3)[1]]
    with pytest.raises(NotFoundError, match="lacks shard 2 of 3"):
        open_source(stored(shards), "", CTX)
    with pytest.raises(FormatError, match=r"in two files: a\.safetensors and b\.safetensors"):
        open_source(stored({"a.safetensors": one, "b.safetensors": one}), "", CTX)


def test_a_variant_index_counts_where_it_is_the_only_one() -> None:
    files = sharded()
    files["model.fp16.safetensors.index.json"] = files.pop("model.safetensors.index.json")
    assert open_source(stored(files), "", CTX).index_name == "model.fp16.safetensors.index.json"
    files["model.fp32.safetensors.index.json"] = b"{}"
    with pytest.raises(FormatError, match="2 indexes"):
        open_source(stored(files), "", CTX)


def test_a_missing_shard_fails_before_any_header_is_read() -> None:
    files = sharded()
    del files[shard_names(3)[1]]
    store = stored(files)
    with pytest.raises(NotFoundError, match="model-00002-of-00003"):
        open_source(store, "", CTX)
    assert [key for call, key in store.calls if call == "get"] == ["model.safetensors.index.json"]


def test_index_and_headers_are_checked_both_ways() -> None:
    files = sharded()
    document = json.loads(files["model.safetensors.index.json"])
    document["weight_map"]["ghost"] = shard_names(3)[0]
    with pytest.raises(FormatError, match="'ghost' to model-00001-of-00003"):
        open_source(stored({**files, "model.safetensors.index.json": json.dumps(document).encode()}), "", CTX)
    del document["weight_map"]["ghost"], document["weight_map"]["lm_head.weight"]
    with pytest.raises(FormatError, match=r"holds tensor 'lm_head\.weight'"):
        open_source(stored({**files, "model.safetensors.index.json": json.dumps(document).encode()}), "", CTX)


def test_an_object_replaced_while_opening_is_told() -> None:
    files = sharded()
    store = stored(files)
    store.replace[shard_names(3)[1]] = files[shard_names(3)[1]]
    with pytest.raises(VersionChangedError, match=r"model-00002-of-00003\.safetensors changed while loading: version"):
        open_source(store, "", CTX)
    store = stored(files)
    store.replace["model.safetensors.index.json"] = files["model.safetensors.index.json"]
    with pytest.raises(VersionChangedError, match="changed while loading"):
        open_source(store, "", CTX)


def test_sidecars_are_read_under_their_versions() -> None:
    store = stored(sharded())
    source = open_source(store, "", CTX)
    item = source.sidecar("config.json")
    assert item is not None
    assert json.loads(source.read_sidecar(item)) == SHAPE.config()
    store.put("config.json", b"{}")
    with pytest.raises(VersionChangedError):
        source.read_sidecar(item)
    assert source.sidecar("nothing.json") is None


@pytest.mark.parametrize(
    ("files", "prefix", "kind", "words"),
    [
        ({}, "", NotFoundError, "empty or does not exist"),
        ({"other/model.safetensors": b""}, "models", NotFoundError, "empty or does not exist"),
        ({"config.json": b"{}"}, "", NotFoundError, "1 files are there"),
        ({"pytorch_model.bin": b"", "config.json": b"{}"}, "", IncompatibleError, "pickled weights only"),
        ({"model.gguf": b""}, "", IncompatibleError, "another format"),
        ({"model.bin": b""}, "model.bin", IncompatibleError, "pickled weights only"),
        ({"weights.dat": b""}, "weights.dat", IncompatibleError, "is a file"),
        ({}, "gone.safetensors", NotFoundError, "gone"),
        ({"model.safetensors": b""}, "", FormatError, "empty file"),
        ({"model.safetensors": b"<html>no</html>"}, "model.safetensors", FormatError, "HTML page"),
        ({"model.safetensors": file_bytes([("a", "U8", (9,))])[:-1]}, "", SizeMismatchError, "shorter"),
        ({"model.safetensors": file_bytes([("a", "U8", (9,))]) + b"x"}, "", SizeMismatchError, "after its last"),
    ],
)
def test_what_is_no_model_is_told_apart(
    files: dict[str, bytes], prefix: str, kind: type[KvctlError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        open_source(stored(files), prefix, CTX)


def test_a_folder_of_models_says_which_one_may_be_meant() -> None:
    files = folder_files([("a", "U8", (4,))])
    store = stored({f"b/deep/{name}": data for name, data in files.items()} | {"a/readme": b"", "x": b""})
    with pytest.raises(NotFoundError, match="holds no safetensors file") as caught:
        open_source(store, "", CTX)
    assert "in its folders" in (caught.value.cause or "")
    assert (caught.value.hint or "").endswith("/b/deep?")
