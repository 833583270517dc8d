"""Codecs of a fragment: none, zstd (lossless, after a byte shuffle), fp8 (e4m3, lossy, only when asked). Pure.

    none    the raw bytes
    zstd    the raw bytes shuffled (byte 0 of every element, then byte 1, ..: `width` bytes an element; what is left
            over at the end stays as it is), then one zstd frame with its content size
    fp8     F32 little endian scale, then one e4m3 byte (OCP E4M3FN: no infinities, largest 448) per element; an element
            is e4m3 x scale, rounded to the dtype. Lossy.

zstd needs the `zstandard` package (Python 3.14 has it built in), fp8 needs numpy: imported when first used.
"""

from __future__ import annotations

import importlib
import math
import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from kvctl.core.errors import EnvError, IncompatibleError, IntegrityError, UsageError

NONE: Final = "none"
ZSTD: Final = "zstd"
FP8: Final = "fp8"
CODECS: Final = (NONE, ZSTD, FP8)
"""By their number in a pack's fragment table."""
LOSSY: Final = frozenset({FP8})
ZSTD_LEVEL: Final = 1  # on shuffled KV it is both faster and smaller than the default of 3
_SCALE: Final = 4
_E4M3_MAX: Final = 448.0
_LEAST: Final = -100  # exponent of the smallest scale
_FLOATS: Final = frozenset({"F32", "BF16", "F16"})

Bytes = bytes | bytearray | memoryview


def check_codec(codec: str, dtype: str) -> None:
    """Raises UsageError for a codec that is none, IncompatibleError for one that cannot take this dtype, EnvError when
    its library is missing. Call it before any work is done.
    """
    if codec not in CODECS:
        raise UsageError(f"there is no codec {codec!r}", hint=f"use {', '.join(CODECS)}")
    if codec == FP8 and dtype not in _FLOATS:
        raise IncompatibleError(
            f"KV of dtype {dtype} cannot be stored with codec fp8",
            cause="it takes F32, BF16 and F16",
            hint="use --codec none or zstd",
        )
    if codec == ZSTD:
        _zstd()
    elif codec == FP8:
        _numpy()


def shuffle(raw: Bytes, width: int) -> Bytes:
    """Byte 0 of every element, then byte 1, ..; `width` 1 changes nothing and copies nothing."""
    if width == 1:
        return raw
    data = bytes(raw)  # slicing with a step is a loop in C on bytes, many times slower on a memoryview
    whole = len(data) - len(data) % width
    return b"".join([*(data[i:whole:width] for i in range(width)), data[whole:]])


def unshuffle(data: bytes, width: int, out: memoryview) -> None:
    """The inverse of `shuffle`, into `out` of the same size."""
    if width == 1:
        out[:] = data
        return
    count = len(data) // width
    whole = bytearray(len(data))
    for i in range(width):
        whole[i : count * width : width] = data[i * count : (i + 1) * count]
    whole[count * width :] = data[count * width :]
    out[:] = whole


def encoder(codec: str, dtype: str, width: int) -> Callable[[memoryview], Bytes]:
    """What turns raw bytes of a fragment into stored ones; one per pack and thread. `width`: bytes an element."""
    if codec == NONE:
        return lambda raw: raw
    if codec == ZSTD:
        compress: Callable[[Bytes], bytes] = _compressor()
        return lambda raw: compress(shuffle(raw, width))
    if codec == FP8:
        return lambda raw: _to_fp8(raw, dtype)
    raise UsageError(f"there is no codec {codec!r}", hint=f"use {', '.join(CODECS)}")


def decode(codec: str, dtype: str, width: int, stored: memoryview, out: memoryview, where: str) -> None:
    """Fill `out`, as long as the raw bytes. Raises IntegrityError for bytes that do not decode to exactly that."""
    if codec == NONE:
        _check(len(stored), len(out), where)
        out[:] = stored
    elif codec == ZSTD:
        unshuffle(_decompress(stored, len(out), where), width, out)
    elif codec == FP8:
        _check(_SCALE + len(out) // width, len(stored), where)
        _from_fp8(stored, dtype, out)
    else:
        raise IncompatibleError(f"{where} has the unknown codec {codec!r}", hint="use a newer kvctl to read it")


def _check(got: int, expected: int, where: str) -> None:
    if got != expected:
        raise IntegrityError(f"{where} does not decode", cause=f"{got} bytes, expected {expected}")


_local = threading.local()


def _zstd() -> Any:  # Any: `zstandard` or `compression.zstd`, whichever is there
    for name in ("zstandard", "compression.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise EnvError(
        "the codec zstd is not available",
        cause="the package zstandard is not installed",
        hint='pip install "kvctl[zstd]", or use --codec none',
    )


def _compressor() -> Callable[[Bytes], bytes]:
    module = _zstd()
    if hasattr(module, "get_frame_parameters"):
        found: Callable[[Bytes], bytes] = module.ZstdCompressor(
            level=ZSTD_LEVEL, write_content_size=True, write_checksum=False
        ).compress
        return found
    return lambda raw: module.compress(raw, ZSTD_LEVEL)


def _decompress(stored: memoryview, size: int, where: str) -> bytes:
    module = _zstd()
    try:
        if hasattr(module, "get_frame_parameters"):
            said = module.get_frame_parameters(stored).content_size
            _check(said, size, where)  # before anything of that size is allocated
            context = getattr(_local, "context", None)
            if context is None:
                context = _local.context = module.ZstdDecompressor()
            raw: bytes = context.decompress(stored, max_output_size=size)
        else:
            _check(module.get_frame_info(stored).decompressed_size, size, where)
            raw = module.decompress(stored)
    except (ValueError, module.ZstdError) as problem:
        raise IntegrityError(f"{where} does not decode", cause=f"zstd: {problem}") from None
    _check(len(raw), size, where)
    return raw


def _numpy() -> Any:  # Any: numpy, which the base install does without
    try:
        return importlib.import_module("numpy")
    except ImportError:
        raise EnvError(
            "the codec fp8 is not available",
            cause="numpy is not installed",
            hint="pip install numpy, or use --codec none or zstd",
        ) from None


def _to_fp8(raw: memoryview, dtype: str) -> bytes:
    np = _numpy()
    if dtype == "F32":
        values = np.frombuffer(raw, dtype="<f4")
        scale = _scale(float(np.abs(values).max(initial=0.0)))
        codes = _e4m3(np, values / np.float32(scale))
    else:  # of 16 bits: one look-up, as scales are powers of two and few
        halves = np.frombuffer(raw, dtype="<u2")
        largest = np.array([int((halves & 0x7FFF).max(initial=0))], dtype="<u2")
        scale = _scale(float(_widened(np, largest, dtype)[0]))
        codes = _codes(dtype, scale)[halves]
    stored: bytes = struct.pack("<f", scale) + codes.tobytes()
    return stored


def _scale(top: float) -> float:
    """The smallest power of two that brings `top` to 448 at most: dividing by it is exact."""
    if not math.isfinite(top):
        raise IncompatibleError(
            "KV with infinities or NaN cannot be stored with codec fp8", hint="use --codec none or zstd"
        )
    mantissa, exponent = math.frexp(top / _E4M3_MAX)
    return math.ldexp(1.0, max(_LEAST, exponent - (mantissa == 0.5)))


@lru_cache(maxsize=64)
def _codes(dtype: str, scale: float) -> Any:  # Any: numpy
    """The e4m3 code of each 16-bit pattern."""
    np = _numpy()
    with np.errstate(all="ignore"):  # infinities and NaN are among the patterns, never among the data
        return _e4m3(np, _widened(np, np.arange(1 << 16, dtype="<u2"), dtype) / np.float32(scale))


def _e4m3(np: Any, values: Any) -> Any:  # Any: numpy
    """Codes of F32 values of at most 448, to nearest, ties to even."""
    bits = values.astype("<f4").view("<u4")
    size = bits & 0x7FFFFFFF
    # Normal numbers: drop 20 bits of the mantissa and move the exponent's bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20).astype("<i4") - ((127 - 7) << 3)
    small = np.rint(np.minimum(size.view("<f4"), 1.0) * 512.0).astype("<i4")  # steps of 2^-9; 8 is the first normal
    code = np.minimum(np.where(size < 0x3C800000, small, normal), 0x7E)
    return (code | (bits >> 24 & 0x80)).astype("u1")


def _from_fp8(stored: memoryview, dtype: str, out: memoryview) -> None:
    np = _numpy()
    scale = float(struct.unpack_from("<f", stored)[0])
    codes = np.frombuffer(stored, dtype="u1", offset=_SCALE)
    table = _decoded(dtype, scale)
    np.take(table, codes, out=np.frombuffer(out, dtype=table.dtype), mode="clip")


@lru_cache(maxsize=64)
def _decoded(dtype: str, scale: float) -> Any:  # Any: numpy
    """The element of each e4m3 code, rounded to the dtype, as its bit pattern."""
    np = _numpy()
    with np.errstate(all="ignore"):  # a damaged scale cannot get here unnoticed, and is no reason to warn
        values = (_table(np) * np.float32(scale)).astype("<f4")
        if dtype == "F32":
            return values.view("<u4")
        if dtype == "F16":
            return np.clip(values, -65504.0, 65504.0).astype("<f2").view("<u2")
        bits = values.view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _table(np: Any) -> Any:  # Any: numpy
    codes = np.arange(256, dtype=np.int32)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 512.0, (1 + mantissa / 8.0) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 0x80, -size, size).astype(np.float32)


def _widened(np: Any, halves: Any, dtype: str) -> Any:  # Any: numpy
    """16-bit patterns as F32."""
    return halves.view("<f2").astype("<f4") if dtype == "F16" else (halves.astype("<u4") << 16).view("<f4")
