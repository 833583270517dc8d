"""Who may read whose KV: descriptors, salts, tenants, block keys (cases K1 to K7)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.errors import ConfigError, FormatError, IncompatibleError, KvctlError, UsageError
from kvctl.kv import identity, tokens
from kvctl.kv.documents import canonical
from kvctl.kv.identity import Descriptor, Group, Lora
from kvctl.kv.tokens import Extra

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 2048,
}
SECRET = tokens.domain_secret(b"m" * 32, "alice")
WEIGHTS = "11" * 32


def files(config: dict[str, object] | None = None, tokenizer: bytes = b'{"model": {}}') -> dict[str, bytes]:
    return {"config.json": json.dumps(config or CONFIG).encode(), "tokenizer.json": tokenizer}


def describe(
    given_files: dict[str, bytes] | None = None,
    weights: str = WEIGHTS,
    dtype: str = "BF16",
    lora: tuple[Lora, ...] = (),
    salt: bytes | None = None,
    secret: bytes = SECRET,
    scales: str | None = None,
) -> Descriptor:
    return identity.describe_model(
        given_files or files(), weights, dtype=dtype, lora=lora, salt=salt, secret=secret, scales=scales
    )


def differing(other: Descriptor) -> list[str]:
    return [item.field for item in identity.compare(describe(), other)]


def test_k1_other_weights_are_another_namespace() -> None:
    other = describe(weights="22" * 32)
    assert other.digest != describe().digest
    (only,) = identity.compare(describe(), other)
    assert (only.field, only.ours, only.theirs) == ("weights", WEIGHTS, "22" * 32)


def test_k2_adapters_count_by_digest_and_scale() -> None:
    one, two = Lora("aa" * 32, "2"), Lora("bb" * 32, "2")
    seen = {
        describe(lora=loras).digest
        for loras in [(), (one,), (two,), (one, two), (two, one), (replace(one, scale="1"),)]
    }
    assert len(seen) == 6
    assert differing(describe(lora=(one,))) == ["lora"]
    pair = identity.compare(describe(lora=(one,)), describe(lora=(two,)))
    assert [item.field for item in pair] == ["lora[0].digest"]
    assert identity.lora_scale(b'{"r": 16, "lora_alpha": 32}', "x") == "2"
    assert identity.lora_scale(b'{"r": 16, "lora_alpha": 8, "use_rslora": true}', "x") == "2"
    with pytest.raises(UsageError):
        identity.lora_scale(b'{"r": 0, "lora_alpha": 8}', "x")
    with pytest.raises(IncompatibleError, match="other scales"):
        identity.lora_scale(b'{"r": 16, "lora_alpha": 8, "alpha_pattern": {"q_proj": 4}}', "x")


@pytest.mark.parametrize(
    ("theirs", "field", "ours", "other"),
    [
        (lambda: describe(dtype="F8_E4M3"), "dtype", "BF16", "F8_E4M3"),
        (lambda: describe(dtype="F8_E5M2"), "dtype", "BF16", "F8_E5M2"),
        (lambda: describe(scales="cc" * 32), "scales", "none", "cc" * 32),
        (lambda: replace(describe(), block_tokens=32), "block_tokens", "16", "32"),
        (
            lambda: replace(describe(), groups=(Group("full", (0, 1), 4, 8, 8),)),
            "groups[0].k_dim",
            "16",
            "8",
        ),
        (lambda: describe(files(tokenizer=b"{}")), "tokenizer", None, None),
        (lambda: describe(files({**CONFIG, "rope_theta": 500000.0})), "rope", None, None),
        (lambda: describe(files({**CONFIG, "rms_norm_eps": 1e-05})), "rope", None, None),
        (
            lambda: describe(files({**CONFIG, "quantization_config": {"quant_method": "fp8"}})),
            "quantisation",
            "none",
            None,
        ),
    ],
)
def test_k3_a_refusal_names_the_field_and_both_values(
    theirs: Callable[[], Descriptor], field: str, ours: str | None, other: str | None
) -> None:
    found = {item.field: item for item in identity.compare(describe(), theirs())}
    assert field in found
    assert ours is None or found[field].ours == ours
    assert other is None or found[field].theirs == other
    with pytest.raises(IncompatibleError) as caught:
        identity.check_compatible(describe(), theirs(), "session alice/chat")
    assert f"{field} is {found[field].ours} here and {found[field].theirs} there" in (caught.value.cause or "")
    assert identity.verdict(identity.compare(theirs(), theirs())) == "the same"


def test_k3_one_meaning_written_in_two_ways_is_one_namespace() -> None:
    older = {**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}}
    newer = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "linear", "factor": 2, "rope_theta": 10000}
    assert describe(files(older)).digest == describe(files(newer)).digest
    more = {**files(), "vocab.json": b"x", "README.md": b"y", "tokenizer_config.json": b"z"}
    assert describe(more).digest == describe().digest  # tokenizer.json says it all; labels do not count
    named = {**CONFIG, "_name_or_path": "other", "torch_dtype": "float16", "transformers_version": "9"}
    assert describe(files(named)).digest == describe().digest


def test_k4_salts_separate_and_are_nowhere() -> None:
    one, two = describe(salt=b"campaign-one"), describe(salt=b"campaign-two")
    assert len({one.digest, two.digest, describe().digest}) == 3
    assert b"campaign" not in one.canonical()
    assert b"campaign".hex() not in one.canonical().decode()
    other_tenant = describe(salt=b"campaign-one", secret=tokens.domain_secret(b"m" * 32, "bob"))
    assert other_tenant.salt != one.salt


def keys(nsdigest: str, ids: list[int], secret: bytes = SECRET, extras: tuple[Extra, ...] = ()) -> list[bytes]:
    return [block.key for block in tokens.chain(secret, nsdigest, ids, extras=extras)]


def test_keys_differ_whenever_a_part_differs() -> None:
    ids = list(range(40))
    ns = describe().digest
    variants = {
        "base": keys(ns, ids),
        "weights": keys(describe(weights="22" * 32).digest, ids),
        "lora": keys(describe(lora=(Lora("aa" * 32, "1"),)).digest, ids),
        "dtype": keys(describe(dtype="F8_E4M3").digest, ids),
        "salt": keys(describe(salt=b"s").digest, ids),
        "tenant": keys(ns, ids, tokens.domain_secret(b"m" * 32, "bob")),
        "master": keys(ns, ids, tokens.domain_secret(b"n" * 32, "alice")),
        "public": keys(ns, ids, tokens.domain_secret(None, "alice")),
        "first token": keys(ns, [7, *ids[1:]]),
        "image": keys(ns, ids, extras=(Extra(0, 4, "image", b"a" * 32),)),
    }
    every = [key for chain in variants.values() for key in chain]
    assert len(every) == len(set(every)) == 3 * len(variants)


def test_k5_images_count_in_full_and_only_where_they_are() -> None:
    ns = describe().digest
    ids = [5] * 64
    one = Extra(20, 30, "image", b"\x01" * 31 + b"\x02")
    two = replace(one, digest=b"\x01" * 31 + b"\x03")  # differs in its last byte only
    plain, first, second = (keys(ns, ids, extras=extras) for extras in [(), (one,), (two,)])
    assert plain[0] == first[0] == second[0]  # before the image
    assert all(len({a, b, c}) == 3 for a, b, c in zip(plain[1:], first[1:], second[1:], strict=True))
    moved = keys(ns, ids, extras=(replace(one, start=19),))
    assert moved[1] != first[1]
    assert keys(ns, ids, extras=(one, two)) == keys(ns, ids, extras=(two, one))
    assert keys(ns, ids, extras=(replace(one, kind="audio"),))[1] != first[1]


KEYS_IN_A_PROCESS = """
import sys
from kvctl.kv import identity, tokens
from kvctl.kv.tokens import Extra
files = {"config.json": sys.argv[1].encode(), "tokenizer.json": b"{}"}
secret = tokens.domain_secret(b"m" * 32, "alice")
found = identity.describe_model(files, "11" * 32, dtype="BF16", salt=b"s", secret=secret)
extras = [Extra(3, 9, kind, b"d" * 32) for kind in {"image", "audio", "video"}]
chain = tokens.chain(secret, found.digest, range(100), extras=extras)
sys.stdout.write(found.digest + "".join(block.key.hex() + block.token_hmac.hex() for block in chain))
"""


def test_k6_keys_do_not_depend_on_the_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", KEYS_IN_A_PROCESS, json.dumps(CONFIG)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) == 64 + 7 * 96


def test_k7_a_forged_key_fails_the_token_hmac() -> None:
    ours, theirs = (tokens.chain(SECRET, describe().digest, ids) for ids in (range(16), range(1, 17)))
    forged = replace(theirs[0], key=ours[0].key)
    assert not tokens.same_tokens(SECRET, range(16), forged.token_hmac)
    assert tokens.same_tokens(SECRET, range(16), ours[0].token_hmac)
    assert tokens.same_tokens(SECRET, range(16), tokens.token_hmac(SECRET, range(16)))
    assert not tokens.same_tokens(SECRET, range(16), ours[0].token_hmac[:8])


def test_all_forms_of_tokens_give_the_same_keys() -> None:
    ids = [1, 2, 70_000, 4_000_000_000] * 9
    forms: list[tokens.Tokens] = [ids, tuple(ids), array("I", ids)]
    flat = b"".join(number.to_bytes(4, "little") for number in ids)
    forms += [flat, bytearray(flat), memoryview(flat), memoryview(array("I", ids))]
    chains = [tokens.chain(SECRET, "00" * 32, form) for form in forms]
    assert all(chain == chains[0] for chain in chains)
    assert [block.count for block in chains[0]] == [16, 16, 4]
    assert tokens.token_ids(flat, "x") == array("I", ids)
    for wrong in ([-1], [1 << 32], b"abc"):
        with pytest.raises(UsageError):
            tokens.chain(SECRET, "00" * 32, wrong)
    with pytest.raises(FormatError):
        tokens.token_ids(b"abc", "x")


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=80), st.integers(0, 4))
def test_a_chain_goes_on_from_any_whole_block(ids: list[int], blocks: int) -> None:
    whole = tokens.chain(SECRET, "00" * 32, ids)
    done = min(blocks, len(ids) // 16)
    rest = tokens.chain(
        SECRET, "00" * 32, ids[16 * done :], parent=whole[done - 1].key if done else tokens.ROOT, start=16 * done
    )
    assert whole[:done] + rest == whole
    assert all(after.parent == before.key for before, after in pairwise(whole))


Parts = tuple[bytes, str, bytes, tuple[int, ...], tuple[Extra, ...]]
EXTRAS = st.builds(Extra, st.integers(0, 1), st.integers(1, 2), st.sampled_from(["a", "b"]), st.just(b"d"))
PARTS = st.tuples(
    st.sampled_from([b"s" * 32, b"t" * 32]),
    st.sampled_from(["00" * 32, "01" * 32]),
    st.sampled_from([tokens.ROOT, b"p" * 32]),
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    st.lists(EXTRAS, max_size=2).map(lambda extras: tuple(sorted(extras, key=repr))),
)


@given(PARTS, PARTS)
def test_keys_are_equal_only_when_every_part_is(one: Parts, two: Parts) -> None:
    def key(parts: Parts) -> bytes:
        secret, ns, parent, ids, extras = parts
        return tokens.chain(secret, ns, ids, extras=extras, parent=parent)[0].key

    def meaning(parts: Parts) -> object:
        return (*parts[:4], tuple(extra for extra in parts[4] if extra.start < len(parts[3])))

    assert (key(one) == key(two)) == (meaning(one) == meaning(two))


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_frames_are_injective(one: list[bytes], two: list[bytes]) -> None:
    assert (tokens.frames(*one) == tokens.frames(*two)) == (one == two)


def test_key_files() -> None:
    raw = bytes(range(32))
    assert tokens.parse_key(raw, "kv.key") == raw == tokens.parse_key(raw.hex().encode() + b"\n", "kv.key")
    for wrong in (b"", raw[:31], raw.hex().encode()[:-1], b"\xff" * 40):
        with pytest.raises(ConfigError, match=r"kv\.key holds no key"):
            tokens.parse_key(wrong, "kv.key")
    assert tokens.key_id(None) is None
    assert tokens.key_id(raw) != tokens.key_id(bytes(32))
    assert raw.hex()[:16] not in (tokens.key_id(raw) or "")


def test_descriptors_are_read_back_and_canonical() -> None:
    ours = describe(lora=(Lora("aa" * 32, "0.5"),), salt=b"x", scales="cc" * 32)
    data = ours.canonical()
    assert Descriptor.parse(data, "ns") == ours
    assert data == canonical(json.loads(data))
    assert b" " not in data
    assert {item.name for item in fields(Descriptor)} | {"schema", "layout", "hash"} == set(json.loads(data))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema": "kvctl.kv-ns/2"}, IncompatibleError),
        ({"schema": "other"}, FormatError),
        ({"layout": "kvctl.blocks/2"}, IncompatibleError),
        ({"hash": "sha1"}, IncompatibleError),
        ({"weights": "11" * 31}, FormatError),
        ({"weights": "XX" * 32}, FormatError),
        ({"dtype": "F4"}, FormatError),
        ({"groups": []}, FormatError),
        ({"block_tokens": 24}, FormatError),
        ({"block_tokens": True}, FormatError),
        ({"extra": 1}, FormatError),
        ({"lora": [{"digest": "aa" * 32}]}, FormatError),
    ],
    ids=str,
)
def test_descriptors_are_parsed_strictly(change: dict[str, object], error: type[KvctlError]) -> None:
    document = {**json.loads(describe().canonical()), **change}
    with pytest.raises(error):
        Descriptor.parse(canonical(document), "ns/x.json")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b'{"a":1,"a":1}', b'{"a":NaN}', b'{"a":1.5}', b"[" * 99999]
)
def test_what_is_no_document_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"ns/x\.json"):
        Descriptor.parse(data, "ns/x.json")


@pytest.mark.parametrize(
    "group",
    [
        Group("full", (), 1, 1, 1),
        Group("full", (1, 0), 1, 1, 1),
        Group("sliding", (0,), 1, 1, 1),
        Group("full", (0,), 1, 1, 1, 5),
        Group("mla", (0,), 2, 1, 1),
        Group("recurrent", (0,), 1, 1, 1),
        Group("other", (0,), 1, 1, 1),
    ],
    ids=str,
)
def test_impossible_groups_are_refused(group: Group) -> None:
    with pytest.raises(FormatError):
        Descriptor.parse(replace(describe(), groups=(group,)).canonical(), "ns")


def test_a_layer_is_in_one_group_or_has_an_indexer_too() -> None:
    mla, indexer = Group("mla", (0, 1), 1, 8, 4), Group("indexer", (0, 1), 1, 8, 0)
    assert replace(describe(), groups=(mla, indexer)).fault() == ""
    assert "layer 0" in replace(describe(), groups=(mla, mla)).fault()


def test_folders_that_describe_no_model_are_usage_errors() -> None:
    for wrong in ({}, {"config.json": b"{"}, {"config.json": b"[]"}):
        with pytest.raises(UsageError):
            identity.describe_model(wrong, WEIGHTS, dtype="BF16", secret=SECRET)
    with pytest.raises((UsageError, IncompatibleError)):
        describe(dtype="F4")


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2"), (10000, "10000"), (1e-06, "0.000001"), (0.5, "0.5"), (1e21, "1" + "0" * 21)]
)
def test_decimal_text(value: float, text: str) -> None:
    assert identity.decimal_text(value) == text
