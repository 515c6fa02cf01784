"""Turns a torch dtype into the C++ types that kernels store and compute it with.

One row a dtype. Knows nothing of ops, tensors or kernels.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from wideload.errors import DtypeError

__all__ = ["DTYPES", "LIMITED", "Kind", "ScalarType", "dtype_name", "is_half", "is_rounded", "is_storage", "scalar_type", "widened"]

Kind = Literal["float", "complex", "signed", "unsigned", "bool"]
"""Which C++ expression of an op applies: the arithmetic differs by kind, not by width."""


class ScalarType(NamedTuple):
    """How kernels hold one dtype.

    ``storage`` is the C++ type of an element in memory, ``compute`` the type that arithmetic on it uses
    (torch's *opmath*: fp16, bf16 and fp8 compute in float), ``kind`` picks the op's expression.
    """

    dtype: torch.dtype
    name: str
    storage: str
    compute: str
    kind: Kind
    itemsize: int


_SATURATES = bool(torch.tensor(1000.0).to(torch.float8_e4m3fn).float() == torch.finfo(torch.float8_e4m3fn).max)
"""Whether this torch's conversion to e4m3fn gives the largest number for what is too large, as 2.13 does; before, it gave NaN."""

DTYPES: dict[torch.dtype, ScalarType] = {
    row.dtype: row
    for row in (
        ScalarType(torch.float64, "f64", "double", "double", "float", 8),
        ScalarType(torch.float32, "f32", "float", "float", "float", 4),
        ScalarType(torch.float16, "f16", "f16", "float", "float", 2),
        ScalarType(torch.bfloat16, "bf16", "bf16", "float", "float", 2),
        ScalarType(torch.complex128, "c128", "complex<double>", "complex<double>", "complex", 16),
        ScalarType(torch.complex64, "c64", "complex<float>", "complex<float>", "complex", 8),
        ScalarType(torch.complex32, "c32", "complex32", "complex<float>", "complex", 4),
        ScalarType(torch.int8, "i8", "signed char", "signed char", "signed", 1),
        ScalarType(torch.int16, "i16", "short", "short", "signed", 2),
        ScalarType(torch.int32, "i32", "int", "int", "signed", 4),
        ScalarType(torch.int64, "i64", "long long", "long long", "signed", 8),
        ScalarType(torch.uint8, "u8", "unsigned char", "unsigned char", "unsigned", 1),
        ScalarType(torch.uint16, "u16", "unsigned short", "unsigned short", "unsigned", 2),
        ScalarType(torch.uint32, "u32", "unsigned", "unsigned", "unsigned", 4),
        ScalarType(torch.uint64, "u64", "unsigned long long", "unsigned long long", "unsigned", 8),
        ScalarType(torch.float8_e4m3fn, "e4m3fn", f"e4m3fn<{str(_SATURATES).lower()}>", "float", "float", 1),
        ScalarType(torch.float8_e5m2, "e5m2", "e5m2", "float", "float", 1),
        ScalarType(torch.float8_e4m3fnuz, "e4m3fnuz", "e4m3fnuz", "float", "float", 1),
        ScalarType(torch.float8_e5m2fnuz, "e5m2fnuz", "e5m2fnuz", "float", "float", 1),
        ScalarType(torch.float8_e8m0fnu, "e8m0fnu", "e8m0fnu", "float", "float", 1),
        ScalarType(torch.bool, "bool", "boolean", "bool", "bool", 1),
    )
}
"""Every dtype that a kernel can load, compute and store. ``f16``, ``bf16``, ``boolean`` and those of fp8 are one-member structs of
the prelude, so that a load that forgets to convert does not compile; a bool in memory may be any non-zero byte."""

LIMITED: dict[torch.dtype, ScalarType] = {
    torch.float8_e4m3fn: DTYPES[torch.float8_e4m3fn]._replace(storage="e4m3fn<true>"),
    torch.float8_e5m2: DTYPES[torch.float8_e5m2]._replace(storage="e5m2_limited"),
}
"""The same types for values that are limited to what they hold: what is larger becomes the largest number, as the hardware has it."""

_HALVES = frozenset({torch.float16, torch.bfloat16, torch.complex32})


def is_half(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is fp16, bf16 or complex32: computed in the type twice as wide, and rounded when it is stored."""
    return dtype in _HALVES


def widened(dtype: torch.dtype) -> torch.dtype:
    """The type that a half is computed in; other dtypes as they are."""
    return (torch.complex64 if dtype.is_complex else torch.float32) if is_half(dtype) else dtype


def is_storage(dtype: torch.dtype) -> bool:
    """Whether torch stores and converts ``dtype`` but computes nothing in it: fp8."""
    return dtype.is_floating_point and dtype.itemsize == 1


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether kernels hold ``dtype`` in a wider type and round it when it is stored: halves and fp8."""
    return is_half(dtype) or is_storage(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """The short name: ``bf16`` for ``torch.bfloat16``; torch's own name where there is no short one."""
    row = DTYPES.get(dtype)
    return row.name if row else str(dtype).removeprefix("torch.")


def scalar_type(dtype: torch.dtype, what: str) -> ScalarType:
    """The row of ``dtype``; ``what`` names the operand or op in the ``DtypeError`` raised when kernels cannot hold it."""
    row = DTYPES.get(dtype)
    if row is None:
        allowed = ", ".join(r.name for r in DTYPES.values())
        raise DtypeError(
            f"{what} is {dtype}, which CUDA kernels of wideload do not compute yet; allowed: {allowed}. Convert it with .to() first."
        )
    return row
