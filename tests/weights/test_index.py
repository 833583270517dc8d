"""The index and the headers must agree both ways."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.errors import FormatError, KvctlError, NotFoundError
from kvctl.testing.models import file_bytes
from kvctl.weights.index import check_index, check_numbering, check_shards_exist, check_unique, parse_index
from kvctl.weights.safetensors import Header, parse_header


def headers(**shards: list[str]) -> dict[str, Header]:
    found = {}
    for shard, names in shards.items():
        data = file_bytes([(name, "U8", (2,)) for name in names])
        found[f"{shard}.safetensors"] = parse_header(data, len(data), shard)
    return found


def index_of(weight_map: dict[str, object]) -> bytes:
    return json.dumps({"metadata": {"total_size": 3.5e9}, "weight_map": weight_map}).encode()


GOOD = {"a": "one.safetensors", "b": "two.safetensors"}


def test_a_right_index_passes() -> None:
    index = parse_index(index_of(dict(GOOD)), "index")
    assert index.shards == ("one.safetensors", "two.safetensors")
    check_shards_exist(index, ["one.safetensors", "two.safetensors", "other"], "index")
    check_index(index, headers(one=["a"], two=["b"]), "index")


def test_a_missing_shard_is_named() -> None:
    index = parse_index(index_of(dict(GOOD)), "index")
    with pytest.raises(NotFoundError, match=r"index names shard two\.safetensors, which is not there: 1 of 2 shards"):
        check_shards_exist(index, ["one.safetensors"], "index")


def test_a_tensor_the_shard_lacks_is_named() -> None:
    index = parse_index(index_of(dict(GOOD)), "index")
    with pytest.raises(FormatError, match=r"'b' to two\.safetensors, whose header lacks it: no shard holds it"):
        check_index(index, headers(one=["a"], two=[]), "index")
    with pytest.raises(FormatError, match=r"'b' to two\.safetensors, whose header lacks it: it is in one\.safetensors"):
        check_index(index, headers(one=["a", "b"], two=[]), "index")


def test_a_tensor_the_index_does_not_name_is_named() -> None:
    index = parse_index(index_of(dict(GOOD)), "index")
    with pytest.raises(FormatError, match=r"two\.safetensors holds tensor 'c', which index does not name"):
        check_index(index, headers(one=["a"], two=["b", "c"]), "index")


def test_a_tensor_in_two_shards_names_both() -> None:
    with pytest.raises(FormatError, match=r"'a' is in two files: one\.safetensors and two\.safetensors"):
        check_unique(headers(one=["a"], two=["b", "a"]))
    with pytest.raises(FormatError, match="is in two files"):
        check_index(parse_index(index_of(dict(GOOD)), "index"), headers(one=["a"], two=["b", "a"]), "index")


@pytest.mark.parametrize(
    "shard", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", "", "a\\b", 3, None]
)
def test_shard_names_never_lead_out_of_the_folder(shard: object) -> None:
    with pytest.raises(FormatError, match="no file beside the index"):
        parse_index(index_of({"a": shard}), "index")


def test_index_documents_that_mean_nothing_are_refused() -> None:
    for data in (b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"3", b"", b"<html>", b'{"a":'):
        with pytest.raises(FormatError):
            parse_index(data, "index")
    with pytest.raises(FormatError, match="duplicate key 'a' in the index"):
        parse_index(b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "index")


def test_numbered_shards_without_an_index_must_be_one_whole_set() -> None:
    check_numbering(["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"], "dir")
    check_numbering(["anything.safetensors"], "dir")
    with pytest.raises(NotFoundError, match="dir lacks shard 2 of 3 of m"):
        check_numbering(["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"], "dir")
    with pytest.raises(NotFoundError, match="dir lacks shard 2 of 999999999 of m"):
        check_numbering(["m-00001-of-999999999.safetensors"], "dir")
    with pytest.raises(FormatError, match=r"several exports .* m-\*-of-1, m-\*-of-2"):
        check_numbering(["m-1-of-1.safetensors", "m-1-of-2.safetensors", "m-2-of-2.safetensors"], "dir")


@settings(max_examples=100)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_raise_our_errors_only(data: bytes) -> None:
    with pytest.raises(KvctlError):
        parse_index(data, "index")
