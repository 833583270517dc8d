"""Session manifests: read back, parsed strictly, small for very long sessions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from kvctl.core.errors import FormatError, IncompatibleError, KvctlError
from kvctl.kv.manifest import PackRow, SessionManifest


def name(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest() + ".0000abcd"


def manifest(tokens: int = 100, packs: int = 4) -> SessionManifest:
    each = tokens // packs
    rows = tuple(PackRow(i, 0, i * each, each, max(1, each // 16), 4096, 9999) for i in range(packs))
    return SessionManifest(
        tenant="alice",
        session="work/chat ü",
        generation=3,
        parent=2,
        created="2026-11-29T23:00:00+00:00",
        ns="5a" * 32,
        tokens=each * packs,
        token_hmac="6b" * 32,
        chunks=tuple((name(i), 1 << 26) for i in range(packs)),
        packs=rows,
        producer={"model": "tiny"},
        index=tuple(f"{i:064x}" for i in range(each * packs // 1024)),
        labels={"team": "x"},
    )


def test_it_is_read_back() -> None:
    ours = manifest()
    assert SessionManifest.parse(ours.to_bytes(), "m") == ours
    with_tokens = replace(ours, chunks=(*ours.chunks, (name(9), 400)), tokens_chunk=4)
    assert SessionManifest.parse(with_tokens.to_bytes(), "m") == with_tokens
    assert [ref.name for ref in ours.refs] == [name(i) for i in range(4)]


def test_a_manifest_of_438764_tokens_and_189_gb_is_under_1_mib() -> None:
    ours = manifest(438_764, 189 * 10**9 // (60 << 20))
    assert len(ours.to_bytes()) < 1 << 20


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema": "kvctl.session/2"}, IncompatibleError),
        ({"schema": "kvctl.model/1"}, FormatError),
        ({"generation": 0}, FormatError),
        ({"parent": 3}, FormatError),
        ({"ns": "zz"}, FormatError),
        ({"tokens": 101}, FormatError),
        ({"tokens": 1.5}, FormatError),
        ({"lossy": 1}, FormatError),
        ({"producer": {"a": 1}}, FormatError),
        ({"codecs": [1]}, FormatError),
        ({"chunks": []}, FormatError),
        ({"chunks": [["x", 1]] * 4}, FormatError),
        ({"chunks": [[name(1), 1 << 26]] * 4}, FormatError),
        ({"chunks": [[name(i), 4096] for i in range(4)]}, FormatError),
        ({"packs": []}, FormatError),
        ({"packs": [[0, 0, 0, 100, 1, 4096]]}, FormatError),
        ({"packs": [[i, 0, 25 * i + (i > 1), 25 - (i == 2), 1, 4096, 9] for i in range(4)]}, FormatError),
        ({"packs": [[i, 0, 25 * i, 25, 1, 4095, 9] for i in range(4)]}, FormatError),
        ({"packs": [[i + 1, 0, 25 * i, 25, 1, 4096, 9] for i in range(4)]}, FormatError),
        ({"packs": [[i, 3 - i, 0, 100, 1, 4096, 9] for i in range(4)]}, FormatError),
        ({"packs": [[0, -1, 0, 100, 1, 4096, 9]]}, FormatError),
        ({"tokens_chunk": 0}, FormatError),
        ({"index": ["a"]}, FormatError),
        ({"unknown": 1}, FormatError),
    ],
    ids=str,
)
def test_it_is_parsed_strictly(change: dict[str, Any], error: type[KvctlError]) -> None:  # Any: JSON
    document = {**manifest().to_json(), **change}
    with pytest.raises(error, match="sessions/x"):
        SessionManifest.parse(json.dumps(document).encode(), "sessions/x")


def test_every_field_is_needed() -> None:
    for field in manifest().to_json():
        document = {key: value for key, value in manifest().to_json().items() if key != field}
        with pytest.raises(FormatError):
            SessionManifest.parse(json.dumps(document).encode(), "m")
