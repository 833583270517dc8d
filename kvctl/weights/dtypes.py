"""Element types of the safetensors format: bit widths, the names torch gives them, which are refused. Pure; no torch.

Names and widths are those of the format's reference implementation (huggingface/safetensors, `enum Dtype`, 0.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvctl.core.errors import FormatError, IncompatibleError


@dataclass(frozen=True, slots=True)
class Dtype:
    """`bits` per element. `torch` is the attribute of the torch module, empty where torch has none.
    `packed`: elements that share one torch element along the last dimension (2 for F4, else 1).
    """

    name: str
    bits: int
    torch: str
    packed: int = 1


_ALL: Final = (
    Dtype("BOOL", 8, "bool"),
    Dtype("U8", 8, "uint8"),
    Dtype("I8", 8, "int8"),
    Dtype("F4", 4, "float4_e2m1fn_x2", packed=2),
    Dtype("F8_E4M3", 8, "float8_e4m3fn"),
    Dtype("F8_E5M2", 8, "float8_e5m2"),
    Dtype("F8_E8M0", 8, "float8_e8m0fnu"),
    Dtype("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    Dtype("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    Dtype("I16", 16, "int16"),
    Dtype("U16", 16, "uint16"),
    Dtype("F16", 16, "float16"),
    Dtype("BF16", 16, "bfloat16"),
    Dtype("I32", 32, "int32"),
    Dtype("U32", 32, "uint32"),
    Dtype("F32", 32, "float32"),
    Dtype("I64", 64, "int64"),
    Dtype("U64", 64, "uint64"),
    Dtype("F64", 64, "float64"),
    Dtype("C64", 64, "complex64"),
)
DTYPES: Final[Mapping[str, Dtype]] = MappingProxyType({dtype.name: dtype for dtype in _ALL})
# In the format, but no framework has tensors of them: three bytes hold four elements, and torch cannot view that.
REFUSED: Final = frozenset({"F6_E2M3", "F6_E3M2"})


def dtype_of(name: str, tensor: str, where: str) -> Dtype:
    """The type called `name`, used by `tensor` of the file `where`. Raises IncompatibleError."""
    found = DTYPES.get(name)
    if found is not None:
        return found
    known = name in REFUSED
    raise IncompatibleError(
        f"{where}: tensor {tensor!r} has dtype {name!r}, which {'no framework can hold' if known else 'is unknown'}",
        cause="6-bit elements have no torch dtype" if known else f"known are {', '.join(sorted(DTYPES))}",
        hint="convert the tensor to one of the known dtypes"
        if known
        else "the file is of another format or a newer one; convert it to plain safetensors",
        details={"file": where, "tensor": tensor, "dtype": name},
    )


def nbytes_of(dtype: Dtype, shape: tuple[int, ...], tensor: str, where: str) -> int:
    """Bytes of a tensor. Raises FormatError when the count overflows 63 bits or packed elements do not fill bytes."""
    count = 1
    for dim in shape:
        count *= dim
        if count >= 1 << 63:
            raise FormatError(
                f"{where}: tensor {tensor!r} has a shape that overflows",
                cause=f"shape {list(shape)} has more than 2^63 elements",
                hint="the header is damaged; fetch the file again",
            )
    bits = count * dtype.bits
    if bits >= 1 << 63:
        raise FormatError(
            f"{where}: tensor {tensor!r} has a size that overflows",
            cause=f"shape {list(shape)} of {dtype.name} is {bits} bits, the limit is 2^63",
            hint="the header is damaged; fetch the file again",
        )
    if dtype.packed > 1 and (not shape or shape[-1] % dtype.packed):
        raise FormatError(
            f"{where}: tensor {tensor!r} of packed dtype {dtype.name} has an odd last dimension",
            cause=f"shape {list(shape)}: {dtype.packed} elements share a byte, so the last dimension must be even",
            hint="pad the tensor, or store it as U8",
            details={"file": where, "tensor": tensor, "dtype": dtype.name},
        )
    return bits // 8


def torch_shape(dtype: Dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape torch gives the tensor: packed elements count as one."""
    return (*shape[:-1], shape[-1] // dtype.packed) if dtype.packed > 1 else shape
