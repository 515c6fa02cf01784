"""Result and operand dtypes against torch itself, on tensors of many elements: every pair of dtypes, dims and numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import wideload as wl
from wideload.dtypes import DTYPES, is_storage
from wideload.errors import DtypeError
from wideload.expr import Apply, Const, Load, Number
from wideload.ops_table import OPS
from wideload.promotion import infer_dtype, operand_dtypes, sample_of

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i16, i32, i64, u8, boolean = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool

COMPUTED = [dtype for dtype in DTYPES if not is_storage(dtype) and dtype != torch.complex32]
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "pow": lambda a, b: a**b,
    "lt": lambda a, b: a < b,
    "and": lambda a, b: a & b,
    "lshift": lambda a, b: a << b,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "logical_xor": torch.logical_xor,
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=2),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
}


def operands() -> Iterator[Any]:
    """One operand of each kind that torch on the CPU computes with: many elements, no dims, a number."""
    for dtype in COMPUTED:
        yield torch.full((2,), 2).to(dtype)
        yield torch.full((), 2).to(dtype)
    yield from (True, 2, 2.5)


def outcome(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args).dtype
    except (RuntimeError, TypeError, NotImplementedError):
        return "refused"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_complex32_has_the_dtypes_of_cuda_where_the_cpu_refuses() -> None:
    """By torch's table of promotion; the CPU has no quotient, logarithm or interpolation of complex32."""
    c32, c64 = torch.complex32, torch.complex64
    x = torch.ones(2).to(c32)
    rows: list[tuple[Callable[[Any, Any], Any], Any, Any, torch.dtype]] = [
        (lambda a, b: a / b, x, x, c32),
        (lambda a, b: a / b, x, 2.0, c32),
        (lambda a, b: a / b, 2.0, x, c32),
        (lambda a, b: a / b, x, torch.tensor(2.0, dtype=f64), c32),
        (lambda a, b: b / a, x, torch.tensor(2.0, dtype=f64), c32),
        (lambda a, b: a / b, x, torch.ones(2), c64),
        (lambda a, b: a / b, x, torch.ones(2, dtype=f16), c32),
        (lambda a, b: a / b, x, torch.ones(2, dtype=bf16), c64),
        (lambda a, b: a / b, torch.ones(2, dtype=f16), 2j, c32),
        (lambda a, b: a.log(), x, 1, c32),
        (lambda a, b: a.angle(), x, 1, f16),
        (lambda a, b: torch.lerp(a, a, b), x, 0.5, c32),
        (lambda a, b: torch.addcdiv(a, a, b), x, x, c32),
    ]
    for function, a, b, want in rows:
        assert wl.fuse(function)(a, b).dtype == want


def test_fp8_is_stored_and_converted_but_not_computed_with() -> None:
    for dtype in filter(is_storage, DTYPES):
        x = torch.ones(2).to(dtype)
        for function in (lambda x: x + x, lambda x: x * 2, torch.exp, torch.nn.functional.silu, lambda x: x < x):
            with pytest.raises(wl.DtypeError, match=r"fp8 is stored and converted, not computed with: use \.float\(\) first"):
                wl.fuse(function)(x)
        y = wl.fuse(lambda x: torch.where(x == x, x, x.clone()))(x)
        assert (y.dtype, y.float().tolist()) == (dtype, [1.0, 1.0])


@pytest.mark.parametrize("name", BINARY)
def test_every_pair_of_operands_gives_torchs_dtype(name: str) -> None:
    function = BINARY[name]
    fused = wl.fuse(lambda a, b: function(a, b))
    compared = 0
    for a, b in itertools.product(operands(), operands()):
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            continue
        want, got = outcome(function, a, b), outcome(fused, a, b)
        if want == "refused" and outcome(lambda a, b: a + b, a, b) == torch.complex32:
            assert got in ("refused", torch.complex32, torch.bool)  # of CUDA: the CPU computes little of complex32
        else:
            assert got == want, f"{name}({a!r}, {b!r}): {got}, torch {want}"
        compared += 1
    assert compared == (2 * len(COMPUTED) + 3) ** 2 - 3 * 3


def test_where_gives_torchs_dtype() -> None:
    fused = wl.fuse(torch.where)
    condition = torch.tensor([True, False])
    for a, b in itertools.product(operands(), operands()):
        want, got = outcome(torch.where, condition, a, b), outcome(fused, condition, a, b)
        assert got == want, f"where(m, {a!r}, {b!r}): {got}, torch {want}"


@pytest.mark.parametrize("dtype", [f64, bf16], ids=str)
def test_the_default_dtype_counts(dtype: torch.dtype) -> None:
    function = BINARY["truediv"]
    fused = wl.fuse(lambda a, b: function(a, b))
    integers = torch.tensor([4, 6])
    assert fused(integers, 2).dtype == f32
    with default_dtype(dtype):
        assert fused(integers, 2).dtype == (integers / 2).dtype == dtype
        assert wl.fuse(lambda m: torch.where(m > 4, 1.5, 2.5))(integers).dtype == dtype
    assert fused(integers, 2).dtype == f32


# ---- the functions by themselves


def load(dtype: torch.dtype, ndim: int) -> Load:
    return Load(0, "x", dtype, ndim)


def test_a_sample_tells_constants_and_runtime_numbers_apart() -> None:
    assert sample_of(load(bf16, 2)) == (bf16, False)
    assert sample_of(load(bf16, 0)) == (bf16, True)
    assert sample_of(Number(0, int)) is int
    assert sample_of(Const(-0.0)) == (float, "-0.0")
    assert sample_of(Const(True)) == (bool, "True")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 2**63 - 1, -(2**63), True, False, 2 + 1j])
def test_every_constant_is_asked_about(value: complex) -> None:
    x = torch.ones(3)
    got = infer_dtype(OPS["mul"], (sample_of(load(f32, 1)), sample_of(Const(value))), f32)
    assert got == (x * value).dtype


def test_a_refusal_is_torchs_own_in_the_users_words() -> None:
    with pytest.raises(DtypeError, match=r"torch refuses bitwise_and\(input: f32, other: i64\): .*not implemented for 'Float'"):
        infer_dtype(OPS["bitwise_and"], ((f32, False), (i64, False)), f32)
    with pytest.raises(DtypeError, match=r"torch refuses sub\(input: bool, other: bool\): Subtraction"):
        infer_dtype(OPS["sub"], ((boolean, False), (boolean, False)), f32)
    with pytest.raises(DtypeError, match=r"pow\(input: i64, exponent: -1\)"):
        infer_dtype(OPS["pow"], ((i64, False), (int, "-1")), f32)


def test_a_half_that_the_cpu_lacks_is_asked_about_one_width_up() -> None:
    def lacking(a: torch.Tensor) -> torch.Tensor:
        if a.dtype == f16:
            raise NotImplementedError("not implemented for 'Half'")
        return a + 1

    class Row:
        name, operands, torch = "lacking", ("input",), staticmethod(lacking)

    assert infer_dtype(Row, ((f16, False),), f32) == f16  # type: ignore[arg-type]
    assert infer_dtype(Row, ((f64, False),), f32) == f64  # type: ignore[arg-type]


def apply(op: str, nodes: list[Any], dtype: torch.dtype) -> tuple[torch.dtype | None, ...]:
    return operand_dtypes(nodes, Apply(OPS[op], tuple(range(len(nodes))), dtype, 1))


def test_operands_are_brought_to_the_dtype_that_the_op_computes_in() -> None:
    assert apply("add", [load(i8, 1), load(f32, 1)], f32) == (f32, f32)
    assert apply("where", [load(i64, 1), load(f16, 1), Const(0.0)], f16) == (boolean, f16, f16)
    assert apply("full_like_f64", [load(i8, 1), Const(1)], f64) == (None, f64)
    # Comparisons compute in the common dtype, not in that of their result; a number or a 0-dim tensor counts less.
    assert apply("lt", [load(i8, 1), load(i64, 1)], boolean) == (i64, i64)
    assert apply("lt", [load(i8, 1), load(i64, 0)], boolean) == (i8, i8)
    assert apply("lt", [load(i8, 1), Const(2.5)], boolean) == (f32, f32)
    assert apply("lt", [load(bf16, 1), Number(0, float)], boolean) == (bf16, bf16)
    assert apply("lt", [load(u8, 1), load(i8, 1)], boolean) == (i16, i16)
    assert apply("eq", [load(f16, 1), load(bf16, 1)], boolean) == (f32, f32)
    assert apply("frexp_exponent", [load(f16, 1)], i32) == (f16,)
    assert apply("logical_and", [load(f32, 1), load(i32, 1)], boolean) == (boolean, boolean)
    assert apply("isnan", [load(i32, 0)], boolean) == (i32,)
