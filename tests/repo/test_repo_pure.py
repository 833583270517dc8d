"""Names, placement, chunk names, leaf tables, manifests: pure parts, with properties."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.core.errors import FormatError, IntegrityError, UsageError
from kvctl.repo import manifests, placement
from kvctl.repo.check import Share
from kvctl.repo.chunks import LEAF, ChunkRef, leaf_table, name_of_key, verify_leaves
from kvctl.repo.layout import model_key, parse_model_key
from tests.repo.world import blob

MEMBERS = st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), min_size=1, max_size=9, unique=True)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama70b", "models/llama70b/1.json"),
        ("my model", "models/my%20model/1.json"),
        ("org/model", "models/org%2Fmodel/1.json"),
        ("模型", "models/%E6%A8%A1%E5%9E%8B/1.json"),
        ("a.b_c-d~e", "models/a.b_c-d~e/1.json"),
        ("100%", "models/100%25/1.json"),
        ("...", "models/.../1.json"),
    ],
)
def test_names_are_served_literally(name: str, key: str) -> None:
    assert model_key(name, "1") == key
    assert parse_model_key(key) == (name, "1")


@pytest.mark.parametrize(
    "name",
    ["", "..", ".", "a/../b", "/etc", "-rf", "a\nb", "a\0b", "a//b", "a/", "x@1", "~root", "\\x", " a", "x" * 201,
     "é" * 34,     "\x7f", "\ud800", "a\u2028b", "a.kvctl-tmp"],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a"):
        model_key(name, "1")
    with pytest.raises(UsageError, match="cannot be the name of a"):
        model_key("m", name)


@given(st.text(max_size=30), st.text(max_size=10))
def test_any_name_is_refused_or_comes_back(name: str, version: str) -> None:
    try:
        key = model_key(name, version)
    except UsageError:
        return
    assert parse_model_key(key) == (name, version)
    assert key.isascii()
    assert key.count("/") == 2
    assert all(part not in {"", ".", ".."} for part in key.split("/"))


@given(MEMBERS, st.text(max_size=20), st.integers(1, 4))
def test_replicas_are_on_different_members_and_order_of_members_does_not_matter(
    members: list[str], key: str, replicas: int
) -> None:
    found = placement.places(members, key, replicas)
    assert len(found) == len(set(found)) == min(replicas, len(members))
    assert found == placement.places(list(reversed(members)), key, replicas)
    assert placement.home(members, key) == found[0]


@given(MEMBERS, st.text("0123456789abcdef", min_size=17, max_size=17), st.lists(st.text(max_size=8), max_size=20))
def test_adding_a_member_moves_only_what_it_gains_and_removing_it_undoes_that(
    members: list[str], new: str, keys: list[str]
) -> None:
    for key in keys:
        before, after = placement.places(members, key, 2), placement.places([*members, new], key, 2)
        assert [member for member in after if member != new] == before[: len(after) - (new in after)]


def test_keys_spread_evenly() -> None:
    members = [f"{number:016x}" for number in range(5)]
    counts = dict.fromkeys(members, 0)
    for number in range(20_000):
        for member in placement.places(members, f"chunk{number}", 2):
            counts[member] += 1
    assert all(abs(count - 8000) < 400 for count in counts.values())


def test_scores_are_those_of_the_format() -> None:
    assert placement.score("a" * 32, "models/m/1.json") == 10215162028975430893


@given(st.integers(0, 3 * LEAF + 5), st.data())
@settings(max_examples=25)
def test_any_run_of_leaves_verifies_and_any_flipped_byte_is_found(size: int, data: st.DataObject) -> None:
    whole = blob("leaves", size)
    table = leaf_table(whole)
    assert len(table) == 8 * -(-size // LEAF)
    count = len(table) // 8
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    part = bytearray(whole[first * LEAF : last * LEAF])
    verify_leaves(part, first * LEAF, table)
    if part:
        at = data.draw(st.integers(0, len(part) - 1))
        part[at] ^= 1
        with pytest.raises(IntegrityError, match="are damaged"):
            verify_leaves(part, first * LEAF, table)


def test_ranges_that_are_not_whole_leaves_are_refused() -> None:
    whole = blob("x", LEAF + 10)
    table = leaf_table(whole)
    with pytest.raises(IntegrityError, match="not at a leaf"):
        verify_leaves(whole[1:], 1, table)
    with pytest.raises(IntegrityError, match="end inside a leaf"):
        verify_leaves(whole[:100], 0, table)
    with pytest.raises(IntegrityError, match="longer than its leaf table"):
        verify_leaves(whole, LEAF, table)
    with pytest.raises(IntegrityError, match="are damaged"):
        verify_leaves(whole[: LEAF + 9], 0, table)


def test_chunk_names_and_keys() -> None:
    ref = ChunkRef.fresh("ab" * 32, 7)
    assert ref.key == f"chunks/ab/{ref.name}"
    assert name_of_key(ref.key) == ref.name
    assert ChunkRef.parse(ref.name, 7) == ref
    for key in (f"chunks/cd/{ref.name}", f"chunks/ab/{ref.name}x", f"models/ab/{ref.name}", "chunks/ab", ""):
        assert name_of_key(key) is None
    with pytest.raises(FormatError):
        ChunkRef.parse("../../etc/passwd", 1)


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "[]", "{}", '{"schema": "x"}', '{"schema": "x", "chunks": {}}',
     '{"schema": "x", "chunks": [["a", 1]]}', '{"schema": "x", "chunks": [["' + "0" * 64 + '.00000000", -1]]}',
     '{"schema": "x", "chunks": [["' + "0" * 64 + '.00000000", 1.5]]}'],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        manifests.parse(text.encode(), "models/m/1.json")


def test_a_manifest_tells_its_chunks() -> None:
    refs = [ChunkRef.fresh(f"{number:064x}", number) for number in range(3)]
    document = {"schema": "any/1", "chunks": [[ref.name, ref.size] for ref in refs]}
    assert list(manifests.referenced(manifests.parse(json.dumps(document).encode(), "k"))) == [ref.name for ref in refs]


@given(st.integers(1, 9), st.text("0123456789abcdef", min_size=64, max_size=64))
def test_each_chunk_is_in_one_share(of: int, digest: str) -> None:
    assert sum(Share(part, of).has(digest) for part in range(1, of + 1)) == 1


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "a/b", "1", "1/0"])
def test_shares_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        Share.parse(text)
    assert Share.parse("2/3") == Share(2, 3)
