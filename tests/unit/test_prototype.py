"""Declarations of kernels as they are written, and what each parameter takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from wideload.dtypes import DTYPES
from wideload.errors import CompileError, DtypeError, LayoutError, RangeError
from wideload.prototype import Parameter, parse_parameters


def parse(parameters: str, kernel: str = "f") -> tuple[Parameter, ...]:
    return parse_parameters(f'extern "C" __global__ void __launch_bounds__(256, 2) f({parameters}) {{}}', kernel)


@pytest.mark.parametrize(
    ("declared", "dtypes", "alignment", "is_const"),
    [
        ("const float* __restrict__ x", {torch.float32}, 4, True),
        ("float *x", {torch.float32}, 4, False),
        ("float const * x", {torch.float32}, 4, True),
        ("double* const x", {torch.float64}, 8, False),  # the pointer is const, what it points to is not
        ("float4* x", {torch.float32}, 16, False),
        ("const float2* x", {torch.float32, torch.complex64}, 8, True),
        ("float3* x", {torch.float32}, 4, False),
        ("int* x", {torch.int32}, 4, False),
        ("long long int* x", {torch.int64}, 8, False),
        ("const __nv_bfloat16* x", {torch.bfloat16}, 2, True),
        ("__half2* x", {torch.float16}, 4, False),
        ("bool* x", {torch.bool}, 1, False),
        ("float x[]", {torch.float32}, 4, False),
        ("unsigned short* x", {torch.uint16, torch.int16, torch.float16, torch.bfloat16}, 2, False),
        ("unsigned* x", {torch.uint32, torch.int32, torch.float32}, 4, False),
        ("uint64_t* x", {torch.uint64, torch.int64, torch.float64, torch.complex64}, 8, False),
        ("const uint4* x", set(), 16, True),
        ("void* x", set(), 1, False),
        ("const struct Row* x", set(), 1, True),
    ],
)
def test_pointers(declared: str, dtypes: set[torch.dtype], alignment: int, is_const: bool) -> None:
    (parameter,) = parse(declared)
    assert (parameter.name, parameter.is_pointer) == ("x", True)
    assert (set(parameter.dtypes), parameter.alignment, parameter.is_const) == (dtypes, alignment, is_const)


@pytest.mark.parametrize(
    ("declared", "scalar"),
    [
        ("int n", np.int32),
        ("const int n", np.int32),
        ("unsigned n", np.uint32),
        ("long long n", np.int64),
        ("unsigned long n", np.uint64),
        ("size_t n", np.uint64),
        ("std::size_t n", np.uint64),
        ("int64_t n", np.int64),
        ("char n", np.int8),
        ("float n", np.float32),
        ("double n", np.float64),
        ("bool n", np.bool_),
    ],
)
def test_numbers(declared: str, scalar: type) -> None:
    (parameter,) = parse(declared)
    assert (parameter.name, parameter.is_pointer, parameter.scalar) == ("n", False, scalar)


def test_the_kernel_among_others_and_comments() -> None:
    source = """
    // __global__ void f(int wrong)
    __device__ float helper(float a) { return a; }
    extern "C" __global__ void ff(double* y) {}
    extern "C" __global__ void f(const float* x, /* how
        many */ int n) { helper(x[0]); }
    """
    assert [parameter.name for parameter in parse_parameters(source, "f")] == ["x", "n"]
    assert parse("") == parse("void") == ()


def test_what_is_not_there_is_told_with_what_is() -> None:
    with pytest.raises(CompileError, match=r"no __global__ function 'g'; its kernels are f$"):
        parse("int n", "g")
    with pytest.raises(CompileError, match=r"it has none"):
        parse_parameters("void f(int n) {}", "f")
    with pytest.raises(CompileError, match=r"takes row by value, a Row; allowed: pointers and float"):
        parse("Row row")
    with pytest.raises(CompileError, match=r"without a name: 'int'"):
        parse("int")
    with pytest.raises(CompileError, match=r"parameter with a default: 'int n = 3'; allowed: none"):
        parse("float* y, int n = 3")


def test_the_definition_counts_where_a_declaration_stands_before_it() -> None:
    declared, defined = "__global__ void f(float*, int);", "__global__ void __launch_bounds__(128) f(float* x, int n) { }"
    for source in (declared + defined, defined + declared):
        assert [parameter.name for parameter in parse_parameters(source, "f")] == ["x", "n"]
    assert [parameter.name for parameter in parse_parameters("__global__ void f(float* x) BODY", "f")] == ["x"]


def test_tensors_are_checked() -> None:
    (x,) = parse("const float4* x")
    ready = torch.zeros(8)
    assert x.check_tensor(ready) is ready
    with pytest.raises(DtypeError, match=r"argument x \(float4\*\) is torch.float64; allowed: of float32. Convert it with .to"):
        x.check_tensor(ready.double())
    with pytest.raises(DtypeError, match=r"argument x \(float4\*\) is a list; allowed: a tensor of float32"):
        x.check_tensor([1.0])
    with pytest.raises(LayoutError, match=r"argument x \(float4\*\) starts 4 bytes behind a multiple of 16"):
        x.check_tensor(ready[1:])
    with pytest.raises(LayoutError, match="starts 4 bytes behind"):
        x.check_tensor(torch.empty(8, device="meta")[1:])
    assert x.check_tensor(ready[1:1]).numel() == 0, "nothing is read of what is empty"
    with pytest.raises(LayoutError, match="allowed: strided"):
        x.check_tensor(ready.to_sparse())
    (pair,) = parse("const float2* x")
    z = torch.zeros(8, dtype=torch.complex64)
    assert pair.check_tensor(z) is z
    for device in ("cpu", "meta"):
        with pytest.raises(LayoutError, match=r"argument x is a conj view.*Call .resolve_conj\(\)"):
            pair.check_tensor(z.to(device).conj())
        with pytest.raises(LayoutError, match=r"argument x is a neg view.*Call .resolve_neg\(\)"):
            x.check_tensor(torch.zeros(8, dtype=torch.complex128, device=device).to(torch.complex64).conj().imag)
    pair.check_tensor(z.conj().resolve_conj())
    (bits,) = parse("unsigned char* x")
    for dtype in DTYPES:
        assert (dtype in bits.dtypes) == (dtype.itemsize == 1)
    (anything,) = parse("void* x")
    assert anything.check_tensor(ready.to(torch.float8_e5m2)).numel() == 8


@pytest.mark.parametrize(
    ("declared", "value", "error"),
    [
        ("int n", 2**31, RangeError),
        ("int n", -(2**31) - 1, RangeError),
        ("unsigned n", -1, RangeError),
        ("int n", 1.0, DtypeError),
        ("float a", 1e300, RangeError),
        ("float a", -3.5e38, RangeError),
        ("double a", 10**400, RangeError),
        ("int n", True, DtypeError),
        ("int n", torch.tensor(1), DtypeError),
        ("float a", "1", DtypeError),
        ("float a", True, DtypeError),
        ("bool b", 1, DtypeError),
    ],
)
def test_numbers_are_checked(declared: str, value: Any, error: type[Exception]) -> None:
    (parameter,) = parse(declared)
    with pytest.raises(error, match=rf"argument {parameter.name} \({parameter.ctype}\)"):
        parameter.check_number(value)


def test_numbers_come_as_the_kernel_takes_them() -> None:
    n, m, a, b = parse("int n, size_t m, float a, bool b")
    taken = (n.check_number(-(2**31)), m.check_number(2**64 - 1), a.check_number(3), b.check_number(True))
    largest = 2**128 - 2**104
    assert [a.check_number(value).item() for value in (math.inf, -math.inf, 3.4028235e38)] == [math.inf, -math.inf, largest]
    assert math.isnan(a.check_number(math.nan))
    assert [type(value).__name__ for value in taken] == ["int32", "uint64", "float32", "bool"]
    assert [value.item() for value in taken] == [-(2**31), 2**64 - 1, 3.0, True]
