"""The grammar of weights addresses and targets."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.addresses import (
    PathOrUrl,
    Peer,
    RepoModel,
    Slot,
    StoreConfig,
    Target,
    Weights,
    parse_target,
    parse_weights,
    split_url,
)
from kvctl.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/m", PathOrUrl(StoreConfig("file:///data/m"))),
        ("./m", PathOrUrl(StoreConfig(f"file://{os.getcwd()}/m"))),
        (".", PathOrUrl(StoreConfig(f"file://{os.getcwd()}"))),
        ("./with:colon@3", PathOrUrl(StoreConfig(f"file://{os.getcwd()}/with:colon@3"))),
        ("s3://b/p/", PathOrUrl(StoreConfig("s3://b/p"))),
        ("S3://b/p", PathOrUrl(StoreConfig("s3://b/p"))),
        ("lab:llama", RepoModel("lab", "llama")),
        ("lab:llama@7", RepoModel("lab", "llama", "7")),
        ("lab:meta-llama/Llama 3@v1", RepoModel("lab", "meta-llama/Llama 3", "v1")),
        ("lab:a@b@7", RepoModel("lab", "a@b", "7")),
        ("llama", RepoModel("", "llama")),
        ("llama@7", RepoModel("", "llama", "7")),
        ("слово", RepoModel("", "слово")),
        ("slot:llama", Slot("llama")),
        ("peer://gpu7:9900/llama", Peer("gpu7:9900", "llama")),
    ],
)
def test_address(text: str, expected: Weights) -> None:
    assert parse_weights(text) == expected


def test_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    assert parse_weights("~/m") == PathOrUrl(StoreConfig("file:///home/a/m"))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "kvctl help addresses"),
        ("C:\\models\\llama", "with '/'"),
        ("C:/models/llama", "with '/'"),
        ("a\\b", "with '/'"),
        ("models/llama", "./models/llama"),
        ("model.safetensors", "./model.safetensors"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("a b:c", "./a b:c"),
        ("lab:", "kvctl help addresses"),
        ("lab:m@", "kvctl help addresses"),
        ("@3", "kvctl help addresses"),
        ("slot:", None),
        ("slot:a/b", None),
        ("peer://host", None),
        ("peer://u:p@host/slot", None),
        ("s3://key:secret@bucket/x", "environment"),
    ],
)
def test_what_is_refused_says_how_to_write_it(text: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        parse_weights(text)
    if hint is not None:
        assert hint in (caught.value.hint or "")


@given(st.text(max_size=30))
def test_any_text_has_a_meaning_or_a_reason(text: str) -> None:
    try:
        found = parse_weights(text)
    except UsageError:
        return
    assert isinstance(found, (PathOrUrl, RepoModel, Slot, Peer))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Target("none")),
        ("dir:./a:b", Target("dir", "./a:b")),
        ("shm:x", Target("shm", "x")),
        ("slot:x", Target("slot", "x")),
        ("engine:http://g:8000", Target("engine", "http://g:8000")),
    ],
)
def test_target(text: str, expected: Target) -> None:
    assert parse_target(text) == expected


@pytest.mark.parametrize("text", ["", "./copy", "dir:", "file:x", "engine:http://u:p@h"])
def test_a_wrong_target_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_target(text)


def test_a_path_as_target_says_dir() -> None:
    with pytest.raises(UsageError) as caught:
        parse_target("./copy")
    assert caught.value.hint == "write dir:./copy"


def test_a_home_that_is_not_known_is_no_folder_called_tilde() -> None:
    for address in ("~nobody-has-this-name/m", "~nobody-has-this-name"):
        with pytest.raises(UsageError, match="no home directory"):
            parse_weights(address)


@pytest.mark.parametrize("url", ["s3://[::1/m", "http://h:99999999999/x/[", "node://[/x"])
def test_a_url_that_has_no_parts_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        parse_weights(f"s3://[{url}")
    with pytest.raises(UsageError, match="is not a URL"):
        split_url(url, port=True)
