"""Codecs: lossless ones give the bytes back, the lossy one stays within its error, damage is an error of ours."""

from __future__ import annotations

import importlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.core.errors import EnvError, IncompatibleError, IntegrityError, KvctlError, UsageError
from kvctl.kv import codecs

np = pytest.importorskip("numpy", reason="pip install numpy")


def through(codec: str, dtype: str, width: int, raw: bytes) -> bytes:
    stored = bytes(codecs.encoder(codec, dtype, width)(memoryview(raw)))
    out = memoryview(bytearray(len(raw)))
    codecs.decode(codec, dtype, width, memoryview(stored), out, "pack")
    return bytes(out)


@given(st.binary(max_size=300), st.sampled_from([1, 2, 4]), st.sampled_from(["none", "zstd"]))
def test_lossless_codecs_give_the_bytes_back(raw: bytes, width: int, codec: str) -> None:
    assert through(codec, "BF16", width, raw) == raw
    out = memoryview(bytearray(len(raw)))
    codecs.unshuffle(bytes(codecs.shuffle(raw, width)), width, out)
    assert out == raw


def test_the_shuffle_puts_like_bytes_together() -> None:
    assert codecs.shuffle(b"aAbBcCx", 2) == b"abcABCx"
    assert codecs.shuffle(b"1234abcd", 4) == b"1a2b3c4d"


def test_zstd_shrinks_what_is_alike() -> None:
    made = random.Random(1)
    raw = struct.pack("<4000f", *(made.gauss(0, 1) for _ in range(4000)))
    half = b"".join(raw[i + 2 : i + 4] for i in range(0, len(raw), 4))  # bf16 of a normal distribution
    assert len(codecs.encoder("zstd", "BF16", 2)(memoryview(half))) < 0.8 * len(half)


def as_f32(raw: bytes, dtype: str) -> list[float]:
    if dtype == "BF16":
        raw = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
    return list(struct.unpack(f"<{len(raw) // (2 if dtype == 'F16' else 4)}{'e' if dtype == 'F16' else 'f'}", raw))


@pytest.mark.parametrize(("dtype", "width"), [("BF16", 2), ("F16", 2), ("F32", 4)])
def test_fp8_stays_within_its_error(dtype: str, width: int) -> None:
    made = random.Random(2)
    values = [made.gauss(0, 3) for _ in range(2000)] + [0.0, 1e-6, -1e-6, 50.0, -50.0]
    raw = struct.pack(f"<{len(values)}{'e' if dtype == 'F16' else 'f'}", *values)
    if dtype == "BF16":
        raw = b"".join(raw[i + 2 : i + 4] for i in range(0, len(raw), 4))
    stored = codecs.encoder("fp8", dtype, width)(memoryview(raw))
    assert len(stored) == 4 + len(raw) // width
    before, after = as_f32(raw, dtype), as_f32(through("fp8", dtype, width, raw), dtype)
    smallest = 50.0 / 448 * 2**-9
    for value, got in zip(before, after, strict=True):
        assert abs(value - got) <= max(abs(value) * (1 / 16 + 1 / 128), smallest / 2 * 1.01)


def test_fp8_codes_are_those_of_e4m3fn() -> None:
    table = codecs._table(np)
    assert [float(table[code]) for code in (0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE)] == [
        *(2.0**-9, 7 * 2.0**-9, 2.0**-6, 1.0, 448.0, -448.0)
    ]
    every = [float(table[code]) for code in range(256) if code & 0x7F != 0x7F]
    raw = struct.pack(f"<{len(every)}f", *every)
    stored = bytes(codecs.encoder("fp8", "F32", 4)(memoryview(raw)))
    assert stored[:4] == struct.pack("<f", 1.0)
    assert list(stored[4:]) == [code for code in range(256) if code & 0x7F != 0x7F]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_fp8_refuses_what_it_cannot_hold(value: float) -> None:
    with pytest.raises(IncompatibleError):
        codecs.encoder("fp8", "F32", 4)(memoryview(struct.pack("<2f", 1.0, value)))


def test_codecs_are_checked_before_work() -> None:
    for codec in codecs.CODECS:
        codecs.check_codec(codec, "BF16")
    with pytest.raises(UsageError):
        codecs.check_codec("lz4", "BF16")
    with pytest.raises(IncompatibleError):
        codecs.check_codec("fp8", "F8_E4M3")


@pytest.mark.parametrize(("codec", "missing"), [("zstd", {"zstandard", "compression.zstd"}), ("fp8", {"numpy"})])
def test_a_missing_library_says_how_to_get_it(codec: str, missing: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> object:
        if name in missing:
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(EnvError) as caught:
        codecs.check_codec(codec, "BF16")
    assert "pip install" in (caught.value.hint or "")


@given(st.data())
def test_damaged_zstd_is_an_error_of_ours(data: st.DataObject) -> None:
    raw = bytes(range(100)) * 3
    stored = bytearray(codecs.encoder("zstd", "BF16", 2)(memoryview(raw)))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(stored)))
    out = memoryview(bytearray(len(raw)))
    try:
        codecs.decode("zstd", "BF16", 2, memoryview(stored)[:cut], out, "pack")
    except KvctlError as problem:
        error = problem
    else:
        return
    assert error.exit_code == 7


def test_a_frame_that_claims_more_is_refused_before_it_is_unpacked() -> None:
    bomb = codecs.encoder("zstd", "BF16", 1)(memoryview(bytes(1 << 20)))
    with pytest.raises(IntegrityError, match="does not decode"):
        codecs.decode("zstd", "BF16", 1, memoryview(bytes(bomb)), memoryview(bytearray(100)), "pack")
